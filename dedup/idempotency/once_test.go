package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// newPool is a database with a table for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, `CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL)`)
}

func newOperation(t *testing.T, pool *pgxpool.Pool, cfg idempotency.Config) *idempotency.Operation {
	t.Helper()
	cfg.Operation = "order"
	o, err := idempotency.New(pool, cfg)
	require.NoError(t, err)
	return o
}

// bothModes tests without and with something, each with a name.
func bothModes(t *testing.T, name string, test func(t *testing.T, with bool)) {
	t.Helper()
	for _, with := range []bool{false, true} {
		t.Run(fmt.Sprintf("%s=%v", name, with), func(t *testing.T) {
			t.Parallel()
			test(t, with)
		})
	}
}

func effect(ctx context.Context, tx pgx.Tx, name string) error {
	_, err := tx.Exec(ctx, `INSERT INTO effects (name) VALUES ($1)`, name)
	return err
}

func count(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) int {
	t.Helper()
	return pgtest.Count(t, pool, sql, args...)
}

func effects(t *testing.T, pool *pgxpool.Pool, name string) int {
	t.Helper()
	return count(t, pool, `SELECT count(*) FROM effects WHERE name = $1`, name)
}

// until asks the database, from beside the work of a request, until there is what it counts.
func until(ctx context.Context, pool *pgxpool.Pool, sql string) error {
	for n := 0; n == 0; {
		if err := pool.QueryRow(ctx, sql).Scan(&n); err != nil {
			return err
		}
	}
	return nil
}

const somebodyWaits = `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`

func key(value string) idempotency.Key { return idempotency.Key{Scope: "tenant", Value: value} }

// insertOnce is work with one effect and a response.
func insertOnce(name string) func(context.Context, pgx.Tx) (idempotency.Response, error) {
	return func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201, Header: map[string][]string{"X-A": {"1", "2"}}, Body: []byte("body\x00" + name)}, effect(ctx, tx, name)
	}
}

// Property: the second request with a key gets the first one's response, byte for byte, and no
// second effect.
func TestSecondRequestIsReplayed(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	first, err := o.Once(t.Context(), key("a"), insertOnce("a"))
	require.NoError(t, err)
	require.False(t, first.Replayed)
	second, err := o.Once(t.Context(), key("a"), insertOnce("a"))
	require.NoError(t, err)
	require.True(t, second.Replayed)
	second.Replayed = false
	require.Equal(t, first, second)
	require.Equal(t, 1, effects(t, pool, "a"))

	third, err := idempotency.Once(t.Context(), pool, idempotency.Key{Scope: "tenant", Operation: "order", Value: "a"}, insertOnce("a"))
	require.NoError(t, err)
	require.True(t, third.Replayed)
}

// Property: the same key of another scope or operation is another key; the same key with another
// fingerprint is refused, also when it is finished, and the original stays. Rows H6, H8 of
// guarantees.md.
func TestKeysMeetOnlyTheirOwn(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	a := newOperation(t, pool, idempotency.Config{})
	b, err := idempotency.New(pool, idempotency.Config{Operation: "refund"})
	require.NoError(t, err)
	paid := key("k")
	paid.Fingerprint = idempotency.NewFingerprint([]byte("POST"), []byte("100"))
	_, err = a.Once(t.Context(), paid, insertOnce("a"))
	require.NoError(t, err)
	for name, run := range map[string]func() (idempotency.Response, error){
		"operation": func() (idempotency.Response, error) { return b.Once(t.Context(), paid, insertOnce("b")) },
		"scope": func() (idempotency.Response, error) {
			other := paid
			other.Scope = "another"
			return a.Once(t.Context(), other, insertOnce("c"))
		},
	} {
		response, err := run()
		require.NoError(t, err, name)
		require.False(t, response.Replayed, name)
	}
	for _, given := range []idempotency.Fingerprint{{}, idempotency.NewFingerprint([]byte("POST1"), []byte("00"))} {
		changed := paid
		changed.Fingerprint = given
		_, err = a.Once(t.Context(), changed, insertOnce("a"))
		require.ErrorIs(t, err, idempotency.ErrMismatch)
	}
	replayed, err := a.Once(t.Context(), paid, insertOnce("a"))
	require.NoError(t, err)
	require.True(t, replayed.Replayed)
	require.Equal(t, 1, effects(t, pool, "a"))
}

// Property: of ten requests at once with one key, one is executed; the others get its response, or
// that it is in progress. A thousand times. Row H7 of guarantees.md.
func TestTenAtOnceAreExecutedOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{WaitMax: 100 * time.Millisecond})
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	var busy atomic.Int64
	for round := range rounds {
		name := fmt.Sprint(round)
		var executed atomic.Int64
		var group sync.WaitGroup
		for range 10 {
			group.Go(func() {
				response, err := o.Once(t.Context(), key(name), insertOnce(name))
				switch {
				case errors.Is(err, idempotency.ErrInProgress):
					busy.Add(1)
				case assert.NoError(t, err) && !response.Replayed:
					executed.Add(1)
				}
			})
		}
		group.Wait()
		require.EqualValues(t, 1, executed.Load(), name)
	}
	require.Equal(t, rounds, count(t, pool, `SELECT count(*) FROM effects`))
	require.Equal(t, rounds, count(t, pool, `SELECT count(DISTINCT name) FROM effects`))
	t.Logf("%d of %d were told that it is in progress", busy.Load(), 10*rounds)
}

// Property: while a request is in progress another one with its key gets ErrInProgress, in bounded
// time, and the time of a retry; afterwards it gets the response.
func TestInProgressIsToldInTime(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{WaitMax: 50 * time.Millisecond})
	working, goOn := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		_, err := o.Once(t.Context(), key("a"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			close(working)
			<-goOn
			return idempotency.Response{Status: 200}, effect(ctx, tx, "a")
		})
		done <- err
	}()
	<-working
	_, err := o.Once(t.Context(), key("a"), insertOnce("a"))
	var busy *idempotency.InProgressError
	require.ErrorAs(t, err, &busy)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	require.Positive(t, busy.RetryAfter)
	close(goOn)
	require.NoError(t, <-done)
	response, err := o.Once(t.Context(), key("a"), insertOnce("a"))
	require.NoError(t, err)
	require.True(t, response.Replayed)
	require.Equal(t, 1, effects(t, pool, "a"))
}

// Property: a failure that a retry could fix leaves nothing behind and frees the key at once,
// whatever kind it is; a final one is stored and replayed, without the effects of its work. Rows
// H3, H18 of guarantees.md.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	for name, failure := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"error":     func(context.Context, pgx.Tx) error { return errors.New("bank is away") },
		"statement": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, `SELECT 1/0`); return err },
		"swallowed": func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, `SELECT 1/0`); return nil },
		"commit":    func(ctx context.Context, tx pgx.Tx) error { _ = tx.Commit(ctx); return nil },
		"rollback":  func(ctx context.Context, tx pgx.Tx) error { _ = tx.Rollback(ctx); return nil },
		"end": func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, ` ; COMMIT`)
			return nil
		},
	} {
		_, err := o.Once(t.Context(), key(name), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			if err := effect(ctx, tx, name); err != nil {
				return idempotency.Response{}, err
			}
			return idempotency.Response{Status: 200}, failure(ctx, tx)
		})
		require.Error(t, err, name)
		require.Zero(t, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`), name)
		response, err := o.Once(t.Context(), key(name), insertOnce(name))
		require.NoError(t, err, name)
		require.False(t, response.Replayed, name)
		require.Equal(t, 1, effects(t, pool, name))
		_, err = pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys`)
		require.NoError(t, err)
	}
	declined := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := effect(ctx, tx, "declined"); err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.Response{}, fmt.Errorf("charge: %w", idempotency.Final(idempotency.Response{Status: 402, Body: []byte("no funds")}, errors.New("declined")))
	}
	for _, replayed := range []bool{false, true} {
		response, err := o.Once(t.Context(), key("declined"), declined)
		require.NoError(t, err)
		require.Equal(t, idempotency.Response{Status: 402, Body: []byte("no funds"), Replayed: replayed}, response)
	}
	require.Zero(t, effects(t, pool, "declined"))
}

// Property: work that panics, or ends its goroutine, leaves nothing behind, and its connection is
// usable again.
func TestPanicLeavesNothing(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	require.PanicsWithValue(t, "oops", func() {
		_, _ = o.Once(t.Context(), key("a"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			_ = effect(ctx, tx, "a")
			panic("oops")
		})
	})
	require.Zero(t, effects(t, pool, "a"))
	_, err := o.Once(t.Context(), key("a"), insertOnce("a"))
	require.NoError(t, err)
	pgtest.Unused(t, pool)
}

// Property: Strict makes the first failure the outcome; AttemptsMax makes it the outcome once the
// attempts are used up, and not before.
func TestFailuresThatBecomeFinal(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	failing := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := effect(ctx, tx, "x"); err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.Response{}, errors.New("bank is away")
	}
	gone := func(error) idempotency.Response { return idempotency.Response{Status: 502} }
	strict := newOperation(t, pool, idempotency.Config{Strict: true, Failed: gone})
	for _, replayed := range []bool{false, true} {
		response, err := strict.Once(t.Context(), key("strict"), failing)
		require.NoError(t, err)
		require.Equal(t, idempotency.Response{Status: 502, Replayed: replayed}, response)
	}
	limited := newOperation(t, pool, idempotency.Config{AttemptsMax: 3, Failed: gone})
	for attempt := 1; attempt <= 5; attempt++ {
		response, err := limited.Once(t.Context(), key("limited"), failing)
		if attempt < 3 {
			require.ErrorContains(t, err, "bank is away", attempt)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, idempotency.Response{Status: 502, Replayed: attempt > 3}, response)
	}
	require.Zero(t, effects(t, pool, "x"))
	// One that succeeds in between is executed, and remembered.
	_, err := limited.Once(t.Context(), key("mended"), failing)
	require.Error(t, err)
	for _, replayed := range []bool{false, true} {
		response, err := limited.Once(t.Context(), key("mended"), insertOnce("mended"))
		require.NoError(t, err)
		require.Equal(t, 201, response.Status)
		require.Equal(t, replayed, response.Replayed)
	}
	require.Equal(t, 1, effects(t, pool, "mended"))
}

// Property: a serialization failure is tried again at once, a bounded number of times. Row H20 of
// guarantees.md.
func TestConflictsAreTriedAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE hot (n int); INSERT INTO hot VALUES (0)`)
	require.NoError(t, err)
	o := newOperation(t, pool, idempotency.Config{Isolation: pgx.Serializable, Retries: 100})
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			_, err := o.Once(t.Context(), key(fmt.Sprint(i)), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				_, err := tx.Exec(ctx, `UPDATE hot SET n = n + 1`)
				return idempotency.Response{}, err
			})
			assert.NoError(t, err)
		})
	}
	group.Wait()
	require.Equal(t, 8, count(t, pool, `SELECT n FROM hot`))

	runs := 0
	few := newOperation(t, pool, idempotency.Config{Retries: 2})
	_, err = few.Once(t.Context(), key("never"), func(context.Context, pgx.Tx) (idempotency.Response, error) {
		runs++
		return idempotency.Response{}, &pgconn.PgError{Code: "40P01"}
	})
	require.Error(t, err)
	require.Equal(t, 3, runs)
}

// Property: a pool of two connections serves fifty clients with few keys: no request waits for a
// connection while it holds one. Row H22 of guarantees.md.
func TestSmallPoolDoesNotDeadlock(t *testing.T) {
	t.Parallel()
	wide := newPool(t)
	config := wide.Config()
	config.MaxConns = 2
	pool := pgtest.PoolOf(t, config)
	o := newOperation(t, pool, idempotency.Config{WaitMax: 30 * time.Second})
	var group sync.WaitGroup
	for i := range 50 {
		group.Go(func() {
			name := fmt.Sprint(i % 5)
			_, err := o.Once(t.Context(), key(name), insertOnce(name))
			assert.NoError(t, err)
		})
	}
	group.Wait()
	require.Equal(t, 5, count(t, wide, `SELECT count(*) FROM effects`))
}

// Property: of a response that is too large only the fact is stored: a later request gets a defined
// answer, and no second execution. Row H11 of guarantees.md.
func TestLargeResponseIsNotStored(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{ResponseBytesMax: 10})
	for _, replayed := range []bool{false, true} {
		response, err := o.Once(t.Context(), key("a"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 200, Body: []byte("12345678901")}, effect(ctx, tx, "a")
		})
		require.NoError(t, err)
		require.Equal(t, replayed, response.Replayed)
		require.Equal(t, replayed, response.BodyDropped)
		require.Equal(t, replayed, response.Body == nil)
	}
	require.Equal(t, 1, effects(t, pool, "a"))
}

// Property: keys out of bounds are refused before anything is sent to the database. Row H9 of
// guarantees.md.
func TestKeysOutOfBounds(t *testing.T) {
	t.Parallel()
	closed, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/nothing")
	require.NoError(t, err)
	defer closed.Close()
	o := newOperation(t, closed, idempotency.Config{})
	long := string(make([]byte, 256))
	for _, k := range []idempotency.Key{
		{Scope: "", Value: "a"},
		{Scope: "a", Value: ""},
		{Scope: "a", Value: long},
		{Scope: "a", Value: "a\x00"},
		{Scope: "a", Value: "\xff"},
		{Scope: "a\n", Value: "a"},
		{Scope: "a", Value: "a", Operation: "another"},
	} {
		_, err := o.Once(t.Context(), k, insertOnce("a"))
		require.ErrorIs(t, err, idempotency.ErrInvalid, "%+v", k)
	}
}
