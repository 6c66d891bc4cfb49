package idempotency_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: keys of a flow that are unfinished for longer than AgeMax, by the database's clock, are
// reported, also those that wait for their client, and no others; they wait. With GiveUp those that
// no worker holds, and whose phase is as old, are marked for a person: as abandoned, or as
// indeterminate if a call that must not be repeated may have been made. The age of a key that a
// person returned starts anew. Row H15 of guarantees.md.
func TestOverdueKeysAreReported(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var told []int64
	var log bytes.Buffer
	flow := func(giveUp bool) *idempotency.Flow[payment] {
		op := newOperation(t, pool, idempotency.Config{
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Hooks: idempotency.Hooks{Overdue: func(operation string, keys int64) {
				require.Equal(t, "order", operation)
				told = append(told, keys)
			}},
		})
		return newFlow(t, op, idempotency.FlowConfig[payment]{GiveUp: giveUp, CallMax: time.Minute}, []idempotency.Phase[payment]{{Name: "all", Write: func(_ context.Context, _ pgx.Tx, s *step) error {
			if s.Key.Value != "finished" {
				return errAway
			}
			s.Finish(idempotency.Response{Status: 201})
			return nil
		}}})
	}
	overdue := func(f *idempotency.Flow[payment], want int64) {
		t.Helper()
		keys, err := f.Overdue(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, keys)
		require.Equal(t, want, told[len(told)-1])
	}
	waits, givesUp := flow(false), flow(true)
	for _, value := range []string{"old", "calling", "held", "progressed", "given back", "finished", "another's"} {
		_, _ = waits.Do(t.Context(), key(value), nil)
	}
	counting := newOperation(t, pool, idempotency.Config{AttemptsMax: 5})
	_, err := counting.Once(t.Context(), key("count"), func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, errAway })
	require.ErrorIs(t, err, errAway)
	passes(t, pool, 23*time.Hour)
	overdue(givesUp, 0)
	require.Empty(t, log.String())
	passes(t, pool, 2*time.Hour)
	_, err = waits.Do(t.Context(), key("young"), nil)
	require.ErrorIs(t, err, errAway)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET calling = 'all' WHERE key = 'calling';
		UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp() + interval '1 hour' WHERE key = 'held';
		UPDATE effectonce.idempotency_keys SET phase_since = clock_timestamp() - interval '23 hours' WHERE key = 'progressed';
		UPDATE effectonce.idempotency_keys SET attempts = 0, lock_token = lock_token + 1 WHERE key = 'given back';
		UPDATE effectonce.idempotency_keys SET flow = 'another' WHERE key = 'another''s'`)
	require.NoError(t, err)
	for range 2 {
		overdue(waits, 5)
	}
	require.Equal(t, 1, bytes.Count(log.Bytes(), []byte("\n")), log.String())
	require.Contains(t, log.String(), "keys=5 age=24h0m0s")
	require.Zero(t, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state NOT IN ('running', 'finished')`))

	overdue(givesUp, 3)
	states := func(sql string) int {
		return count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE error LIKE '%; then: it is unfinished for longer than AgeMax' AND `+sql)
	}
	require.Equal(t, 2, states("true"))
	require.Equal(t, 1, states("key = 'old' AND state = 'abandoned' AND locked_until IS NULL"))
	require.Equal(t, 1, states("key = 'calling' AND state = 'indeterminate' AND retry_at > clock_timestamp() + interval '50 s'"))
	_, err = waits.Do(t.Context(), key("given back"), nil)
	require.ErrorIs(t, err, errAway)
	overdue(givesUp, 3)
	_, err = waits.Do(t.Context(), key("old"), nil)
	require.ErrorIs(t, err, idempotency.ErrAbandoned)
	passes(t, pool, 25*time.Hour)
	overdue(givesUp, 1) // the one that is held
}

// Property: Run reports them, and gives them up.
func TestRunGivesUpWhatIsOverdue(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{GiveUp: true, Every: 10 * time.Millisecond}, []idempotency.Phase[payment]{calls(false, func(*step) error { return errAway }), ends("ship")})
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, errAway)
	passes(t, pool, 25*time.Hour)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		flow.Run(ctx)
	}()
	require.Eventually(t, func() bool { return stateOf(t, pool, "k") == "abandoned" }, 2*time.Minute, 10*time.Millisecond)
	stop()
	<-ended
}
