package dedup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/migrations"
)

// Limits of one run.
const (
	daysAhead     = 32              // partitions are made for so many days
	dropMargin    = time.Hour       // claims are kept so much longer than their window: transactions end meanwhile
	leaseMax      = 2 * time.Minute // how long a holder that died keeps others waiting
	lockWaitMax   = "300ms"         // claims queue behind a lock that is waited for: not for longer than this
	sweepBlocks   = 256             // of 8 KiB, in one transaction
	sweepRunMax   = 16_384          // blocks in one run, 128 MiB
	attemptsMax   = 30 * 24 * time.Hour
	statementsMax = time.Minute
	lockIdleMax   = 3 * time.Second // a process that freezes with the lock loses it
)

// Report of a run of Maintain.
type Report struct {
	// Elsewhere: another process does it; nothing was done.
	Elsewhere bool `json:"elsewhere,omitempty"`
	// Made and Dropped are partitions.
	Made    []string `json:"made,omitempty"`
	Dropped []string `json:"dropped,omitempty"`
	// Swept are claims that were deleted one by one.
	Swept int64 `json:"swept,omitempty"`
	// Horizon is up to where claims may be forgotten; zero: nothing may.
	Horizon time.Time `json:"horizon,omitzero"`
	// HeldBack names the position that keeps claims beyond the longest window; empty: none does.
	HeldBack string `json:"held_back,omitempty"`
}

// MaintainOptions of Maintain. Owner is required.
type MaintainOptions struct {
	// Owner names the process, for people who look at the lease. 1 to 255 bytes.
	Owner string
	// DryRun reports what would be dropped, and changes nothing. Nothing is swept or counted then.
	DryRun bool
}

// Maintain makes the partitions of the coming days, drops those that nobody needs any more and sweeps what
// cannot be dropped as a day: one run of it, bounded in what it does. Any number of processes may call it;
// one at a time works, the others get Report.Elsewhere. Whether a claim may go is decided by the database's
// clock, the longest window of all registered consumers, and the stored positions: what a consumer has not
// passed stays, however old it is. After an error the run may be repeated at any time; a lock that was not
// to be had is one.
func (c *Claims) Maintain(ctx context.Context, pool *pgxpool.Pool, opts MaintainOptions) (Report, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("maintain claims: %w", err)
	}
	defer conn.Release()
	m := &maintenance{Claims: c, conn: conn.Conn(), dry: opts.DryRun}
	if err := m.run(ctx, opts.Owner); err != nil {
		return m.report, fmt.Errorf("maintain claims: %w", err)
	}
	return m.report, nil
}

// KeepUp calls Maintain every minute or so until ctx ends, for the first time after some seconds. Errors are
// logged: the next run makes up for them.
func (c *Claims) KeepUp(ctx context.Context, pool *pgxpool.Pool, owner string, log *slog.Logger) {
	for wait := keepUpFirst/2 + rand.N(keepUpFirst); ; wait = keepUpEvery/2 + rand.N(keepUpEvery) { //nolint:gosec // jitter needs no secret
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		report, err := c.Maintain(ctx, pool, MaintainOptions{Owner: owner})
		switch {
		case ctx.Err() != nil:
		case notAllowed(err):
			log.WarnContext(ctx, "claims are not forgotten by this consumer: its role may not change partitions. Let a role that owns the tables run \"outbox-relay prune\" every hour", "error", err)
			return
		case err != nil:
			log.WarnContext(ctx, "claims were not maintained; it is tried again", "error", err)
		case len(report.Made)+len(report.Dropped) > 0 || report.Swept > 0:
			log.InfoContext(ctx, "claims were maintained", "made", report.Made, "dropped", report.Dropped, "swept", report.Swept, "held_back", report.HeldBack)
		}
	}
}

func notAllowed(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "42501"
}

const (
	keepUpFirst = 10 * time.Second
	keepUpEvery = time.Minute
)

// maintenance is one run.
type maintenance struct {
	*Claims
	conn   *pgx.Conn
	dry    bool
	epoch  int64
	report Report
}

func (m *maintenance) run(ctx context.Context, owner string) error {
	if !m.dry {
		leased, err := m.lease(ctx, owner)
		if err != nil || !leased {
			m.report.Elsewhere = err == nil
			return err
		}
		if err := m.makeAhead(ctx); err != nil {
			return fmt.Errorf("make partitions: %w", err)
		}
	}
	if err := m.dropBehind(ctx); err != nil {
		return fmt.Errorf("drop partitions: %w", err)
	}
	if m.dry {
		return nil
	}
	for _, table := range []string{"untimed", "past", "ahead"} {
		if err := m.sweep(ctx, table); err != nil {
			return fmt.Errorf("sweep processed_messages_%s: %w", table, err)
		}
	}
	if _, err := m.conn.Exec(ctx, m.in(forgetAttemptsSQL), attemptsMax); err != nil {
		return fmt.Errorf("forget attempts: %w", err)
	}
	_, err := m.conn.Exec(ctx, m.in(leaseDoneSQL), m.epoch)
	return err
}

// lease makes sure that one process at a time works. It is for economy: each step decides by its own locks.
func (m *maintenance) lease(ctx context.Context, owner string) (bool, error) {
	err := m.conn.QueryRow(ctx, m.in(leaseSQL), owner, leaseMax).Scan(&m.epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("take the lease: %w", err)
	}
	return true, nil
}

// errLeaseLost ends a run that took too long; what it did stays right.
var errLeaseLost = errors.New("another process took the lease over")

// renew keeps the lease between two steps.
func (m *maintenance) renew(ctx context.Context) error {
	tag, err := m.conn.Exec(ctx, m.in(renewSQL), m.epoch, leaseMax)
	if err == nil && tag.RowsAffected() == 0 {
		err = errLeaseLost
	}
	return err
}

// locked runs f in a transaction that changes partitions: no claim runs meanwhile, and what f looks at is as
// it is. Waiting for the lock is short, because claims queue behind it.
func (m *maintenance) locked(ctx context.Context, f func(tx pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, m.conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockSettingsSQL, lockWaitMax, fmt.Sprint(statementsMax.Milliseconds()), fmt.Sprint(lockIdleMax.Milliseconds())); err != nil {
			return err
		}
		// ONLY: the partitions are locked as they are changed. Every claim needs the parent.
		if _, err := tx.Exec(ctx, m.in("LOCK TABLE ONLY effectonce.processed_messages IN ACCESS EXCLUSIVE MODE")); err != nil {
			var pgErr *pgconn.PgError
			if errors.As(err, &pgErr) && pgErr.Code == "55P03" {
				return fmt.Errorf("claims are at work, it is tried again: %w", err)
			}
			return err
		}
		return f(tx)
	})
}

func (m *maintenance) in(sql string) string { return migrations.InSchema(sql, m.schema) }

// table is the quoted name of a partition.
func (m *maintenance) table(name string) string {
	return pgx.Identifier{m.schema, "processed_messages_" + name}.Sanitize()
}
