package keys_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Finished keys are forgotten when their window is over, in small transactions; everything else
// stays.
func TestReapForgetsWhatIsOver(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, state := range []string{"locked", "free", "put off", "finished", "over", "unanswered", "indeterminate", "abandoned"} {
		key(t, pool, state, state)
	}
	exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, status, expires_at)
		SELECT 't', 'many', n::text, sha256('x'), 'finished', 201, CASE WHEN n <= 2500 THEN clock_timestamp() END FROM generate_series(1, 2510) n`)
	exec(t, pool, "UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() - interval '1 hour' WHERE key = 'unanswered'")
	exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, retry_at, expires_at)
		SELECT 't', 'counts', n::text, sha256('x'), 'running', due, due FROM generate_series(1, 9) n, LATERAL (SELECT clock_timestamp() + (5 - n) * interval '1 hour') d(due)`)
	n, err := keys.Expired(t.Context(), pool, schema)
	require.NoError(t, err)
	assert.Equal(t, int64(2506), n)
	var steps []int64
	reaped, err := keys.Reap(t.Context(), pool, schema, func(r keys.Reaped) { steps = append(steps, r.Forgotten) })
	require.NoError(t, err)
	assert.Equal(t, keys.Reaped{Forgotten: 2506, Doubted: 1}, reaped)
	assert.Equal(t, []int64{1004, 2004, 2506}, steps)
	assert.Equal(t, 7, scalar[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'charge'"))
	assert.Equal(t, 4, scalar[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'counts'"), "of failures, within their day")
	unanswered := find(t, pool, "unanswered")
	assert.Equal(t, keys.Indeterminate, unanswered.State)
	assert.False(t, unanswered.Unanswered, "it stands among those that wait")
	assert.Equal(t, 10, scalar[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'many'"), "kept for ever")
}

// Keys that are left to a person do not keep a run from the keys behind them, even if they fill its
// pages. Row H16 of guarantees.md.
func TestReapGoesOnBehindWhatItLeaves(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for n := range 5 {
		key(t, pool, fmt.Sprint("unanswered ", n), "unanswered")
		key(t, pool, fmt.Sprint("over ", n), "over")
		key(t, pool, fmt.Sprint("finished ", n), "finished")
	}
	exec(t, pool, "UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() - interval '2 hours' WHERE key LIKE 'unanswered%'")
	var last keys.Reaped
	reaped, err := keys.ReapBy(t.Context(), pool, schema, 2, func(r keys.Reaped) { last = r })
	require.NoError(t, err)
	assert.Equal(t, keys.Reaped{Forgotten: 5, Doubted: 5}, reaped)
	assert.Equal(t, reaped, last)
	assert.Equal(t, "finished 5, indeterminate 5", scalar[string](t, pool, `SELECT string_agg(state || ' ' || n, ', ' ORDER BY state)
		FROM (SELECT state, count(*) AS n FROM effectonce.idempotency_keys GROUP BY state) s`))
}

// Reapers that never pause delete no unfinished key, whatever window its row has, nor one that was
// just retried. Each key survives its failures and an operator's retry, and gets its outcome with
// one effect of the phase that was done first; it is deleted only then. Row H16 of guarantees.md.
func TestReapersLeaveUnfinishedKeys(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, reservedSQL)
	ctx, stop := context.WithCancel(t.Context())
	var reapers sync.WaitGroup
	reap := func(work func() error) {
		reapers.Go(func() {
			for ctx.Err() == nil {
				if err := work(); err != nil && ctx.Err() == nil {
					t.Errorf("%v", err)
					return
				}
			}
		})
	}
	op, err := idempotency.New(pool, idempotency.Config{Operation: "charge"})
	require.NoError(t, err)
	reap(func() error { _, err := op.Reap(ctx); return err })
	reap(func() error { _, err := keys.Reap(ctx, pool, schema, func(keys.Reaped) {}); return err })
	reap(func() error {
		_, err := pool.Exec(ctx, "UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() - interval '1 hour' WHERE state <> 'finished' AND expires_at IS NULL")
		return err
	})
	var calls sync.Map
	flow := charge(t, pool, idempotency.Config{AttemptsMax: 2, WaitMax: 30 * time.Second}, idempotency.Phase[struct{}]{
		Call: func(_ context.Context, step *idempotency.Step[struct{}]) error {
			n, _ := calls.LoadOrStore(step.Key.Value, new(atomic.Int32))
			if n.(*atomic.Int32).Add(1) <= 2 {
				return idempotency.NotDone(errRefused)
			}
			return nil
		},
	})
	const clients, each = 2, 3
	failed := make(chan error, clients*each)
	var group sync.WaitGroup
	for c := range clients {
		group.Go(func() {
			for n := range each {
				failed <- retried(ctx, pool, flow, fmt.Sprintf("%d-%d", c, n))
			}
		})
	}
	group.Wait()
	for range clients * each {
		require.NoError(t, testwait.Chan(t, "a client's end", failed))
	}
	assert.Equal(t, clients*each, scalar[int](t, pool, "SELECT count(DISTINCT key) FROM reserved"))
	assert.Equal(t, clients*each, scalar[int](t, pool, "SELECT count(*) FROM reserved"), "a key was deleted under its flow")
	exec(t, pool, "UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp()")
	testwait.True(t, "all are forgotten", func() bool { return scalar[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys") == 0 })
	stop()
	reapers.Wait()
}

// retried takes one key through two failures, an operator's retry and its outcome.
func retried(ctx context.Context, pool *pgxpool.Pool, flow *idempotency.Flow[struct{}], name string) error {
	for _, want := range []error{errRefused, errRefused, idempotency.ErrAbandoned} {
		if _, err := flow.Do(ctx, named(name), nil); !errors.Is(err, want) {
			return fmt.Errorf("%s: want %w, got %w", name, want, err)
		}
	}
	if _, err := keys.Retry(ctx, pool, schema, ana, keys.Place{Scope: "t", Operation: "charge", Key: name}, false); err != nil {
		return err
	}
	if _, err := flow.Do(ctx, named(name), nil); err != nil {
		return err
	}
	response, err := flow.Do(ctx, named(name), nil)
	if err == nil && !response.Replayed {
		err = fmt.Errorf("%s is executed again: its window has just begun", name)
	}
	return err
}

// errRefused is a foreign system that certainly did nothing.
var errRefused = errors.New("refused")
