package relay

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// ErrSequenceBehind is returned by Drain, and logged by Run, when a sequence of the outbox went
// back and this role may not repair it. The cause is a copy by logical replication, TRUNCATE …
// RESTART IDENTITY or setval. Unpublished rows would count as published, so nothing is published
// and nothing is removed. Remedy: "outbox-relay repair", see Repair. After the repair, Run
// continues by itself; it is safe to call Drain again.
var ErrSequenceBehind = errors.New("a sequence of the outbox is behind numbers that rows or ticks have already: nothing is published until it is repaired")

// errSequenceBack ends the work on a shard. The check of the sequences before the next lease
// repairs what is wrong.
var errSequenceBack = errors.New("the outbox's sequence went back: the shard continues from its stored progress once the sequence is repaired")

// ErrSequenceBusy is returned when a repair could not get its lock in time, because transactions
// that write to the outbox are open. Nothing was changed. It is safe to try again.
var ErrSequenceBusy = errors.New("transactions that write to the outbox are open: a repair of its sequence waits for them to end")

// seenSeq is the largest number that this process knew to be assigned when it noticed that the
// sequence was behind it. The tables need not have it: the transaction that got it may be open.
type seenSeq struct {
	run string // run of the server; another server may never have assigned the number
	seq int64
}

// sequenceBack notes that the sequence is at a number that is behind one seen before. If a repair
// replaced the sequence, the number is not behind; a shard that was reading during the repair ends,
// too, because its epoch is over.
func (r *Relay) sequenceBack(run *string, seqLast, known int64) error {
	if seqLast >= known || seqLast == 0 { // 0: none was assigned since it was set, so nothing is lost yet
		return nil
	}
	seen := &seenSeq{run: deref(run).(string), seq: known} //nolint:forcetypeassert // a string either way
	for old := r.seen.Load(); old == nil || old.run != seen.run || old.seq < seen.seq; old = r.seen.Load() {
		if r.seen.CompareAndSwap(old, seen) {
			break
		}
	}
	return fmt.Errorf("%w (it is at %d, %d was already assigned)", errSequenceBack, seqLast, known)
}

type seen = atomic.Pointer[seenSeq]

// checkSequences runs before each lease, and before Drain writes to the outbox. It repairs
// sequences that are behind. run is that of the server. A repair ends all leases.
func (r *Relay) checkSequences(ctx context.Context, run *string) (repaired bool, err error) {
	var known int64
	if s := r.seen.Load(); s != nil && s.run == deref(run) {
		known = s.seq
	}
	// A lock on these tables must not keep this replica from renewing the leases that it holds.
	asking, cancel := context.WithTimeoutCause(ctx, r.takeMax(), errNoAnswer)
	defer cancel()
	var behind bool
	err = r.pool.QueryRow(asking, migrations.InSchema(sequenceStateSQL, r.cfg.Schema), known).Scan(&behind)
	if hidden(err) {
		return false, fmt.Errorf(`check the outbox's sequences: %w: the role lacks a right of this release: run "outbox-relay migrate roles --apply" as the owner of the tables, or grant it EXECUTE on the function`, err)
	}
	if err != nil {
		return false, fmt.Errorf("check the outbox's sequences: %w", silence(asking, err))
	}
	if !behind {
		return false, nil
	}
	stop := r.turning(ctx)
	defer stop()
	done, err := repairSequences(ctx, r.pool, r.cfg.Schema, known, nil)
	if pgerr.Is(err, pgerr.InsufficientPrivilege) {
		return false, fmt.Errorf(`%w: run "outbox-relay repair" as the owner of the tables or as an operator; or let this role repair it: "outbox-relay migrate roles --apply" as the owner (%w)`,
			ErrSequenceBehind, err)
	}
	if err != nil {
		return false, err
	}
	if done.Repaired {
		r.cfg.Logger.ErrorContext(ctx, "a sequence of the outbox was behind numbers that were already assigned (a logical copy, RESTART IDENTITY or setval?): rows that are not proven to be published got new numbers, so consumers may see duplicates",
			"relay", r.cfg.Name, "rows", done.Renumbered, "seq_before", done.SeqBefore, "seq", done.SeqAfter, "tick_before", done.TickBefore, "tick", done.TickAfter)
	}
	return done.Repaired, nil
}

// turning calls turn every second during a repair, which may take minutes for many rows: the loop
// is not stuck.
func (r *Relay) turning(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for more := true; more; more = pause.For(ctx, time.Second) {
			r.turn()
		}
	}()
	return func() { cancel(); <-done }
}

// Sequences is the state of the outbox's sequences. Behind: numbers were assigned twice, or will
// be.
type Sequences struct {
	Behind    bool   `json:"behind"`
	SeqLast   int64  `json:"seq_last"`   // last assigned
	SeqKnown  int64  `json:"seq_known"`  // the largest that tables have
	TickLast  int64  `json:"tick_last"`  // the same of ticks
	TickKnown int64  `json:"tick_known"` //
	Reused    *int64 `json:"reused"`     // a row's number that was assigned before, although the sequence has caught up; null: none
}

// ReadSequences reads the state. db is a pool, a connection or a transaction. Its role is a
// relay's, an operator's or the owner of the tables.
func ReadSequences(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, schema string,
) (s Sequences, err error) {
	schema, err = migrations.Options{Schema: schema}.Resolve()
	if err != nil {
		return s, err
	}
	err = db.QueryRow(ctx, migrations.InSchema(sequencesSQL, schema)).Scan(&s.Behind, &s.SeqLast, &s.SeqKnown, &s.TickLast, &s.TickKnown, &s.Reused)
	if err != nil {
		return s, fmt.Errorf("read the outbox's sequences: %w", err)
	}
	return s, nil
}

// RepairOptions are the options of Repair. Who and Why are stored in operator_actions.
type RepairOptions struct {
	Schema   string // default: effectonce
	Who, Why string
}

// Repaired is what a repair did.
type Repaired struct {
	Repaired   bool  `json:"repaired"` // false: nothing was wrong
	SeqBefore  int64 `json:"seq_before"`
	SeqAfter   int64 `json:"seq_after"`
	TickBefore int64 `json:"tick_before"`
	TickAfter  int64 `json:"tick_after"`
	Renumbered int64 `json:"renumbered"` // rows
}

// Repair sets the outbox's sequences above all assigned numbers, and gives new numbers to rows that
// are not proven to be published, in their order. Such rows may be published twice; none is lost.
// All relays take their leases anew. Repair does nothing if no sequence is behind. It waits three
// seconds for open transactions that write to the outbox, and returns ErrSequenceBusy after that;
// writers wait during that time. The role must be the owner of the tables or an operator's.
func Repair(ctx context.Context, pool *pgxpool.Pool, opts RepairOptions) (Repaired, error) {
	schema, err := migrations.Options{Schema: opts.Schema}.Resolve()
	if err != nil {
		return Repaired{}, err
	}
	return repairSequences(ctx, pool, schema, 0, &opts)
}

// repairSequences is one transaction. by is nil if a relay runs it; the relay logs the repair.
func repairSequences(ctx context.Context, pool *pgxpool.Pool, schema string, known int64, by *RepairOptions) (done Repaired, err error) {
	// Read committed, whatever the role's default is: statements behind the locks must see what the
	// locks waited for.
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, repairSettingsSQL); err != nil {
			return err
		}
		d := &done
		err := tx.QueryRow(ctx, migrations.InSchema(repairSequencesSQL, schema), known).
			Scan(&d.Repaired, &d.SeqBefore, &d.SeqAfter, &d.TickBefore, &d.TickAfter, &d.Renumbered)
		if err != nil || by == nil || !d.Repaired {
			return err
		}
		_, err = tx.Exec(ctx, migrations.InSchema(noteRepairSQL, schema), by.Who, by.Why, d.SeqBefore, d.SeqAfter, d.TickBefore, d.TickAfter, d.Renumbered)
		return err
	})
	if pgerr.LockConflict(err) {
		err = fmt.Errorf("%w (%s)", ErrSequenceBusy, pgerr.State(err))
	}
	if err != nil {
		return Repaired{}, fmt.Errorf("repair the outbox's sequences: %w", err)
	}
	return done, nil
}
