package dedup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// Limits of one run.
const (
	daysAhead     = 32                     // days ahead for which partitions are made
	urgentAhead   = 7 * 24 * time.Hour     // making partitions waits for a quiet moment while they exist for so long
	emptyMax      = 30                     // empty past days that may wait for a quiet moment to be dropped
	dropMargin    = time.Hour              // claims are kept this much longer than needed: transactions take time, and producers' clocks are inexact
	runMax        = 10 * time.Minute       // of one run, and so how long others wait for a holder that died
	lockWaitMax   = 300 * time.Millisecond // bounds the wait for a lock, because claims queue behind it
	lookMax       = 500 * time.Millisecond // for reading a day under its lock
	sweepBlocks   = 256                    // blocks of 8 KiB in one transaction
	sweepRunMax   = 16_384                 // blocks in one run, 128 MiB
	statementsMax = time.Minute
	lockIdleMax   = 3 * time.Second // a process that freezes while it holds the lock loses it
)

// Report of a run of Maintain.
type Report struct {
	// Elsewhere: another process maintains the claims; nothing was done.
	Elsewhere bool `json:"elsewhere,omitempty"`
	// Made lists the partitions that were created for coming days.
	Made []string `json:"made,omitempty"`
	// Truncated lists the days whose claims were forgotten. Their partitions stay until they are
	// dropped.
	Truncated []string `json:"truncated,omitempty"`
	// Dropped lists the empty partitions of old days that were removed. Dropping them forgets no
	// claims.
	Dropped []string `json:"dropped,omitempty"`
	// Swept counts the claims that were deleted one by one.
	Swept int64 `json:"swept,omitempty"`
	// Horizon is the time up to which claims may be forgotten; zero: none may be.
	Horizon time.Time `json:"horizon,omitzero"`
	// HeldBack names the position that keeps claims beyond the longest window; empty: none does.
	HeldBack string `json:"held_back,omitempty"`
}

// MaintainOptions of Maintain. Owner is required.
type MaintainOptions struct {
	// Owner names the process, for people who inspect the lease. 1 to 255 bytes.
	Owner string
	// DryRun reports what would be truncated and dropped, and changes nothing. It does not sweep or
	// count.
	DryRun bool
}

// Maintain creates the partitions of the coming days, truncates the days whose claims are no longer
// needed, sweeps claims that cannot be forgotten as a day, and drops empty partitions when the
// table is quiet. One call is one run with a bounded amount of work. Any number of processes may
// call it: one at a time works, and the others return Report.Elsewhere.
//
// The database's clock, the longest window of all registered consumers, and the stored positions
// decide which claims may be forgotten. Claims that a consumer has not passed stay, however old
// they are. The transaction that forgets claims also records, for each consumer that had them, up
// to which time claims may be missing (QueueForgotten).
//
// Claims wait for a lock of a run for 0.3 s at most, those of a day that is being forgotten for half a
// second more; for up to 2 s if partitions exist for fewer than
// 7 of the coming days (a claim always has a partition), or more than 30 empty days could not be
// dropped. A run ends after 10 minutes.
//
// The steps do not depend on each other: an error of one step is reported, and the others still
// run. After an error the run may be repeated at any time. A lock that could not be acquired is an
// error, unless the work can still wait.
func (c *Claims) Maintain(ctx context.Context, pool *pgxpool.Pool, opts MaintainOptions) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, runMax) // a connection that hangs must not stop maintenance
	defer cancel()
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("maintain claims: %w", err)
	}
	defer conn.Release()
	m := &maintenance{Claims: c, conn: conn.Conn(), lookMax: cmp.Or(c.lookMax, lookMax)}
	if opts.DryRun {
		err = m.foresee(ctx)
	} else {
		err = m.runLeased(ctx, opts.Owner)
	}
	if err != nil {
		err = fmt.Errorf("maintain claims: %w", err)
	}
	return m.report, err
}

// KeepUp calls Maintain about every minute until ctx ends; the first call comes after some seconds.
// It logs errors, and the next run does the missing work.
func (c *Claims) KeepUp(ctx context.Context, pool *pgxpool.Pool, owner string, log *slog.Logger) {
	for wait := keepUpFirst/2 + rand.N(keepUpFirst); pause.For(ctx, wait); wait = keepUpEvery/2 + rand.N(keepUpEvery) { //nolint:gosec // jitter needs no secret
		report, err := c.Maintain(ctx, pool, MaintainOptions{Owner: owner})
		switch {
		case ctx.Err() != nil:
		case pgerr.Is(err, pgerr.InsufficientPrivilege):
			log.WarnContext(ctx, "this consumer cannot delete old claims: its role may not change partitions; run \"outbox-relay prune\" every hour with the role that owns the tables", "error", err)
			return
		case err != nil:
			log.WarnContext(ctx, "maintenance of claims failed in part; the next run retries", "error", err, "made", report.Made,
				"truncated", report.Truncated, "dropped", report.Dropped, "swept", report.Swept)
		case len(report.Made)+len(report.Truncated)+len(report.Dropped) > 0 || report.Swept > 0:
			log.InfoContext(ctx, "claims were maintained", "made", report.Made, "truncated", report.Truncated, "dropped", report.Dropped,
				"swept", report.Swept, "held_back", report.HeldBack)
		}
	}
}

const (
	keepUpFirst = 10 * time.Second
	keepUpEvery = time.Minute
)

// maintenance is one run.
type maintenance struct {
	*Claims
	conn    *pgx.Conn
	lookMax time.Duration
	epoch   int64
	window  *time.Time // up to which the longest window allows forgetting
	slowest string     // the position that is behind that
	report  Report
}

func (m *maintenance) runLeased(ctx context.Context, owner string) error {
	// One process at a time works. The lease only saves work: each step is correct by its own locks.
	switch err := m.conn.QueryRow(ctx, m.in(leaseSQL), owner, runMax).Scan(&m.epoch); {
	case errors.Is(err, pgx.ErrNoRows):
		m.report.Elsewhere = true
		return nil
	case err != nil:
		return fmt.Errorf("take the lease: %w", err)
	}
	err := m.steps(ctx)
	if m.conn.IsClosed() {
		return err
	}
	// After a failure, the next run may begin at once, and the time of the last complete run is
	// kept.
	_, errDone := m.conn.Exec(ctx, m.in(leaseDoneSQL), m.epoch, err == nil)
	return errors.Join(err, errDone)
}

// foresee is the dry run.
func (m *maintenance) foresee(ctx context.Context) error {
	days, err := m.behind(ctx, m.conn)
	for _, d := range days {
		if m.report.Dropped = append(m.report.Dropped, d.name); d.bytes > 0 {
			m.report.Truncated = append(m.report.Truncated, d.name)
		}
	}
	return err
}

// steps runs the steps in this order, even if an earlier one failed. Steps that need no lock come
// first.
func (m *maintenance) steps(ctx context.Context) (failed error) {
	sweep := func(name string) func(context.Context) error {
		return func(ctx context.Context) error { return m.sweep(ctx, name) }
	}
	for _, step := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"sweep processed_messages_untimed", sweep("untimed")},
		{"sweep processed_messages_past", sweep("past")},
		{"sweep processed_messages_ahead", sweep("ahead")},
		{"forget days", m.forgetDays},
		{"make partitions", m.makeAhead},
		{"drop partitions", m.dropEmpty},
	} {
		err := step.do(ctx)
		if err == nil {
			continue
		}
		failed = errors.Join(failed, fmt.Errorf("%s: %w", step.what, err))
		if ctx.Err() != nil || m.conn.IsClosed() {
			break
		}
	}
	return failed
}

// limited runs f in a transaction with a lock timeout (wait) and a statement timeout (statement).
func (m *maintenance) limited(ctx context.Context, wait, statement time.Duration, f func(tx pgx.Tx) error) error {
	err := pgx.BeginTxFunc(ctx, m.conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockSettingsSQL, millis(wait), millis(statement), millis(lockIdleMax)); err != nil {
			return err
		}
		return f(tx)
	})
	if pgerr.LockConflict(err) {
		return fmt.Errorf("lock conflict with running claims, the next run retries: %w", err)
	}
	return err
}

// locked runs f in a transaction that changes partitions. No claim runs at the same time, so f
// reads the current state. Claims queue behind it, so it gives up soon: what is not urgent waits for a
// quiet moment, and failing to lock for it is no error.
func (m *maintenance) locked(ctx context.Context, urgent bool, f func(tx pgx.Tx) error) (done bool, err error) {
	wait, statement := 50*time.Millisecond, time.Second
	if urgent {
		wait, statement = 2*time.Second, statementsMax
	}
	err = m.limited(ctx, wait, statement, func(tx pgx.Tx) error {
		// ONLY: the partitions are locked when they are changed. Every claim needs the parent.
		if _, err := tx.Exec(ctx, m.in("LOCK TABLE ONLY effectonce.processed_messages IN ACCESS EXCLUSIVE MODE")); err != nil {
			return err
		}
		return f(tx)
	})
	if !urgent && ctx.Err() == nil && pgerr.Is(err, pgerr.LockNotAvailable, pgerr.QueryCanceled) {
		return false, nil
	}
	return err == nil, err
}

// do executes a statement that names tables and bounds.
func do(ctx context.Context, tx pgx.Tx, format string, args ...any) error {
	_, err := tx.Exec(ctx, fmt.Sprintf(format, args...))
	return err
}

func millis(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }

func (m *maintenance) in(sql string) string { return migrations.InSchema(sql, m.schema) }

// table returns the quoted name of a partition.
func (m *maintenance) table(name string) string {
	return pgx.Identifier{m.schema, "processed_messages_" + name}.Sanitize()
}
