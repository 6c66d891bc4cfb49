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
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const waiting = `SELECT (count(*) >= %d)::int FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`

// crowd asks for one key from several operations at once, as replicas do, and returns what each
// got. The first execution ends once all others wait for it.
func crowd(t *testing.T, size int, cfg idempotency.Config, work func(ctx context.Context, tx pgx.Tx, run int64) (idempotency.Response, error)) (responses []idempotency.Response, failures []error, runs int64) {
	t.Helper()
	pool := newPool(t)
	wide := pool.Config()
	wide.MaxConns = int32(size) + 4
	pool = pgtest.PoolOf(t, wide)
	cfg.WaitMax, cfg.Operation = time.Minute, "order"
	var ran atomic.Int64
	var group sync.WaitGroup
	responses, failures = make([]idempotency.Response, size), make([]error, size)
	begun := make(chan struct{})
	begin := sync.OnceFunc(func() { close(begun) })
	for i := range size {
		o, err := idempotency.New(pool, cfg)
		require.NoError(t, err)
		group.Go(func() {
			if i > 0 {
				<-begun
			}
			defer begin()
			responses[i], failures[i] = o.Once(t.Context(), key("k"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				run := ran.Add(1)
				if run == 1 {
					begin()
					if err := until(ctx, pool, fmt.Sprintf(waiting, min(size-1, 3))); err != nil {
						return idempotency.Response{}, err
					}
				}
				return work(ctx, tx, run)
			})
		})
	}
	group.Wait()
	require.Zero(t, effects(t, pool, "undone"))
	return responses, failures, ran.Load()
}

// Property: work with a final outcome is executed once, however many requests wait for it: none of
// them executes it between the end of the first and its outcome, and each gets that outcome. Row
// H25.
func TestFinalOutcomeRunsOnce(t *testing.T) {
	t.Parallel()
	declined := idempotency.Response{Status: 402, Body: []byte("declined")}
	failed := func(error) idempotency.Response { return declined }
	for name, c := range map[string]struct {
		cfg  idempotency.Config
		fail func(ctx context.Context, tx pgx.Tx) error
		runs int64
	}{
		"final":           {fail: func(context.Context, pgx.Tx) error { return idempotency.Final(declined, errAway) }, runs: 1},
		"final over SQL":  {fail: func(ctx context.Context, tx pgx.Tx) error { return idempotency.Final(declined, broken(ctx, tx)) }, runs: 1},
		"strict":          {cfg: idempotency.Config{Strict: true, Failed: failed}, fail: func(context.Context, pgx.Tx) error { return errAway }, runs: 1},
		"strict over SQL": {cfg: idempotency.Config{Strict: true, Failed: failed}, fail: broken, runs: 1},
		"last attempt":    {cfg: idempotency.Config{AttemptsMax: 1, Failed: failed}, fail: func(context.Context, pgx.Tx) error { return errAway }, runs: 1},
		"third attempt":   {cfg: idempotency.Config{AttemptsMax: 3, Failed: failed}, fail: func(context.Context, pgx.Tx) error { return errAway }, runs: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			responses, failures, runs := crowd(t, 20, c.cfg, func(ctx context.Context, tx pgx.Tx, run int64) (idempotency.Response, error) {
				if run > c.runs { // a copy of a declined payment is accepted
					return idempotency.Response{Status: 201}, nil
				}
				if err := effect(ctx, tx, "undone"); err != nil {
					return idempotency.Response{}, err
				}
				return idempotency.Response{}, c.fail(ctx, tx)
			})
			assert.Equal(t, c.runs, runs)
			var failed int64
			for i, err := range failures {
				if failed++; err == nil {
					failed--
					responses[i].Replayed = false
					assert.Equal(t, declined, responses[i])
				}
			}
			assert.Equal(t, c.runs-1, failed, "attempts before the last: %v", failures)
		})
	}
}

// broken is a statement that fails.
func broken(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `SELECT 1 / 0`)
	return err
}

// Property: work in doubt is not run again by those who wait for it. Row H25 of guarantees.md.
func TestDoubtStopsThoseWhoWait(t *testing.T) {
	t.Parallel()
	_, failures, runs := crowd(t, 10, idempotency.Config{}, func(ctx context.Context, tx pgx.Tx, _ int64) (idempotency.Response, error) {
		return idempotency.Response{}, idempotency.Indeterminate(errors.Join(errAway, effect(ctx, tx, "undone")))
	})
	assert.Equal(t, int64(1), runs)
	for _, err := range failures {
		require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	}
}

// Property: a verdict is stored, even on a connection whose transaction has failed, however pgx
// sends statements, and whether or not the work returns the failure; the writes and settings of the
// work are gone, and the connection is usable. Row H25 of guarantees.md.
func TestVerdictBehindAFailedStatement(t *testing.T) {
	t.Parallel()
	declined := idempotency.Response{Status: 402}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		pool := newPool(t)
		config := pool.Config()
		config.ConnConfig.DefaultQueryExecMode, config.MaxConns = mode, 1
		for name, cfg := range map[string]idempotency.Config{"final": {}, "strict": {Strict: true}, "bounded": {AttemptsMax: 1}} {
			for way, fail := range map[string]func(ctx context.Context, tx pgx.Tx) error{
				"returned": broken,
				"swallowed": func(ctx context.Context, tx pgx.Tx) error {
					_ = broken(ctx, tx)
					return nil
				},
				"none": func(context.Context, pgx.Tx) error { return errAway },
			} {
				value := name + way
				one, err := pgxpool.NewWithConfig(t.Context(), config) // nothing is prepared on its connection
				require.NoError(t, err)
				o := newOperation(t, one, cfg)
				o2 := newOperation(t, pool, cfg)
				response, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					_, err := tx.Exec(ctx, `SET LOCAL synchronous_commit = off`)
					require.NoError(t, err)
					require.NoError(t, effect(ctx, tx, value))
					err = fail(ctx, tx)
					if name == "final" {
						return idempotency.Response{}, idempotency.Final(declined, errors.Join(errAway, err))
					}
					return idempotency.Response{Status: 201}, err
				})
				require.NoError(t, err, "%s %v", value, mode)
				require.NotEqual(t, 201, response.Status)
				again, err := o2.Once(t.Context(), key(value), insertOnce(value))
				require.NoError(t, err)
				require.Equal(t, idempotency.Response{Status: response.Status, Replayed: true}, again)
				require.Zero(t, effects(t, pool, value))
				_, err = o.Once(t.Context(), key(value+" next"), insertOnce("next"))
				require.NoError(t, err, "the connection is in order")
				one.Close()
			}
		}
	}
}

// Property: a failed statement that the work does not report is no success; if it failed because of
// other transactions, the work is run again. Rows H20, H25 of guarantees.md.
func TestHiddenFailureIsNoSuccess(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	conflict := `DO $$ BEGIN RAISE EXCEPTION 'serialize' USING ERRCODE = '40001'; END $$`
	for name, fail := range map[string]func(ctx context.Context, tx pgx.Tx, sql string){
		"exec": func(ctx context.Context, tx pgx.Tx, sql string) { _, _ = tx.Exec(ctx, sql) },
		"row":  func(ctx context.Context, tx pgx.Tx, sql string) { _ = tx.QueryRow(ctx, sql).Scan(nil) },
		"rows": func(ctx context.Context, tx pgx.Tx, sql string) { rows, _ := tx.Query(ctx, sql); rows.Close() },
		"batch": func(ctx context.Context, tx pgx.Tx, sql string) {
			b := &pgx.Batch{}
			b.Queue(sql)
			_ = tx.SendBatch(ctx, b).Close()
		},
	} {
		for _, cfg := range []idempotency.Config{{}, {Strict: true}} {
			o, runs, value := newOperation(t, pool, cfg), 0, fmt.Sprint(name, cfg.Strict)
			response, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				if runs++; runs == 1 {
					fail(ctx, tx, conflict)
					_, _ = tx.Exec(ctx, `SELECT 1`) // which says that the transaction is aborted
				}
				if runs < 3 {
					return idempotency.Response{Status: 201}, nil
				}
				return idempotency.Response{}, errAway
			})
			require.NoError(t, err, value)
			require.Equal(t, 201, response.Status, value)
			require.Equal(t, 2, runs, value)

			runs = 0
			response, err = o.Once(t.Context(), key(value+" other"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				runs++
				fail(ctx, tx, `SELECT 1 / 0`)
				return idempotency.Response{Status: 201}, nil
			})
			require.Equal(t, 1, runs, value)
			if cfg.Strict {
				require.NoError(t, err)
				require.Equal(t, 500, response.Status)
			} else {
				require.ErrorContains(t, err, "the work returned no error", value)
			}
		}
	}
}

// Property: if the claim is lost with its connection, or ended by the work itself, the verdict is
// still stored, unless another request changed the key: then that counts. Effects exist only
// together with the answer that reports them.
func TestVerdictOverALostClaim(t *testing.T) {
	t.Parallel()
	declined := idempotency.Response{Status: 402}
	for name, lose := range map[string]func(ctx context.Context, pool *pgxpool.Pool, tx pgx.Tx){
		"connection": func(ctx context.Context, _ *pgxpool.Pool, tx pgx.Tx) {
			_, _ = tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
		},
		"connection, not noticed": func(ctx context.Context, pool *pgxpool.Pool, tx pgx.Tx) {
			_, _ = pool.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, tx.Conn().PgConn().PID())
		},
		"context": func(ctx context.Context, _ *pgxpool.Pool, tx pgx.Tx) {
			short, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			_, _ = tx.Exec(short, `SELECT pg_sleep(60)`)
		},
		"rows left open": func(ctx context.Context, _ *pgxpool.Pool, tx pgx.Tx) {
			_, _ = tx.Query(ctx, `SELECT generate_series(1, 1000000)`) //nolint:sqlclosecheck // on purpose
		},
		"rollback":           own("ROLLBACK"),
		"rollback and begin": own("ROLLBACK; BEGIN"),
		"begin anew":         own("ROLLBACK; BEGIN; SAVEPOINT other"),
		"release":            own("RELEASE SAVEPOINT effectonce_work"),
		"commit":             own("COMMIT"),
		"commit and begin":   own("COMMIT; BEGIN"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			commits := name == "commit" || name == "commit and begin"
			for _, value := range []string{"final", "doubt", "meanwhile"} {
				o := newOperation(t, pool, idempotency.Config{WaitMax: 10 * time.Second})
				response, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					require.NoError(t, effect(ctx, tx, value))
					lose(ctx, pool, tx)
					if value == "meanwhile" && !commits && tx.Conn().IsClosed() {
						other, err := newOperation(t, pool, idempotency.Config{WaitMax: 10 * time.Second}).Once(ctx, key(value), insertOnce(value))
						require.NoError(t, err)
						require.False(t, other.Replayed)
					}
					if value == "doubt" {
						return idempotency.Response{}, idempotency.Indeterminate(errAway)
					}
					return idempotency.Response{}, idempotency.Final(declined, errAway)
				})
				stored := stateOf(t, pool, value)
				t.Log(value, response.Status, err, stored)
				switch {
				case commits, value == "doubt":
					require.ErrorIs(t, err, idempotency.ErrIndeterminate, value)
					require.Equal(t, "indeterminate", stored)
				case value == "meanwhile" && response.Status == 201:
					require.NoError(t, err)
					require.True(t, response.Replayed)
					require.Equal(t, 1, effects(t, pool, value))
					continue
				default:
					require.NoError(t, err, value)
					require.Equal(t, 402, response.Status)
					require.Equal(t, "finished", stored)
				}
				if !commits {
					require.Zero(t, effects(t, pool, value))
				}
			}
		})
	}
}

func own(sql string) func(context.Context, *pgxpool.Pool, pgx.Tx) {
	return func(ctx context.Context, _ *pgxpool.Pool, tx pgx.Tx) { _, _ = tx.Conn().Exec(ctx, sql) }
}

// Property: a verdict that was read from a snapshot that cannot be serialized is not stored: the
// work is run again. Row H20 of guarantees.md.
func TestVerdictOfADoomedTransactionIsRunAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE accounts (id int PRIMARY KEY, balance int); INSERT INTO accounts VALUES (1, 0), (2, 0)`)
	require.NoError(t, err)
	o, runs := newOperation(t, pool, idempotency.Config{Isolation: pgx.Serializable}), 0
	response, err := o.Once(t.Context(), key("k"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		runs++
		var sum int
		require.NoError(t, tx.QueryRow(ctx, `SELECT sum(balance) FROM accounts`).Scan(&sum))
		if runs == 1 { // both read both, and each writes one
			require.NoError(t, pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(other pgx.Tx) error {
				_, err := other.Exec(ctx, `UPDATE accounts SET balance = (SELECT sum(balance) + 100 FROM accounts) WHERE id = 1`)
				return err
			}))
		}
		if _, err := tx.Exec(ctx, `UPDATE accounts SET balance = -1 WHERE id = 2`); err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.Response{Status: 400 + sum/100}, idempotency.Final(idempotency.Response{Status: 400 + sum/100}, errAway)
	})
	require.NoError(t, err)
	require.Equal(t, runs-1, response.Status-400, "what it says is of the snapshot that counts")
}

// Property: a failed attempt leaves a count that is forgotten, and for a key that a flow has had,
// nothing but what was stored before; settings made by the work do not apply to the verdict.
func TestCountIsStillACount(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{AttemptsMax: 10})
	fail := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, errors.Join(errAway, effect(ctx, tx, "undone"))
	}
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(false, func(*step) error { return errAway }), ends("ship")})
	_, err := flow.Do(t.Context(), key("of a flow"), nil)
	require.ErrorIs(t, err, errAway)
	columns := func(value string) (s string) {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT concat_ws(' ', state, lock_token, locked_by IS NULL, attempts, retry_at - clock_timestamp() > interval '23 h', expires_at IS NULL, error)
			FROM effectonce.idempotency_keys WHERE key = $1`, value).Scan(&s))
		return s
	}
	require.Equal(t, "running 1 f 1 f t call of phase \"charge\": the bank is away", columns("of a flow"))
	for n := range 3 {
		for _, value := range []string{"count", "of a flow"} {
			_, err := o.Once(t.Context(), key(value), fail)
			require.ErrorIs(t, err, errAway)
		}
		require.Equal(t, fmt.Sprintf("running 1 t %d t f the bank is away", n+1), columns("count"))
		require.Equal(t, fmt.Sprintf("running 1 f %d f t the bank is away", n+2), columns("of a flow"))
	}
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET retry_at = clock_timestamp() - interval '1 s', expires_at = expires_at - interval '2 days'`)
	require.NoError(t, err)
	reaped, err := o.Reap(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(1), reaped)
	_, err = o.Once(t.Context(), key("of a flow"), insertOnce("k"))
	require.NoError(t, err)
	require.Equal(t, "finished 1 t 5 f", columns("of a flow")[:len("finished 1 t 5 f")])
}

// Property: savepoints belong to the work: it can create them, release them and roll back to them,
// but not to the library's.
func TestSavepointsOfTheWork(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	nested := func(ctx context.Context, tx pgx.Tx) error {
		for i, end := range []func(pgx.Tx) error{func(tx pgx.Tx) error { return tx.Commit(ctx) }, func(tx pgx.Tx) error { return tx.Rollback(ctx) }} {
			sub, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if err := errors.Join(effect(ctx, sub, fmt.Sprint("nested ", i)), end(sub)); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, `SAVEPOINT mine; SAVEPOINT two; ROLLBACK TO mine; RELEASE mine`)
		return err
	}
	_, err := o.Once(t.Context(), key("final"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		require.NoError(t, nested(ctx, tx))
		return idempotency.Response{}, idempotency.Final(idempotency.Response{Status: 402}, errAway)
	})
	require.NoError(t, err)
	require.Zero(t, effects(t, pool, "nested 0"))
	_, err = o.Once(t.Context(), key("done"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201}, nested(ctx, tx)
	})
	require.NoError(t, err)
	require.Equal(t, []int{1, 0}, []int{effects(t, pool, "nested 0"), effects(t, pool, "nested 1")})
	for _, sql := range []string{"SAVEPOINT effectonce_work", "release savepoint EFFECTONCE_WORK", `ROLLBACK TO "effectonce_work"`} {
		_, err = o.Once(t.Context(), key(sql), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			_, err := tx.Exec(ctx, sql)
			return idempotency.Response{Status: 201}, err
		})
		require.ErrorContains(t, err, "the caller of the handler ends the transaction", sql)
	}
}
