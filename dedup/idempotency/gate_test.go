package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
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
	testwait.Chan(t, "the request is at work", begun)
	return func() error { close(over); return testwait.Chan(t, "the first request", first) }
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
	testwait.Equal(t, before+n, "requests wait", func() int { now, _, _ := o.Waiting(); return now })
	return func() ([]idempotency.Response, []error) { group.Wait(); return responses, failures }
}

func poolOf(t *testing.T, pool *pgxpool.Pool, size int32) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.MaxConns = size
	sized := pgtest.PoolOf(t, config)
	return sized
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

// Property: requests that wait for a key hold no connection, in the process that executes it or in
// another: another tenant's request is answered in between. Each of them gets the outcome. Row H29
// of guarantees.md.
func TestBusyKeyHarmsNoOtherTenant(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	here, there := poolOf(t, pool, 2), poolOf(t, pool, 2)
	cfg := idempotency.Config{WaitMax: time.Minute}
	o, replica := newOperation(t, here, cfg), newOperation(t, there, cfg)
	release := held(t, o, key("busy"), insertOnce("busy"))
	second := make(chan error, 1)
	go func() {
		_, err := replica.Once(t.Context(), key("busy"), insertOnce("busy"))
		second <- err
	}()
	testwait.Equal(t, 1, "the replica waits", func() int { _, keys, _ := replica.Waiting(); return keys })
	answers, others := waiters(t, o, 10, insertOnce("busy")), waiters(t, replica, 10, insertOnce("busy"))
	for _, o := range []*idempotency.Operation{o, replica} {
		_, err := o.Once(t.Context(), idempotency.Key{Scope: "another tenant", Value: "k"}, insertOnce("other"))
		require.NoError(t, err)
	}
	testwait.Equal(t, int32(1), "connections, of the request that works", func() int32 { return here.Stat().AcquiredConns() })
	require.NoError(t, release())
	require.NoError(t, testwait.Chan(t, "the replica's request", second))
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
// one more is refused at once; other tenants, and keys for which no request waits, are not.
func TestWaitersAreBounded(t *testing.T) {
	t.Parallel()
	pool := poolOf(t, newPool(t), 8)
	busy, other, fresh := key("busy"), key("other"), key("new")
	for n, c := range []struct {
		cfg    idempotency.Config
		beyond idempotency.Key
		crowd  bool
	}{
		{idempotency.Config{KeyWaitersMax: 3}, busy, true},
		{idempotency.Config{KeyWaitersMax: 3}, fresh, false},
		{idempotency.Config{ScopeWaitersMax: 3}, other, true},
		{idempotency.Config{ScopeWaitersMax: 3}, idempotency.Key{Scope: "another", Value: "new"}, false},
		{idempotency.Config{ScopeWaitersMax: 3}, fresh, false},
	} {
		var crowds atomic.Int64
		c.cfg.WaitMax = time.Minute
		c.cfg.Hooks.Answered = func(_ string, v idempotency.Verdict) {
			if v == idempotency.Crowded {
				crowds.Add(1)
			}
		}
		o := newOperation(t, pool, c.cfg)
		ends := []func() error{held(t, o, busy, insertOnce("busy")), held(t, o, other, insertOnce("other"))}
		answers := waiters(t, o, 3, insertOnce("busy"))
		_, err := o.Once(t.Context(), c.beyond, insertOnce("new"))
		var crowded *idempotency.CrowdedError
		require.Equal(t, c.crowd, errors.As(err, &crowded), n)
		require.Equal(t, c.crowd, errors.Is(err, idempotency.ErrInProgress))
		require.Equal(t, c.crowd, crowds.Load() == 1)
		if c.crowd {
			require.Equal(t, time.Second, crowded.RetryAfter)
		}
		for _, end := range ends {
			require.NoError(t, end())
		}
		_, failures := answers()
		require.NoError(t, errors.Join(failures...))
		_, err = pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys`)
		require.NoError(t, err)
	}
}

// Property: a key that was minted a while ago is looked up before it is claimed: one that another
// process executed is replayed, one that is not stored is executed.
func TestOldKeyIsLookedUpFirst(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for _, replayed := range []bool{false, true} {
		response, err := newOperation(t, pool, idempotency.Config{}).Once(t.Context(), key("01900000-0000-7000-8000-000000000000"), insertOnce("k")) // of 2024
		require.NoError(t, err)
		require.Equal(t, replayed, response.Replayed)
	}
	require.Equal(t, 1, effects(t, pool, "k"))
}

// Property: a request that hangs, and has lost its key, does not block another one for longer than
// WaitMax, not even in its own process.
func TestHungRequestKeepsNoOtherAway(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{WaitMax: 100 * time.Millisecond})
	release := held(t, o, key("busy"), insertOnce("busy"))
	_, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'`)
	require.NoError(t, err) // it does not notice
	response := testwait.For(t, "another request is executed", func() (idempotency.Response, bool) {
		response, err := o.Once(t.Context(), key("busy"), insertOnce("busy"))
		return response, err == nil
	})
	require.False(t, response.Replayed)
	require.Error(t, release())
	require.Equal(t, 1, effects(t, pool, "busy"))
	requests, keys, _ := o.Waiting()
	require.Zero(t, requests+keys)
}

// Property: if the work of the first request fails, or panics, the next one executes it, one at a
// time, and after an outcome all others get that.
func TestTurnIsPassedOn(t *testing.T) {
	t.Parallel()
	o := newOperation(t, newPool(t), idempotency.Config{WaitMax: time.Minute})
	release := held(t, o, key("busy"), func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, errAway })
	var runs, atOnce atomic.Int64
	answers := waiters(t, o, 20, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		defer atOnce.Add(-1)
		assert.EqualValues(t, 1, atOnce.Add(1))
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
	got := map[string]int{}
	for i, err := range failures {
		got[fmt.Sprint(err, responses[i].Status, responses[i].Replayed)]++
	}
	require.Equal(t, map[string]int{"the bank is away 0 false": 1, "<nil> 0 false": 1, "<nil> 201 false": 1, "<nil> 201 true": 17}, got) // the one that ended its goroutine got nothing
}

// Property: what a process knows of a key's outcome only decides where it looks first: a key that
// was forgotten is executed, and one that is stored in another state is answered by that state.
func TestOutcomeThatIsKnownIsLookedUp(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	for _, sql := range []string{`DELETE FROM effectonce.idempotency_keys`, `UPDATE effectonce.idempotency_keys SET state = 'indeterminate', status = NULL, finished_at = NULL`} {
		for _, replayed := range []bool{false, true} {
			response, err := o.Once(t.Context(), key("k"), insertOnce("k"))
			require.NoError(t, err)
			require.Equal(t, replayed, response.Replayed)
		}
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	_, err := o.Once(t.Context(), key("k"), insertOnce("k"))
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.Equal(t, 2, effects(t, pool, "k"))
}

// Property: every statement for one key finds it by the primary key, even if the table is empty
// when the plans are made: no partial index over all keys in a state is scanned, nor the table.
func TestKeysAreFoundByThePrimaryKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `ALTER TABLE effectonce.idempotency_keys SET (autovacuum_enabled = false)`)
	require.NoError(t, err)
	scans := func() (primary, others int) {
		pool.Reset() // sessions that end say what they did
		testwait.Equal(t, 0, "other sessions", func() int {
			return count(t, pool, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		})
		err := pool.QueryRow(t.Context(), `SELECT coalesce(sum(i.idx_scan) FILTER (WHERE indexrelname LIKE '%pkey'), 0), coalesce(sum(i.idx_scan) FILTER (WHERE indexrelname NOT LIKE '%pkey'), 0)
			+ (SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'idempotency_keys') FROM pg_stat_user_indexes i WHERE relname = 'idempotency_keys'`).Scan(&primary, &others)
		require.NoError(t, err)
		return primary, others
	}
	_, others := scans()
	plain, bounded := newOperation(t, pool, idempotency.Config{}), newOperation(t, pool, idempotency.Config{AttemptsMax: 50})
	failing := func(err error) func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, err }
	}
	flow := newFlow(t, plain, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "reserve", Write: func(context.Context, pgx.Tx, *step) error { return nil }}, calls(true, func(s *step) error {
		if strings.HasPrefix(s.Key.Value, "lost") {
			return errAway
		}
		return map[int]error{1: idempotency.NotDone(errAway)}[s.Attempt]
	}), ends("ship")})
	for n := range 10 {
		for range 2 { // the second one finds what the first one left
			_, _ = plain.Once(t.Context(), key(fmt.Sprint("once ", n)), insertOnce("once"))
			_, _ = plain.Once(t.Context(), key(fmt.Sprint("doubt ", n)), failing(idempotency.Indeterminate(errAway)))
			_, _ = plain.Once(t.Context(), key(fmt.Sprint("own commit ", n)), committed)
			_, _ = bounded.Once(t.Context(), key(fmt.Sprint("bounded ", n)), failing(errAway))
			_, _ = flow.Do(t.Context(), key(fmt.Sprint("lost ", n)), nil)
			_, _ = flow.Do(t.Context(), key(fmt.Sprint("flow ", n)), nil)
		}
	}
	require.Equal(t, 20, effects(t, pool, "once")+effects(t, pool, "ship"))
	primary, othersAfter := scans()
	require.Greater(t, primary, 200)
	require.Equal(t, others, othersAfter, "partial indexes, or the whole table")
}
