package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Each statement has a limit. A connection can be silent forever (a stopped backend, a network that
// drops packets, a lock of another session) while others, which renew the leases, work. Without a
// limit nothing would be published, and no replica would take over. A statement that hits its limit
// is retried on another connection.
const (
	patienceMin = time.Minute
	// After each failure, a statement that is only slow gets twice the time. This is how often.
	patienceGrows = 4
)

var errNoAnswer = errors.New("the database does not answer on this connection, or another session locks the table")

func (c *Config) patience() time.Duration { return max(c.Lease, patienceMin) }

// patient is the context of a statement of the work on a shard.
func (p *publisher) patient(ctx context.Context) (context.Context, context.CancelFunc) {
	return p.limited(ctx, p.patience, errNoAnswer)
}

// limited is the context of a wait that ends by itself.
func (p *publisher) limited(ctx context.Context, limit time.Duration, cause error) (context.Context, context.CancelFunc) {
	ended := p.expect(limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, cause)
	return ctx, func() { cancel(); ended() }
}

// silence marks the error of a statement that took longer than its limit.
func silence(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errNoAnswer) {
		return fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return err
}

// transact runs fn in a transaction. The transaction ends after a Lease if the process freezes
// inside it or is cut off. It waits for another session's lock as long as a statement may. Read
// committed, whatever the role's default is: what fn reads must be newer than its locks.
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
