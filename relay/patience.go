package relay

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Each statement has a limit. A connection can be silent for ever (a backend that is stopped, a network that drops
// packets, somebody's lock) while others, which renew the leases, work: without a limit nothing would be published, and
// nobody would take over. What ends here is tried again on another connection.
const (
	patienceMin = time.Minute
	// A statement that is only slow gets twice the time after each trouble, this often.
	patienceGrows = 4
)

var errNoAnswer = errors.New("the database does not answer on this connection, or somebody locks the table")

func (c *Config) patience() time.Duration { return max(c.Lease, patienceMin) }

// patient is the context of a statement of the work on a shard.
func (p *publisher) patient(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, p.patience, errNoAnswer)
}

// silence says so where a statement took longer than its limit.
func silence(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errNoAnswer) {
		return fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return err
}

// brief is the context of what a member does between two renewals of its leases.
func (m *member) brief(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, m.cfg.Lease)
}
