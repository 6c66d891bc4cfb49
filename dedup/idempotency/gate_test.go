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
func waiters(t *testing.T, o *idempotency.Operation, k idempotency.Key, n int, work func(context.Context, pgx.Tx) (idempotency.Response, error)) (answers func() ([]idempotency.Response, []error)) {
	t.Helper()
	before, _ := o.Waiting()
	responses, failures := make([]idempotency.Response, n), make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { responses[i], failures[i] = o.Once(t.Context(), k, work) })
	}
	testwait.Equal(t, before+n, "requests wait", func() int { now, _ := o.Waiting(); return now })
	return func() ([]idempotency.Response, []error) { group.Wait(); return responses, failures }
}

func poolOf(t *testing.T, pool *pgxpool.Pool, size int32) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.MaxConns = size
	sized := pgtest.PoolOf(t, config)
	return sized
}

// Property: work that never returns keeps its key only until its request ends and the server ends its
// transaction.
func TestHangingWorkKeepsNoTurn(t *testing.T) {
	t.Parallel()
	pool, never, begun := newPool(t), make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(never) })
	o := newOperation(t, pool, idempotency.Config{IdleTimeout: time.Second, WaitMax: time.Minute})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = o.Once(ctx, key("k"), func(context.Context, pgx.Tx) (idempotency.Response, error) {
			close(begun)
			<-never
			return idempotency.Response{}, nil
		})
	}()
	testwait.Chan(t, "the request is at work", begun)
	cancel()
	require.False(t, insert(t, o, "k").Replayed)
	require.Equal(t, 1, effects(t, pool, "k"))
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
	testwait.Equal(t, 1, "the replica waits", func() int { _, keys := replica.Waiting(); return keys })
	answers, others := waiters(t, o, key("busy"), 10, insertOnce("busy")), waiters(t, replica, key("busy"), 10, insertOnce("busy"))
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
		requests, keys := o.Waiting()
		require.Zero(t, requests+keys, "nothing is kept of those who waited")
	}
}

// Property: 100 requests wait for a key: one more is refused at once; those for other keys are not.
func TestWaitersAreBounded(t *testing.T) {
	t.Parallel()
	pool := poolOf(t, newPool(t), 8)
	var crowds atomic.Int64
	o := newOperation(t, pool, idempotency.Config{WaitMax: time.Minute, Hooks: idempotency.Hooks{Answered: func(_ string, v idempotency.Verdict) {
		if v == idempotency.Crowded {
			crowds.Add(1)
		}
	}}})
	once := func(k idempotency.Key) error {
		_, err := o.Once(t.Context(), k, insertOnce(k.Value))
		return err
	}
	release := held(t, o, key("busy"), insertOnce("busy"))
	answers := waiters(t, o, key("busy"), 100, insertOnce("busy"))
	var crowded *idempotency.InProgressError
	require.ErrorAs(t, once(key("busy")), &crowded)
	require.Equal(t, idempotency.InProgressError{RetryAfter: time.Second, Crowded: true}, *crowded)
	require.EqualValues(t, 1, crowds.Load())
	require.NoError(t, once(key("new")), "no request waits for it")
	require.NoError(t, once(idempotency.Key{Scope: "another", Value: "busy"}))
	require.NoError(t, release())
	_, failures := answers()
	require.NoError(t, errors.Join(failures...))
}

// Property: if the work of the first request fails, or panics, the next one executes it, one at a
// time, and after an outcome all others get that.
func TestTurnIsPassedOn(t *testing.T) {
	t.Parallel()
	o := newOperation(t, newPool(t), idempotency.Config{WaitMax: time.Minute})
	release := held(t, o, key("busy"), func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, errAway })
	var runs, atOnce atomic.Int64
	answers := waiters(t, o, key("busy"), 20, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
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

// Property: every statement for one key finds it by the primary key, even if the table is empty
// when the plans are made: no partial index over all keys in a state is scanned, nor the table.
func TestKeysAreFoundByThePrimaryKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	pgtest.Exec(t, pool, `ALTER TABLE effectonce.idempotency_keys SET (autovacuum_enabled = false)`)
	scans := func() (primary, others int) {
		pool.Reset() // sessions that end say what they did
		testwait.Equal(t, 0, "other sessions", func() int {
			return pgtest.Count(t, pool, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		})
		err := pool.QueryRow(t.Context(), `SELECT coalesce(sum(i.idx_scan) FILTER (WHERE indexrelname LIKE '%pkey'), 0), coalesce(sum(i.idx_scan) FILTER (WHERE indexrelname NOT LIKE '%pkey'), 0)
			+ (SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'idempotency_keys') FROM pg_stat_user_indexes i WHERE relname = 'idempotency_keys'`).Scan(&primary, &others)
		require.NoError(t, err)
		return primary, others
	}
	_, others := scans()
	plain := newOperation(t, pool, idempotency.Config{})
	failing := func(err error) func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, err }
	}
	flow := newFlow(t, plain, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{nothing("reserve"), calls(true, func(s *step) error {
		if strings.HasPrefix(s.Key.Value, "lost") {
			return errAway
		}
		return map[int]error{1: idempotency.NotDone(errAway)}[s.Attempt]
	}), ends("ship")})
	for n := range 10 {
		for range 2 { // the second one finds what the first one left
			_, _ = plain.Once(t.Context(), key(fmt.Sprint("once ", n)), insertOnce("once"))
			_, _ = plain.Once(t.Context(), key(fmt.Sprint("doubt ", n)), failing(idempotency.Indeterminate(errAway)))
			_, _ = flow.Do(t.Context(), key(fmt.Sprint("lost ", n)), nil)
			_, _ = flow.Do(t.Context(), key(fmt.Sprint("flow ", n)), nil)
		}
	}
	require.Equal(t, 20, effects(t, pool, "once")+effects(t, pool, "ship"))
	othersAfter := 0
	testwait.True(t, "the sessions' numbers, which come late before PostgreSQL 15", func() bool {
		primary, others := scans()
		othersAfter = others
		return primary > 200
	})
	require.Equal(t, others, othersAfter, "partial indexes, or the whole table")
}
