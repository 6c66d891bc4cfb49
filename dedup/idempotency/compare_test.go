package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/testwait"
)

// ledger is what a foreign system says that it did.
type ledger struct {
	acted  []uuid.UUID
	since  time.Time
	during func()
	err    error
}

func (l *ledger) References(_ context.Context, since time.Time) ([]uuid.UUID, error) {
	l.since = since
	if l.during != nil {
		l.during()
	}
	return l.acted, l.err
}

// Property: a comparison reports each call that one side has and the other has not, and nothing else:
// not a call that is under way, nor one that was made after the list was, nor one that is older than it.
func TestCompareFindsWhatDiffers(t *testing.T) {
	t.Parallel()
	pool, said, l := newPool(t), &bytes.Buffer{}, &ledger{}
	child := func(value string) uuid.UUID {
		k := key(value)
		k.Operation = "order"
		return k.ChildID("charge")
	}
	failure := error(nil)
	compared := make(chan map[idempotency.DifferenceKind]int, 9)
	o := newOperation(t, pool, idempotency.Config{Window: 4 * time.Hour, Logger: slog.New(slog.NewTextHandler(said, nil)), Hooks: idempotency.Hooks{
		Compared: func(operation, phase string, differences map[idempotency.DifferenceKind]int) {
			require.Equal(t, []string{"order", "charge"}, []string{operation, phase})
			compared <- differences
		},
	}})
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{Ledgers: map[string]idempotency.Ledger{"charge": l}, Every: 10 * time.Millisecond, CompareEvery: time.Second},
		[]idempotency.Phase[payment]{calls(true, func(*step) error { return failure }), ends("ship")})
	for _, value := range []string{"both", "here", "late", "old", "fresh"} {
		do(t, flow, value, nil)
	}
	failure = errAway
	for _, value := range []string{"doubt", "nowhere"} {
		do(t, flow, value, idempotency.ErrIndeterminate)
	}
	failure = idempotency.NotDone(errAway)
	do(t, flow, "under way", errAway)
	passes(t, pool, time.Hour)
	execute(t, pool, `UPDATE effectonce.idempotency_keys SET finished_at = finished_at - interval '1 hour';
		UPDATE effectonce.idempotency_keys SET created_at = created_at - interval '1 hour' WHERE key = 'old'`)
	stranger := uuid.New()
	l.acted = []uuid.UUID{child("both"), child("both"), child("doubt"), child("under way"), stranger}
	l.during = func() { // its call is made after the list was
		execute(t, pool, `UPDATE effectonce.idempotency_keys SET finished_at = clock_timestamp() WHERE key IN ('late', 'fresh')`)
	}
	found, err := flow.Compare(t.Context(), "charge", l)
	require.NoError(t, err)
	var begins time.Time // by the database's clock
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT clock_timestamp() - interval '2 hours'`).Scan(&begins))
	require.WithinDuration(t, begins, l.since, time.Minute, "half of the window")
	kinds := map[uuid.UUID]idempotency.DifferenceKind{}
	for _, d := range found {
		kinds[d.Reference] = d.Kind
		require.Equal(t, d.Kind == idempotency.ActedForNoKey, d.Key.Value == "")
	}
	require.Equal(t, map[uuid.UUID]idempotency.DifferenceKind{
		child("here"): idempotency.DidNotAct, child("doubt"): idempotency.ActedNotDone, stranger: idempotency.ActedForNoKey,
	}, kinds)

	_, err = flow.Compare(t.Context(), "charge", &ledger{err: errors.New("no statement today")})
	require.ErrorContains(t, err, "no statement today")
	_, err = flow.Compare(t.Context(), "ship", l)
	require.ErrorContains(t, err, `"ship" makes no call`)
	for range 150 { // a list of something else: the log stays short
		l.acted = append(l.acted, uuid.New())
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	over := make(chan struct{})
	go func() { defer close(over); flow.Run(ctx) }()
	require.Equal(t, map[idempotency.DifferenceKind]int{idempotency.DidNotAct: 1, idempotency.ActedForNoKey: 151, idempotency.ActedNotDone: 1}, testwait.Chan(t, "the job", compared))
	stop()
	testwait.Chan(t, "the loops end", over)
	require.Contains(t, said.String(), child("here").String())
	require.Equal(t, 100, strings.Count(said.String(), "kind=acted_for_no_key")/(1+len(compared)))
}
