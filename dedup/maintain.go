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
	daysAhead     = 32                     // partitions are made for so many days
	emptyMax      = 30                     // empty days of the past that are left until a quiet moment
	dropMargin    = time.Hour              // claims are kept so much longer than needed: transactions take time, clocks of producers are off
	leaseMax      = 2 * time.Minute        // how long a holder that died keeps others waiting
	lockWaitMax   = 300 * time.Millisecond // claims queue behind a lock that is waited for: not for longer than this
	lookMax       = 500 * time.Millisecond // for a look through a day under its lock
	sweepBlocks   = 256                    // of 8 KiB, in one transaction
	sweepRunMax   = 16_384                 // blocks in one run, 128 MiB
	attemptsMax   = 30 * 24 * time.Hour
	statementsMax = time.Minute
	lockIdleMax   = 3 * time.Second // a process that freezes with the lock loses it
)

// Report of a run of Maintain.
type Report struct {
	// Elsewhere: another process does it; nothing was done.
	Elsewhere bool `json:"elsewhere,omitempty"`
	// Made are partitions of coming days.
	Made []string `json:"made,omitempty"`
	// Truncated are days whose claims were forgotten. Their partitions stay until they are dropped.
	Truncated []string `json:"truncated,omitempty"`
	// Dropped are empty partitions of old days that were removed. That forgets nothing.
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
	// DryRun reports what would be truncated and dropped, and changes nothing. Nothing is swept or counted then.
	DryRun bool
}

// Maintain makes the partitions of the coming days, truncates the days whose claims nothing needs any more, sweeps
// what cannot be forgotten as a day, and drops empty partitions when the table is quiet: one run of it, bounded in
// what it does. Any number of processes may call it; one at a time works, the others get Report.Elsewhere.
//
// Whether a claim may go is decided by the database's clock, the longest window of all registered consumers, and the
// stored positions: what a consumer has not passed stays, however old it is. The transaction that forgets claims
// notes for each consumer that had them up to when (QueueForgotten).
//
// Claims wait for a lock of a run for 0.3 s at most, unless partitions of the coming days are missing: for up to 2 s
// when there are fewer than 7 left, 5 s when there are fewer than 2 (a claim is never without a partition), and 2 s when
// more than 30 empty days could not be dropped.
//
// The steps do not depend on each other: an error of one is reported and the others are done all the same. After an error
// the run may be repeated at any time; a lock that was not to be had is one, except where there is time until it is
// needed.
func (c *Claims) Maintain(ctx context.Context, pool *pgxpool.Pool, opts MaintainOptions) (Report, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("maintain claims: %w", err)
	}
	defer conn.Release()
	m := &maintenance{Claims: c, conn: conn.Conn(), dry: opts.DryRun, lookMax: lookMax}
	if c.lookMax != 0 {
		m.lookMax = c.lookMax
	}
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
		run, cancel := context.WithTimeout(ctx, keepUpMax)
		report, err := c.Maintain(run, pool, MaintainOptions{Owner: owner})
		cancel()
		switch {
		case ctx.Err() != nil:
		case notAllowed(err):
			log.WarnContext(ctx, "claims are not forgotten by this consumer: its role may not change partitions. Let a role that owns the tables run \"outbox-relay prune\" every hour", "error", err)
			return
		case err != nil:
			log.WarnContext(ctx, "claims were not maintained completely; it is tried again", "error", err, "made", report.Made,
				"truncated", report.Truncated, "dropped", report.Dropped, "swept", report.Swept)
		case len(report.Made)+len(report.Truncated)+len(report.Dropped) > 0 || report.Swept > 0:
			log.InfoContext(ctx, "claims were maintained", "made", report.Made, "truncated", report.Truncated, "dropped", report.Dropped,
				"swept", report.Swept, "held_back", report.HeldBack)
		}
	}
}

func notAllowed(err error) bool { return hasCode(err, "42501") }

const (
	keepUpFirst = 10 * time.Second
	keepUpEvery = time.Minute
	keepUpMax   = 10 * time.Minute // of one run: a connection that went silent must not end the upkeep
)

// maintenance is one run.
type maintenance struct {
	*Claims
	conn    *pgx.Conn
	dry     bool
	lookMax time.Duration
	epoch   int64
	report  Report
}

func (m *maintenance) run(ctx context.Context, owner string) error {
	if m.dry {
		return m.foresee(ctx)
	}
	leased, err := m.lease(ctx, owner)
	if err != nil || !leased {
		m.report.Elsewhere = err == nil
		return err
	}
	err = m.steps(ctx)
	if errors.Is(err, errLeaseLost) || m.conn.IsClosed() {
		return err
	}
	// Where something failed the next run begins at once, and the time of the last complete run stays.
	_, errDone := m.conn.Exec(ctx, m.in(leaseDoneSQL), m.epoch, err == nil)
	return both(err, errDone)
}

// foresee is the dry run.
func (m *maintenance) foresee(ctx context.Context) error {
	if err := m.forgetDays(ctx); err != nil {
		return err
	}
	days, err := m.behind(ctx, m.conn)
	m.report.dropped(days)
	return err
}

// steps are done in this order, each of them whatever became of those before: what needs no lock comes first.
func (m *maintenance) steps(ctx context.Context) (failed error) {
	sweep := func(name string) func(context.Context) error {
		return func(ctx context.Context) error { return m.sweep(ctx, name) }
	}
	for _, step := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"compare what was dropped", m.noteForeignDrops},
		{"sweep processed_messages_untimed", sweep("untimed")},
		{"sweep processed_messages_past", sweep("past")},
		{"sweep processed_messages_ahead", sweep("ahead")},
		{"forget attempts", m.forgetAttempts},
		{"forget days", m.forgetDays},
		{"make partitions", m.makeAhead},
		{"drop partitions", m.dropEmpty},
	} {
		err := step.do(ctx)
		if err == nil {
			continue
		}
		failed = both(failed, fmt.Errorf("%s: %w", step.what, err))
		if ctx.Err() != nil || m.conn.IsClosed() || errors.Is(err, errLeaseLost) {
			break
		}
	}
	return failed
}

func (m *maintenance) forgetAttempts(ctx context.Context) error {
	_, err := m.conn.Exec(ctx, m.in(forgetAttemptsSQL), attemptsMax)
	return err
}

// both joins errors in one line.
func both(first, second error) error {
	switch {
	case first == nil:
		return second
	case second == nil:
		return first
	}
	return fmt.Errorf("%w; %w", first, second)
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

// limited runs f in a transaction that waits for each lock, and works at each statement, for no longer than that.
func (m *maintenance) limited(ctx context.Context, wait, statement time.Duration, f func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, m.conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockSettingsSQL, millis(wait), millis(statement), millis(lockIdleMax)); err != nil {
			return err
		}
		return f(tx)
	})
}

// locked runs f in a transaction that changes partitions: no claim runs meanwhile, and what f looks at is as
// it is. Claims queue behind it, so it gives up as its patience says.
func (m *maintenance) locked(ctx context.Context, p patience, f func(tx pgx.Tx) error) (done bool, err error) {
	err = m.limited(ctx, p.wait, p.statement, func(tx pgx.Tx) error {
		// ONLY: the partitions are locked as they are changed. Every claim needs the parent.
		if _, err := tx.Exec(ctx, m.in("LOCK TABLE ONLY effectonce.processed_messages IN ACCESS EXCLUSIVE MODE")); err != nil {
			return err
		}
		return f(tx)
	})
	if !p.urgent && ctx.Err() == nil && (hasCode(err, codeLockWait) || hasCode(err, codeCanceled)) {
		return false, nil
	}
	return err == nil, busy(err)
}

// What the server says of limits.
const (
	codeLockWait = "55P03" // lock_not_available: the lock was not to be had in time
	codeCanceled = "57014" // query_canceled: the statement took too long
)

func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// isBusy: a lock was not to be had, or was part of a deadlock. What else is there to do is not concerned.
func isBusy(err error) bool { return hasCode(err, codeLockWait) || hasCode(err, "40P01") }

func busy(err error) error {
	if isBusy(err) {
		return fmt.Errorf("claims are at work, it is tried again: %w", err)
	}
	return err
}

func millis(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }

func (m *maintenance) in(sql string) string { return migrations.InSchema(sql, m.schema) }

// table is the quoted name of a partition.
func (m *maintenance) table(name string) string {
	return pgx.Identifier{m.schema, "processed_messages_" + name}.Sanitize()
}
