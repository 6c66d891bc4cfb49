package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

func TestMain(m *testing.M) {
	pgtest.SideBySide()
	pgtest.Main(m)
}

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

func effect(ctx context.Context, tx pgx.Tx, name string) error {
	_, err := tx.Exec(ctx, `INSERT INTO effects (name) VALUES ($1)`, name)
	return err
}

func effects(t *testing.T, pool *pgxpool.Pool, name string) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE name = $1`, name)
}

// until asks the database, from beside the work of a request, until there is what it counts.
func until(ctx context.Context, pool *pgxpool.Pool, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, testwait.Bound)
	defer cancel()
	for n := 0; ; pause.For(ctx, time.Millisecond) {
		if err := pool.QueryRow(ctx, sql).Scan(&n); err != nil || n > 0 {
			return err
		}
	}
}

const somebodyWaits = `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`

func key(value string) idempotency.Key { return idempotency.Key{Scope: "tenant", Value: value} }

// insertOnce is work with one effect and a response.
func insertOnce(name string) func(context.Context, pgx.Tx) (idempotency.Response, error) {
	return func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201, Header: map[string][]string{"X-A": {"1", "2"}}, Body: []byte("body\x00" + name)}, effect(ctx, tx, name)
	}
}

// once makes a request for work in one transaction. It has to fail with the error that is wanted, or with none.
func once(t *testing.T, o *idempotency.Operation, value string, want error, work func(context.Context, pgx.Tx) (idempotency.Response, error)) idempotency.Response {
	t.Helper()
	response, err := o.Once(t.Context(), key(value), work)
	require.ErrorIs(t, err, want, value)
	return response
}

// insert makes a request with one effect, which bears the key's name.
func insert(t *testing.T, o *idempotency.Operation, value string) idempotency.Response {
	t.Helper()
	return once(t, o, value, nil, insertOnce(value))
}

// Property: a serialization failure is tried again at once, a bounded number of times. Row H20 of
// guarantees.md.
func TestConflictsAreTriedAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	pgtest.Exec(t, pool, `CREATE TABLE hot (n int); INSERT INTO hot VALUES (0)`)
	o := newOperation(t, pool, idempotency.Config{Isolation: pgx.Serializable})
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
	require.Equal(t, 8, pgtest.Count(t, pool, `SELECT n FROM hot`))

	runs := 0
	_, err := o.Once(t.Context(), key("never"), func(context.Context, pgx.Tx) (idempotency.Response, error) {
		runs++
		return idempotency.Response{}, &pgconn.PgError{Code: "40P01"}
	})
	require.Error(t, err)
	require.Equal(t, 11, runs)
}

// Property: a status that is not a final answer is rejected before anything is stored, whether the
// outcome came from the work, Final or Config.Failed. It would panic wherever it is sent, at each
// replay.
func TestStatusThatIsNoAnswerIsRefused(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	plain := newOperation(t, pool, idempotency.Config{})
	for status, refused := range map[int]bool{-1: true, 0: false, 1: true, 99: true, 100: true, 199: true, 200: false, 999: false, 1000: true} {
		response := idempotency.Response{Status: status}
		strict := newOperation(t, pool, idempotency.Config{Strict: true, Failed: func(error) idempotency.Response { return response }})
		for name, test := range map[string]struct {
			op  *idempotency.Operation
			err error
		}{"work": {plain, nil}, "Final": {plain, idempotency.Final(response, errors.New("declined"))}, "Failed": {strict, errors.New("no paper")}} {
			what := fmt.Sprint(name, " ", status)
			_, err := test.op.Once(t.Context(), key(what), func(context.Context, pgx.Tx) (idempotency.Response, error) { return response, test.err })
			if refused {
				require.ErrorContains(t, err, fmt.Sprintf("has status %d: want 0, or 200 to 999", status), what)
			} else {
				require.NoError(t, err, what)
			}
			require.Equal(t, !refused, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, what) == 1, what)
		}
	}
}

// Property: a serialization failure, a deadlock, or a database that fails during the work does not
// decide about the request, even if it recurs at every retry: it is no outcome, and uses up no
// attempt, neither of work in one transaction nor of a phase. Rows H18, H20 of guarantees.md.
func TestWhatIsNoOutcome(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	code := func(code string) func(context.Context, pgx.Tx) error {
		return func(context.Context, pgx.Tx) error { return &pgconn.PgError{Code: code} }
	}
	for name, fail := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"connection": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return errors.New("hidden by the handler: " + err.Error())
		},
		"resources": code("53100"), "conflict": code("40001"), "deadlock": code("40P01"),
	} {
		for kind, cfg := range map[string]idempotency.Config{"strict": {Strict: true}, "default": {}} {
			away, value := true, name+kind
			work := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				if away {
					return idempotency.Response{Status: 201}, fail(ctx, tx)
				}
				return idempotency.Response{Status: 201}, effect(ctx, tx, value)
			}
			o := newOperation(t, pool, cfg)
			flow := newFlow(t, newOperation(t, pool, cfg), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
				response, err := work(ctx, tx)
				s.Finish(response)
				return err
			}}})
			for range 2 {
				_, err := o.Once(t.Context(), key(value), work)
				require.Error(t, err, value)
				require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, value))
				_, err = flow.Do(t.Context(), key("flow "+value), nil)
				require.Error(t, err, value)
			}
			away = false
			plain := once(t, o, value, nil, work)
			phase, err := flow.Do(t.Context(), key("flow "+value), nil)
			require.NoError(t, err, value)
			require.Equal(t, idempotency.Response{Status: 201}, plain)
			require.Equal(t, plain, phase)
		}
	}
}

// Property: a request that may wait as long as its statements may take gets ErrInProgress, and not
// a failure of the database. Row H7 of guarantees.md.
func TestWaitAsLongAsAStatement(t *testing.T) {
	longtest.Only(t, "limits of two seconds")
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{StatementTimeout: 2 * time.Second, WaitMax: 2 * time.Second})
	_, err := newOperation(t, pool, idempotency.Config{}).Once(t.Context(), key("k"), func(ctx context.Context, _ pgx.Tx) (idempotency.Response, error) {
		_, err := o.Once(ctx, key("k"), insertOnce("k"))
		require.ErrorIs(t, err, idempotency.ErrInProgress)
		return idempotency.Response{Status: 201}, nil
	})
	require.NoError(t, err)
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
	other := paid
	other.Scope = "another"
	for _, c := range []struct {
		of *idempotency.Operation
		k  idempotency.Key
	}{{a, paid}, {b, paid}, {a, other}} {
		response, err := c.of.Once(t.Context(), c.k, insertOnce("a"))
		require.NoError(t, err)
		require.False(t, response.Replayed)
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
	require.Equal(t, 3, effects(t, pool, "a"))
}

// Property: Strict makes the first failure the outcome, also one that shows only at COMMIT. Row H20 of
// guarantees.md.
func TestFailuresThatBecomeFinal(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	pgtest.Exec(t, pool, `CREATE TABLE owned (id bigint REFERENCES effectonce.consumers DEFERRABLE INITIALLY DEFERRED)`)
	for name, fail := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"at once": func(context.Context, pgx.Tx) error { return errors.New("bank is away") },
		"at COMMIT": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO owned VALUES (4711)`)
			return err
		},
	} {
		o := newOperation(t, pool, idempotency.Config{Strict: true, Failed: func(error) idempotency.Response { return idempotency.Response{Status: 502} }})
		for _, replayed := range []bool{false, true} {
			response := once(t, o, name, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				return idempotency.Response{Status: 201}, errors.Join(effect(ctx, tx, "x"), fail(ctx, tx))
			})
			require.Equal(t, idempotency.Response{Status: 502, Replayed: replayed}, response)
		}
	}
	require.Zero(t, effects(t, pool, "x"))
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{Strict: true}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(false, func(*step) error { return errAway }), ends("ship")})
	for _, replayed := range []bool{false, true} {
		response := do(t, flow, "flow", nil)
		require.Equal(t, idempotency.Response{Status: 500, Replayed: replayed}, response)
	}
}

// Property: of ten requests at once with one key, one is executed; the others get its response, or
// that it is in progress; also in phases, and where the role's default isolation is another one. Row
// H7 of guarantees.md.
func TestTenAtOnceAreExecutedOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{WaitMax: 100 * time.Millisecond})
	other := newOperation(t, withDefault(t, pool, pgx.Serializable), idempotency.Config{WaitMax: 100 * time.Millisecond})
	flow := newFlow(t, other, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
		s.Finish(idempotency.Response{Status: 201})
		return effect(ctx, tx, s.Key.Value)
	}}})
	const rounds = 50
	for round := range rounds {
		value := fmt.Sprint(round)
		request := func() (idempotency.Response, error) { return o.Once(t.Context(), key(value), insertOnce(value)) }
		if round%2 == 1 {
			request = func() (idempotency.Response, error) { return flow.Do(t.Context(), key(value), nil) }
		}
		var executed atomic.Int64
		var group sync.WaitGroup
		for range 10 {
			group.Go(func() {
				response, err := request()
				if !errors.Is(err, idempotency.ErrInProgress) && assert.NoError(t, err) && !response.Replayed {
					executed.Add(1)
				}
			})
		}
		group.Wait()
		require.EqualValues(t, 1, executed.Load(), round)
	}
	require.Equal(t, rounds, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
	require.Equal(t, rounds, pgtest.Count(t, pool, `SELECT count(DISTINCT name) FROM effects`))
}

// Property: keys out of bounds are refused before anything is sent to the database. Row H9 of
// guarantees.md.
func TestKeysOutOfBounds(t *testing.T) {
	t.Parallel()
	o := newOperation(t, pgtest.NoPool(t), idempotency.Config{})
	for _, k := range []idempotency.Key{
		{Scope: "", Value: "a"},
		{Scope: "a", Value: ""},
		{Scope: "a", Value: string(make([]byte, 256))},
		{Scope: "a", Value: "a\x00"},
		{Scope: "a", Value: "\xff"},
		{Scope: "a\n", Value: "a"},
		{Scope: "a", Value: "a", Operation: "another"},
	} {
		_, err := o.Once(t.Context(), k, insertOnce("a"))
		require.ErrorIs(t, err, idempotency.ErrInvalid, "%+v", k)
	}
}

// Property: Advise reports weaknesses of a value alone; it reports none for random values and
// names.
func TestAdviceOnOneValue(t *testing.T) {
	t.Parallel()
	type weak = []idempotency.Weakness
	for value, want := range map[string]weak{
		"a1b2":                                        {idempotency.WeakShort},
		"4127":                                        {idempotency.WeakShort, idempotency.WeakNumber},
		"00004127":                                    {idempotency.WeakNumber},
		"1732199163123456789":                         {idempotency.WeakNumber},
		"2026-11-21T14:26:03Z":                        {idempotency.WeakNumber},
		"2026-11-21T14:26:03.123456789+02:00":         {idempotency.WeakNumber},
		"2026-11-21 14:26":                            {idempotency.WeakNumber},
		"00000000-0000-0000-0000-000000000000":        {idempotency.WeakConstant},
		"aaaaaaaaaaaa":                                {idempotency.WeakConstant},
		idempotency.NewKey():                          nil,
		uuid.NewString():                              nil,
		"stripe-node-retry-" + uuid.NewString():       nil,
		"KG5LxwFBepaKHyUD":                            nil, // Stripe's example
		"01ARZ3NDEKTSV4RRFFQ69G5FAV":                  nil, // a ULID
		"295617483920475610293847561029384756":        nil, // 119 bits, drawn
		idempotency.Domain("charge", "order", "4127"): nil,
		idempotency.Domain("pay", "7"):                nil,
	} {
		require.ElementsMatch(t, want, idempotency.Advise(value), value)
	}
}

// Property: a statement that takes too long is the request's failure, which Strict stores, with a line in
// the log; a transaction that was idle for too long is not. A locked table is no wait without a bound.
func TestTimeouts(t *testing.T) {
	t.Parallel()
	pool, said := newPool(t), &bytes.Buffer{}
	o := newOperation(t, pool, idempotency.Config{Strict: true, StatementTimeout: 100 * time.Millisecond, LockTimeout: 300 * time.Millisecond, IdleTimeout: 200 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(said, nil))})
	response := once(t, o, "slow", nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		_, err := tx.Exec(ctx, `SELECT pg_sleep(1)`)
		return idempotency.Response{}, err
	})
	require.Equal(t, 500, response.Status)
	require.Contains(t, said.String(), "statement timeout")
	_, err := o.Once(t.Context(), key("idle"), func(ctx context.Context, _ pgx.Tx) (idempotency.Response, error) {
		_, err := pool.Exec(ctx, `SELECT pg_sleep(0.5)`)
		return idempotency.Response{Status: 201}, err
	})
	require.Error(t, err)
	require.Equal(t, "missing", stateOf(t, pool, "idle"))
	locker := pgtest.Connect(t, pool.Config().ConnString())
	pgtest.Exec(t, locker, `BEGIN; INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state) VALUES ('tenant', 'order', 'claimed', sha256('x'), 'finished')`)
	_, err = newFlow(t, o, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{ends("ship")}).Do(t.Context(), key("claimed"), nil)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	pgtest.Exec(t, locker, `LOCK TABLE effectonce.idempotency_keys`)
	fresh := newOperation(t, pgtest.PoolOf(t, pool.Config()), o.Config()) // which has prepared nothing
	flow := newFlow(t, newOperation(t, pgtest.PoolOf(t, pool.Config()), o.Config()), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{ends("ship")})
	begun := time.Now()
	_, err = fresh.Once(t.Context(), key("locked"), insertOnce("locked"))
	require.ErrorContains(t, err, "locks idempotency_keys")
	_, err = flow.Do(t.Context(), key("locked"), nil)
	require.ErrorContains(t, err, "locks idempotency_keys")
	require.Less(t, time.Since(begun), 10*time.Second)
}
