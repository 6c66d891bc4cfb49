package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// held has the first request for a key at work until release is called.
func held(t *testing.T, o *idempotency.Operation, k idempotency.Key, end func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (release func() error) {
	t.Helper()
	begun, over, first := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := o.Once(t.Context(), k, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			close(begun)
			<-over
			return end(ctx, tx)
		})
		first <- err
	}()
	<-begun
	return func() error { close(over); return <-first }
}

// waiters are requests for one key that wait.
func waiters(t *testing.T, o *idempotency.Operation, n int, work func(context.Context, pgx.Tx) (idempotency.Response, error)) (answers func() ([]idempotency.Response, []error)) {
	t.Helper()
	before, _, _ := o.Waiting()
	responses, failures := make([]idempotency.Response, n), make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { responses[i], failures[i] = o.Once(t.Context(), key("busy"), work) })
	}
	require.Eventually(t, func() bool { now, _, _ := o.Waiting(); return now == before+n }, 2*time.Minute, time.Millisecond)
	return func() ([]idempotency.Response, []error) { group.Wait(); return responses, failures }
}

func poolOf(t *testing.T, pool *pgxpool.Pool, size int32) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.MaxConns = size
	sized := pgtest.PoolOf(t, config)
	return sized
}

// Property: requests that wait for a key hold no connection, in the process that executes it or in
// another: another tenant's request is answered in between. Each of them gets the outcome. Row H29
// of guarantees.md.
func TestBusyKeyHarmsNoOtherTenant(t *testing.T) {
	longtest.Only(t, "200 requests within a minute")
	t.Parallel()
	pool := newPool(t)
	here, there := poolOf(t, pool, 8), poolOf(t, pool, 2)
	cfg := idempotency.Config{WaitMax: time.Minute}
	o, replica := newOperation(t, here, cfg), newOperation(t, there, cfg)
	release := held(t, o, key("busy"), insertOnce("busy"))
	second := make(chan struct{})
	go func() {
		_, _ = replica.Once(t.Context(), key("busy"), insertOnce("busy"))
		close(second)
	}()
	require.Eventually(t, func() bool { _, keys, _ := replica.Waiting(); return keys == 1 }, 2*time.Minute, time.Millisecond)
	answers, others := waiters(t, o, 100, insertOnce("busy")), waiters(t, replica, 99, insertOnce("busy"))
	require.Equal(t, int32(1), here.Stat().AcquiredConns(), "of the request that works")
	for n := range 50 {
		for _, o := range []*idempotency.Operation{o, replica} {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			_, err := o.Once(ctx, idempotency.Key{Scope: "another tenant", Value: fmt.Sprint(n)}, insertOnce("other"))
			cancel()
			require.NoError(t, err)
		}
	}
	require.NoError(t, release())
	<-second
	for _, answers := range []func() ([]idempotency.Response, []error){answers, others} {
		responses, failures := answers()
		for i, err := range failures {
			require.NoError(t, err)
			require.True(t, responses[i].Replayed)
		}
	}
	require.Equal(t, 1, effects(t, pool, "busy"))
	for _, o := range []*idempotency.Operation{o, replica} {
		requests, keys, scopes := o.Waiting()
		require.Zero(t, requests+keys+scopes, "nothing is kept of those who waited")
	}
}

// Property: the number of requests that wait for a key, and for all keys of a tenant, is bounded:
// one more is refused at once, and other tenants are not.
func TestWaitersAreBounded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg    idempotency.Config
		beyond idempotency.Key
		crowd  bool
	}{
		"key":             {idempotency.Config{KeyWaitersMax: 3}, key("busy"), true},
		"another key":     {idempotency.Config{KeyWaitersMax: 3}, key("other"), false},
		"scope":           {idempotency.Config{ScopeWaitersMax: 3}, key("other"), true},
		"another scope":   {idempotency.Config{ScopeWaitersMax: 3}, idempotency.Key{Scope: "another", Value: "other"}, false},
		"one that is new": {idempotency.Config{ScopeWaitersMax: 3}, key("new"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var verdicts sync.Map
			c.cfg.WaitMax = 5 * time.Second // all of them wait when one more comes
			c.cfg.Hooks.Answered = func(_ string, v idempotency.Verdict) { verdicts.Store(v, true) }
			o := newOperation(t, poolOf(t, newPool(t), 8), c.cfg)
			release := held(t, o, key("busy"), insertOnce("busy"))
			ends := []func() error{release}
			if c.beyond.Value == "other" {
				ends = append(ends, held(t, o, c.beyond, insertOnce("other")))
			}
			answers := waiters(t, o, 3, insertOnce("busy"))
			_, err := o.Once(t.Context(), c.beyond, insertOnce("new"))
			var crowded *idempotency.CrowdedError
			if c.crowd {
				require.ErrorAs(t, err, &crowded)
				require.Equal(t, time.Second, crowded.RetryAfter)
				require.ErrorIs(t, err, idempotency.ErrInProgress)
				_, told := verdicts.Load(idempotency.Crowded)
				require.True(t, told)
			} else {
				require.NotErrorAs(t, err, &crowded)
			}
			_, failures := answers()
			for _, err := range failures {
				require.ErrorIs(t, err, idempotency.ErrInProgress, "after WaitMax")
				require.NotErrorAs(t, err, &crowded)
			}
			for _, end := range ends {
				_ = end()
			}
		})
	}
}

// Property: if the work of the first request fails, or panics, the next one executes it, one at a
// time, and after an outcome all others get that.
func TestTurnIsPassedOn(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{WaitMax: time.Minute})
	release := held(t, o, key("busy"), func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, errAway })
	var runs, atOnce atomic.Int64
	answers := waiters(t, o, 20, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if atOnce.Add(1) > 1 {
			return idempotency.Response{}, errors.New("two at once")
		}
		defer atOnce.Add(-1)
		switch runs.Add(1) {
		case 1:
			return idempotency.Response{}, errAway
		case 2:
			runtime.Goexit() // as a panic would, without an end to the test
		}
		return insertOnce("busy")(ctx, tx)
	})
	require.ErrorIs(t, release(), errAway)
	responses, failures := answers()
	var executed, replayed, failed int
	for i, err := range failures {
		switch {
		case err != nil:
			require.ErrorIs(t, err, errAway)
			failed++
		case responses[i].Replayed:
			replayed++
		case responses[i].Status == 201:
			executed++
		}
	}
	require.Equal(t, []int{1, 1, 17}, []int{failed, executed, replayed})
	require.Equal(t, int64(3), runs.Load())
}

// Property: a tenant cannot have more keys stored than its quota, in any number of processes;
// stored keys are answered, other tenants are not affected, and forgotten keys make room. Row H15
// of guarantees.md.
func TestQuotaOfATenant(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{ScopeKeysMax: 5})
	for n := range 5 {
		_, err := o.Once(t.Context(), key(fmt.Sprint(n)), insertOnce("within"))
		require.NoError(t, err)
	}
	for _, o := range []*idempotency.Operation{o, newOperation(t, pool, idempotency.Config{ScopeKeysMax: 5})} {
		_, err := o.Once(t.Context(), key("one more"), insertOnce("beyond"))
		var quota *idempotency.QuotaError
		require.ErrorAs(t, err, &quota)
		require.Equal(t, 5, quota.Max)
		response, err := o.Once(t.Context(), key("3"), insertOnce("beyond"))
		require.NoError(t, err)
		require.True(t, response.Replayed)
	}
	_, err := o.Once(t.Context(), idempotency.Key{Scope: "another", Value: "k"}, insertOnce("of another"))
	require.NoError(t, err)
	require.Zero(t, effects(t, pool, "beyond"))
	_, err = pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys WHERE key = '3'`)
	require.NoError(t, err)
	_, err = newOperation(t, pool, idempotency.Config{ScopeKeysMax: 5}).Once(t.Context(), key("one more"), insertOnce("again"))
	require.NoError(t, err)
}

// Property: what a process knows of a key's outcome only decides where it looks first: a key that
// was forgotten, or lost, is executed, and one that is stored in another state is answered by that
// state.
func TestOutcomeThatIsKnownIsLookedUp(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	ask := func() (idempotency.Response, error) { return o.Once(t.Context(), key("k"), insertOnce("k")) }
	for range 3 {
		response, err := ask()
		require.NoError(t, err)
		require.False(t, response.Replayed)
		response, err = ask()
		require.NoError(t, err)
		require.True(t, response.Replayed)
		other := key("k")
		other.Fingerprint = idempotency.NewFingerprint([]byte("another"))
		_, err = o.Once(t.Context(), other, insertOnce("k"))
		require.ErrorIs(t, err, idempotency.ErrMismatch)
		_, err = pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys`)
		require.NoError(t, err)
	}
	require.Equal(t, 3, effects(t, pool, "k"))
	_, err := ask()
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'indeterminate', status = NULL, finished_at = NULL`)
	require.NoError(t, err)
	_, err = ask()
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
}

// Property: a key that was minted a while ago is looked up before it is claimed: in another
// process, too, a replay takes no transaction ID and no transaction; a key that is not stored is
// executed.
func TestReplayElsewhereTakesOneStatement(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	old, err := uuid.Parse("01900000-0000-7000-8000-000000000000") // of 2024
	require.NoError(t, err)
	statements := &countingTracer{}
	config := pool.Config()
	config.ConnConfig.Tracer = statements
	traced := pgtest.PoolOf(t, config)
	for replayed := range 2 {
		elsewhere := newOperation(t, traced, idempotency.Config{})
		statements.batches.Store(0)
		response, err := elsewhere.Once(t.Context(), key(old.String()), insertOnce("k"))
		require.NoError(t, err)
		require.Equal(t, replayed == 1, response.Replayed)
		require.Equal(t, replayed == 0, statements.batches.Load() > 0)
	}
	require.Equal(t, 1, effects(t, pool, "k"))
}

// countingTracer counts batches: a transaction of the library begins with one.
type countingTracer struct{ batches atomic.Int64 }

func (c *countingTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (c *countingTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c *countingTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.batches.Add(1)
	return ctx
}
func (c *countingTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *countingTracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// Property: a request that hangs, and has lost its key, does not block another one for longer than
// WaitMax, not even in its own process.
func TestHungRequestKeepsNoOtherAway(t *testing.T) {
	longtest.Only(t, "limits of 100 ms for each request")
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{WaitMax: 100 * time.Millisecond, IdleTimeout: 50 * time.Millisecond})
	release := held(t, o, key("busy"), insertOnce("busy")) // the server ends its transaction, and it does not notice
	var response idempotency.Response
	require.Eventually(t, func() bool {
		var err error
		response, err = o.Once(t.Context(), key("busy"), insertOnce("busy"))
		return err == nil
	}, 2*time.Minute, time.Millisecond)
	require.False(t, response.Replayed)
	require.Error(t, release())
	require.Equal(t, 1, effects(t, pool, "busy"))
	requests, keys, _ := o.Waiting()
	require.Zero(t, requests+keys)
}
