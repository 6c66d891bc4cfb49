package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// ErrSequenceBehind is returned by Drain, and logged by Run, when a sequence of the outbox went back.
// The cause is a copy by logical replication, TRUNCATE … RESTART IDENTITY or setval. Unpublished rows
// would count as published, so nothing is published and nothing is removed. Remedy: "outbox-relay
// repair", see Repair. After the repair, Run continues by itself; it is safe to call Drain again.
var ErrSequenceBehind = errors.New(`a sequence of the outbox is behind numbers that rows or ticks have already, and nothing is published until it is repaired: run "outbox-relay repair" as an operator or as the owner of the tables`)

// errSequenceBack ends the work on a shard. It continues from stored progress, if that is not behind
// the sequence.
var errSequenceBack = errors.New("the outbox's sequence went back: the shard continues from its stored progress")

// ErrSequenceBusy is returned when a repair could not get its lock in time, because transactions
// that write to the outbox are open. Nothing was changed. It is safe to try again.
var ErrSequenceBusy = errors.New("transactions that write to the outbox are open: a repair of its sequence waits for them to end")

// sequenceBack returns an error if the sequence is at a number that is behind one that this work
// knows. It forgets that number: rows that got it may never have been committed. What is stored
// counts: see checkSequences.
func sequenceBack(seqLast, known int64) error {
	if seqLast >= known || seqLast == 0 { // 0: none was assigned since it was set, so nothing is lost yet
		return nil
	}
	return fmt.Errorf("%w (it is at %d, %d was already assigned)", errSequenceBack, seqLast, known)
}

// checkSequences runs before each lease, and before Drain writes to the outbox. It returns
// ErrSequenceBehind if stored progress, or a table, has numbers that a sequence will assign again.
func (r *Relay) checkSequences(ctx context.Context) error {
	// A lock on these tables must not keep this replica from renewing the leases that it holds.
	asking, cancel := context.WithTimeoutCause(ctx, r.takeMax(), errNoAnswer)
	defer cancel()
	state, err := ReadSequences(asking, r.pool, r.cfg.Schema)
	switch {
	case hidden(err):
		return fmt.Errorf(`%w: the role lacks a right of this release: run "outbox-relay migrate roles --apply" as the owner of the tables, or grant it EXECUTE on the function`, err)
	case err != nil:
		return silence(asking, err)
	case state.Behind:
		return ErrSequenceBehind
	}
	return nil
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
func ReadSequences(ctx context.Context, db migrations.Querier, schema string) (s Sequences, err error) {
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
// writers wait during that time. The role must be the owner of the tables or an operator's. by.Who and
// by.Why are stored in operator_actions; by.Relay has no effect.
func Repair(ctx context.Context, pool *pgxpool.Pool, by Operator) (Repaired, error) {
	by, err := by.resolve()
	if err != nil {
		return Repaired{}, err
	}
	var done Repaired
	// Read committed, whatever the role's default is: statements behind the locks must see what the
	// locks waited for.
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, repairSettingsSQL); err != nil {
			return err
		}
		err := tx.QueryRow(ctx, migrations.InSchema(repairSequencesSQL, by.Schema)).
			Scan(&done.Repaired, &done.SeqBefore, &done.SeqAfter, &done.TickBefore, &done.TickAfter, &done.Renumbered)
		if err != nil || !done.Repaired {
			return err
		}
		_, err = tx.Exec(ctx, migrations.InSchema(noteRepairSQL, by.Schema), by.Who, by.Why, done.SeqBefore, done.SeqAfter, done.TickBefore, done.TickAfter, done.Renumbered)
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
