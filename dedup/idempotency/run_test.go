package idempotency_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: flows that hang at a foreign system take at most FlowConfig.AtOnceMax slots: while one
// slot is free, the flow's other keys are completed; and whatever hangs, another operation's keys
// are completed, keys in doubt are reconciled, and old keys are forgotten. Run ends when the
// hanging flows do. Row H1 of guarantees.md.
func TestHangingProviderKeepsNothingElse(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var away atomic.Bool
	away.Store(true)
	var mu sync.Mutex
	calling, most := 0, 0
	over := make(chan struct{})
	hangs := func(s *step) error {
		if away.Load() || s.Key.Value == "doubt" {
			return errAway
		}
		if s.Key.Value == "quick" {
			return nil
		}
		mu.Lock()
		calling++
		most = max(most, calling)
		mu.Unlock()
		<-over
		mu.Lock()
		calling--
		mu.Unlock()
		return nil
	}
	hanging := func() int {
		mu.Lock()
		defer mu.Unlock()
		return calling
	}
	config := idempotency.FlowConfig[payment]{
		StoreRequest: true, RetryAfter: time.Millisecond, Every: 10 * time.Millisecond, CallMax: time.Minute,
		Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			return idempotency.Happened(idempotency.Response{Status: 201}), nil
		},
	}
	op := newOperation(t, pool, idempotency.Config{})
	flow := newFlow(t, op, config, []idempotency.Phase[payment]{calls(false, hangs), ends("ship")})
	otherOp, err := idempotency.New(pool, idempotency.Config{Operation: "other"})
	require.NoError(t, err)
	other := newFlow(t, otherOp, config, []idempotency.Phase[payment]{calls(false, func(*step) error {
		if away.Load() {
			return errAway
		}
		return nil
	}), ends("ship")})
	give := func(f *idempotency.Flow[payment], value string) {
		k := key(value)
		k.Operation = ""
		away.Store(true)
		_, err := f.Do(t.Context(), k, []byte("100"))
		require.ErrorIs(t, err, errAway)
		away.Store(false)
	}
	soon := func(sql string, want int) {
		t.Helper()
		require.Eventually(t, func() bool { return count(t, pool, sql) == want }, 2*time.Minute, 10*time.Millisecond, sql)
	}
	var group sync.WaitGroup
	group.Go(func() { flow.Run(ctx) })
	group.Go(func() { other.Run(ctx) })

	give(flow, "k0")
	require.Eventually(t, func() bool { return hanging() == 1 }, 2*time.Minute, time.Millisecond)
	give(flow, "quick")
	soon(`SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'quick' AND state = 'finished'`, 1)

	_, err = pool.Exec(t.Context(), `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, attempts, locked_by, request, flow, sealed)
		SELECT scope, operation, 'k' || n, fingerprint, 'running', 1, locked_by, '100', flow, sealed FROM effectonce.idempotency_keys, generate_series(1, 29) n WHERE key = 'k0'`)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return hanging() == 8 }, 2*time.Minute, time.Millisecond)
	give(other, "other")
	_, err = op.Once(t.Context(), key("old"), insertOnce("old"))
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() WHERE key = 'old';
		INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, locked_by, flow)
		SELECT scope, operation, 'doubt', fingerprint, 'indeterminate', locked_by, flow FROM effectonce.idempotency_keys WHERE key = 'k0'`)
	require.NoError(t, err)
	soon(`SELECT count(*) FROM effectonce.idempotency_keys WHERE key IN ('other', 'doubt') AND state = 'finished'`, 2)
	soon(`SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'old'`, 0)
	require.Equal(t, 8, hanging())
	close(over)
	soon(`SELECT count(*) FROM effectonce.idempotency_keys WHERE key LIKE 'k%' AND state = 'finished'`, 30)
	require.Equal(t, 8, most)
	stop()
	group.Wait()
}

// Property: Run ends when its context does: what it drives stops between two phases, with its key
// free. Row H19 of guarantees.md.
func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	away := true
	begun := make(chan struct{}, 3)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{Lock: time.Hour}), idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Millisecond, Every: 10 * time.Millisecond}, []idempotency.Phase[payment]{{
		Name: "charge",
		Call: func(ctx context.Context, _ *step) error {
			if away {
				return errAway
			}
			begun <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		},
	}, ends("ship")})
	for n := range 3 {
		_, err := flow.Do(t.Context(), key(fmt.Sprint(n)), nil)
		require.ErrorIs(t, err, errAway)
	}
	away = false
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		flow.Run(ctx)
	}()
	for range 3 {
		<-begun
	}
	stop()
	<-ended
	require.Equal(t, 3, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'running' AND locked_until IS NULL`))
}
