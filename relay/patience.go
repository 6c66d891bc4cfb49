package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
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
	return p.limited(ctx, p.patience, errNoAnswer)
}

// limited is a wait that ends by itself.
func (p *publisher) limited(ctx context.Context, limit time.Duration, cause error) (context.Context, context.CancelFunc) {
	ended := p.expect(limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, cause)
	return ctx, func() { cancel(); ended() }
}

// silence says so where a statement took longer than its limit.
func silence(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errNoAnswer) {
		return fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return err
}

// transact runs fn in a transaction that a process which freezes inside, or is cut off, loses after a Lease, and that waits
// for somebody's lock as long as for a statement. Read committed, whatever the role's default is: what is looked at has to
// be newer than the locks.
func (r *Relay) transact(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockSettingsSQL, milliseconds(r.patience), milliseconds(r.cfg.Lease)); err != nil {
			return err
		}
		return fn(tx)
	})
}

// brief is the context of what a member does between two renewals of its leases.
func (m *member) brief(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, m.cfg.Lease)
}
