package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Ledger is what a foreign system says that it did: the statement of an account, a list of charges.
type Ledger interface {
	// References returns the keys (Step.ChildID) of the calls of a phase that the foreign system acted on
	// since a time, by its own records, in any order. A call that it does not list counts as not made.
	References(ctx context.Context, since time.Time) ([]uuid.UUID, error)
}

// DifferenceKind says how a foreign system and the keys differ.
type DifferenceKind string

// The kinds of differences.
const (
	DidNotAct     DifferenceKind = "did_not_act"      // the phase is done, and the foreign system does not know of it
	ActedNotDone  DifferenceKind = "acted_not_done"   // it acted, and the phase is not done: in doubt, given up, or finished without it
	ActedForNoKey DifferenceKind = "acted_for_no_key" // it acted under a reference that belongs to no key
)

// Difference is a call that only one side has.
type Difference struct {
	Kind      DifferenceKind
	Reference uuid.UUID
	Key       Key // without a Fingerprint; zero for ActedForNoKey
}

// compareMax bounds how far back a comparison goes, and half of the window does: older keys may be
// forgotten. compareMargin is for the clock of the foreign system.
const (
	compareMax    = 7 * 24 * time.Hour
	compareMargin = 10 * time.Minute
	comparedLogs  = 100 // differences of a kind that a comparison logs
)

// Compare compares the calls of a phase with what the foreign system says: those of the last 7 days, or of
// half of Config.Window if that is less. What is under way is no difference, nor what was done after the list
// was asked for. It holds the references in memory, and reads the whole table.
func (f *Flow[S]) Compare(ctx context.Context, phase string, ledger Ledger) ([]Difference, error) {
	if !f.makesCall(phase) {
		return nil, fmt.Errorf("phase %q makes no call", phase)
	}
	o, back := f.op, compareMax
	if o.window() != nil {
		back = min(back, o.cfg.Window/2)
	}
	var now time.Time
	if err := o.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return nil, fmt.Errorf("ask for the time: %w", err)
	}
	since := now.Add(-back)
	references, err := ledger.References(ctx, since)
	if err != nil {
		return nil, fmt.Errorf("ask what the foreign system did: %w", err)
	}
	acted := map[uuid.UUID]bool{}
	for _, reference := range references {
		acted[reference] = true
	}
	rows, err := o.pool.Query(ctx, o.sql[compareSQL], o.cfg.Operation, phase, since.Add(compareMargin), now)
	if err != nil {
		return nil, fmt.Errorf("read the keys: %w", err)
	}
	var found []Difference
	key, isRunning, isDone, inTime := Key{Operation: o.cfg.Operation}, false, false, false
	_, err = pgx.ForEachRow(rows, []any{&key.Scope, &key.Value, &isRunning, &isDone, &inTime}, func() error {
		reference := key.ChildID(phase)
		switch {
		case acted[reference] && !isDone && !isRunning:
			found = append(found, Difference{ActedNotDone, reference, key})
		case !acted[reference] && isDone && inTime:
			found = append(found, Difference{DidNotAct, reference, key})
		}
		delete(acted, reference)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the keys: %w", err)
	}
	for reference := range acted {
		found = append(found, Difference{Kind: ActedForNoKey, Reference: reference})
	}
	return found, nil
}

func (f *Flow[S]) makesCall(phase string) bool {
	return slices.ContainsFunc(f.phases, func(p Phase[S]) bool { return p.Name == phase && p.Call != nil })
}

// compareAll compares the phases of all ledgers, logs what differs, and reports the numbers to the hook.
func (f *Flow[S]) compareAll(ctx context.Context) error {
	var failed error
	for phase, ledger := range f.cfg.Ledgers {
		found, err := f.Compare(ctx, phase, ledger)
		failed = errors.Join(failed, err)
		counts := map[DifferenceKind]int{DidNotAct: 0, ActedNotDone: 0, ActedForNoKey: 0}
		for _, d := range found {
			if counts[d.Kind]++; counts[d.Kind] > comparedLogs {
				continue
			}
			f.op.cfg.Logger.ErrorContext(ctx, "a foreign system and the keys differ", "phase", phase, "kind", d.Kind, "reference", d.Reference, "key", d.Key)
		}
		if err == nil && f.op.cfg.Hooks.Compared != nil {
			f.op.cfg.Hooks.Compared(f.op.cfg.Operation, phase, counts)
		}
	}
	return failed
}
