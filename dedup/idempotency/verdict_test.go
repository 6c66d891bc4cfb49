package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
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
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// broken is a statement that fails.
func broken(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `SELECT 1 / 0`)
	return err
}

// Property: a verdict is stored, even on a connection whose transaction has failed, however pgx
// sends statements, and whether or not the work returns the failure; the writes and settings of the
// work are gone, and the connection is usable. Row H25 of guarantees.md.
func TestVerdictBehindAFailedStatement(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	names := []string{"final", "strict"}
	for i, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		config := pool.Config()
		config.ConnConfig.DefaultQueryExecMode, config.MaxConns = mode, 1
		one := pgtest.PoolOf(t, config)
		for j, name := range names {
			cfg := map[string]idempotency.Config{"strict": {Strict: true}}[name]
			o, value := newOperation(t, one, cfg), fmt.Sprint(mode, name)
			response, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				_, err := tx.Exec(ctx, `SET LOCAL synchronous_commit = off`)
				require.NoError(t, errors.Join(err, effect(ctx, tx, value)))
				err = broken(ctx, tx)
				if (i+j)%2 == 0 { // swallowed
					err = nil
				}
				if name == "final" {
					return idempotency.Response{}, idempotency.Final(idempotency.Response{Status: 402}, errors.Join(errAway, err))
				}
				return idempotency.Response{Status: 201}, err
			})
			require.NoError(t, err, "%s %v", value, mode)
			require.NotEqual(t, 201, response.Status)
			again, err := newOperation(t, pool, cfg).Once(t.Context(), key(value), insertOnce(value))
			require.NoError(t, err)
			require.Equal(t, idempotency.Response{Status: response.Status, Replayed: true}, again)
			require.Zero(t, effects(t, pool, value))
			_, err = o.Once(t.Context(), key(value+" next"), insertOnce("next"))
			require.NoError(t, err, "the connection is in order")
		}
	}
}

// Property: work that ends its transaction behind the library's back is no success, and as a phase
// does not move the recovery point. What it rolled back is gone, and so is what it wrote in a
// transaction that it began instead. It cannot commit by itself.
func TestWorkThatEndedItsTransactionIsNoSuccess(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	for value, sql := range map[string]string{
		"comment": "-- tidy up\nROLLBACK", "several": "SELECT 1; ROLLBACK", "rollback": "ROLLBACK", "begin": "ROLLBACK; BEGIN", "commit": "COMMIT",
		"semicolon": " ; COMMIT", "by method": "",
	} {
		work := func(ctx context.Context, tx pgx.Tx, name string) error {
			err := effect(ctx, tx, name)
			switch value {
			case "comment", "several", "semicolon":
				_, ended := tx.Exec(ctx, sql)
				return errors.Join(err, ended)
			case "by method":
				return errors.Join(err, tx.Commit(ctx), tx.Rollback(ctx))
			}
			_, ended := tx.Conn().Exec(ctx, sql)
			if value == "rollback" || value == "begin" {
				ended = errors.Join(ended, effect(ctx, tx, "lost"))
			}
			return errors.Join(err, ended)
		}
		_, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201}, work(ctx, tx, value)
		})
		require.Regexp(t, "ended its transaction|ends the transaction, not the handler", err, value)
		require.NotErrorIs(t, err, idempotency.ErrIndeterminate)
		require.Zero(t, effects(t, pool, value))
		flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
			s.Finish(idempotency.Response{Status: 201})
			return work(ctx, tx, "flow")
		}}})
		_, err = flow.Do(t.Context(), key("flow "+value), nil)
		require.Error(t, err, value)
	}
	require.Zero(t, effects(t, pool, "flow")+effects(t, pool, "lost"))
	require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished' OR phases <> '{}' OR flow IS NULL`))
	_, err := o.Once(t.Context(), key("next"), insertOnce("next"))
	require.NoError(t, err, "the connection is in order")
}

// Property: a failed statement that the work does not report is no success; if it failed because of
// other transactions, the work is run again. Rows H20, H25 of guarantees.md.
func TestHiddenFailureIsNoSuccess(t *testing.T) {
	t.Parallel()
	o := newOperation(t, newPool(t), idempotency.Config{})
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
		for sql, again := range map[string]bool{`DO $$ BEGIN RAISE EXCEPTION 'serialize' USING ERRCODE = '40001'; END $$`: true, `SELECT 1 / 0`: false} {
			runs := 0
			_, err := o.Once(t.Context(), key(fmt.Sprint(name, again)), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				if runs++; runs == 1 {
					fail(ctx, tx, sql)
					_, _ = tx.Exec(ctx, `SELECT 1`) // which says that the transaction is aborted
				}
				return idempotency.Response{Status: 201}, nil
			})
			if again {
				require.NoError(t, err, name)
				require.Equal(t, 2, runs, name)
			} else {
				require.ErrorContains(t, err, "the work returned no error", name)
				require.Equal(t, 1, runs, name)
			}
		}
	}
}

// Property: if the claim is lost with its connection, or ended by the work itself, doubt is still stored,
// unless another request executed the work. An outcome is not: the key is free, or has the outcome of
// that request. Effects exist only together with the answer that reports them.
func TestVerdictOverALostClaim(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	own := func(sql string) func(context.Context, pgx.Tx) {
		return func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Conn().Exec(ctx, sql) }
	}
	for name, lose := range map[string]func(ctx context.Context, tx pgx.Tx){
		"connection": func(ctx context.Context, tx pgx.Tx) {
			_, _ = tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
		},
		"not noticed": func(ctx context.Context, tx pgx.Tx) {
			_, _ = pool.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, tx.Conn().PgConn().PID())
		},
		"rows left open": func(ctx context.Context, tx pgx.Tx) {
			_, _ = tx.Query(ctx, `SELECT generate_series(1, 1000000)`) //nolint:sqlclosecheck // on purpose
		},
		"rollback": own("ROLLBACK"), "begin anew": own("ROLLBACK; BEGIN; SAVEPOINT other"), "release": own("RELEASE SAVEPOINT effectonce_work"),
		"commit": own("COMMIT"), "commit and begin": own("COMMIT; BEGIN"),
	} {
		for _, kind := range []string{"final", "doubt", "final meanwhile", "doubt meanwhile"} {
			value := name + " " + kind
			o := newOperation(t, pool, idempotency.Config{WaitMax: 10 * time.Second})
			meanwhile := false
			_, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				require.NoError(t, effect(ctx, tx, value))
				lose(ctx, tx)
				if strings.HasSuffix(kind, "meanwhile") && tx.Conn().IsClosed() {
					meanwhile = true
					other, err := newOperation(t, pool, idempotency.Config{WaitMax: 10 * time.Second}).Once(ctx, key(value), insertOnce(value))
					require.NoError(t, err)
					require.False(t, other.Replayed)
				}
				if strings.HasPrefix(kind, "doubt") {
					return idempotency.Response{}, idempotency.Indeterminate(errAway)
				}
				return idempotency.Response{}, idempotency.Final(idempotency.Response{Status: 402}, errAway)
			})
			require.Error(t, err, value)
			require.Equal(t, strings.HasPrefix(kind, "doubt"), errors.Is(err, idempotency.ErrIndeterminate), "%s: %v", value, err)
			want := map[bool]string{false: "missing", true: "indeterminate"}[strings.HasPrefix(kind, "doubt")]
			if meanwhile {
				want = "finished"
			}
			require.Equal(t, map[bool]int{false: 0, true: 1}[meanwhile], effects(t, pool, value))
			require.Equal(t, want, stateOf(t, pool, value), value)
		}
	}
}

// Property: work with a final outcome is executed once, however many requests wait for it, in several
// processes: none of them executes it between the end of the first and its outcome, and each gets
// that outcome. The same holds for one in doubt. Row H25.
func TestFinalOutcomeRunsOnce(t *testing.T) {
	t.Parallel()
	const size = 20
	pool := poolOf(t, newPool(t), size+4)
	declined := idempotency.Response{Status: 402, Body: []byte("declined")}
	failed := func(error) idempotency.Response { return declined }
	for name, c := range map[string]struct {
		cfg  idempotency.Config
		fail func(ctx context.Context, tx pgx.Tx) error
	}{
		"final":           {idempotency.Config{}, func(context.Context, pgx.Tx) error { return idempotency.Final(declined, errAway) }},
		"final over SQL":  {idempotency.Config{}, func(ctx context.Context, tx pgx.Tx) error { return idempotency.Final(declined, broken(ctx, tx)) }},
		"strict over SQL": {idempotency.Config{Strict: true, Failed: failed}, broken},
		"doubt":           {idempotency.Config{}, func(context.Context, pgx.Tx) error { return idempotency.Indeterminate(errAway) }},
	} {
		c.cfg.WaitMax = time.Minute
		var runs, outcomes atomic.Int64
		var group sync.WaitGroup
		begun := make(chan struct{})
		for i := range size {
			o := newOperation(t, pool, c.cfg) // a process each
			group.Go(func() {
				if i > 0 {
					<-begun
				}
				response, err := o.Once(t.Context(), key(name), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					if runs.Add(1) > 1 { // a copy of a declined payment is accepted
						return idempotency.Response{Status: 201}, nil
					}
					close(begun)
					if err := until(ctx, pool, `SELECT (count(*) >= 3)::int FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`); err != nil {
						return idempotency.Response{}, err
					}
					return idempotency.Response{}, errors.Join(effect(ctx, tx, "undone"), c.fail(ctx, tx))
				})
				if response.Replayed = false; errors.Is(err, idempotency.ErrIndeterminate) && name == "doubt" || err == nil && assert.ObjectsAreEqual(declined, response) {
					outcomes.Add(1)
				}
			})
		}
		group.Wait()
		require.Equal(t, []int64{1, size}, []int64{runs.Load(), outcomes.Load()}, name)
	}
	require.Zero(t, effects(t, pool, "undone"))
}

// Property: a verdict that was read from a snapshot that cannot be serialized is not stored: the
// work is run again. Row H20 of guarantees.md.
func TestVerdictOfADoomedTransactionIsRunAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	pgtest.Exec(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int); INSERT INTO accounts VALUES (1, 0), (2, 0)`)
	o, runs := newOperation(t, pool, idempotency.Config{Isolation: pgx.Serializable}), 0
	response := once(t, o, "k", nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
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
	require.Equal(t, runs-1, response.Status-400, "what it says is of the snapshot that counts")
}

// verdictTable is the table of doc.go: for each row what is said in each column.
func verdictTable(t *testing.T) (columns []string, rows map[string][]string) {
	t.Helper()
	text, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(text), "//\t               Handler")
	require.True(t, found)
	table, _, _ = strings.Cut("Handler"+table, "\n//\n")
	rows = map[string][]string{}
	for i, line := range strings.Split(table, "\n") {
		cells := regexp.MustCompile(` {2,}`).Split(strings.TrimPrefix(line, "//\t"), -1)
		if i == 0 {
			columns = cells
			continue
		}
		require.Len(t, cells, 1+len(columns), line)
		rows[cells[0]] = cells[1:]
	}
	return columns, rows
}

// Property: the table in the package's documentation states the effect of each verdict on a key.
func TestVerdictsAreWhatIsDocumented(t *testing.T) {
	t.Parallel()
	because := errors.New("because")
	verdicts := map[string]error{
		"no error": nil, "other error": because, "NotDone": idempotency.NotDone(because), "Indeterminate": idempotency.Indeterminate(because),
		"Final": idempotency.Final(idempotency.Response{Status: 422}, because),
	}
	statuses := map[string]int{"Status 201": 201, "Status 422": 422, "Status 503": 503}
	columns, rows := verdictTable(t)
	require.Len(t, rows, len(verdicts)+len(statuses))
	for i, column := range columns {
		t.Run(column, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			for row, cells := range rows {
				verdict, known := verdicts[row]
				if cells[i] == "-" || !known && statuses[row] == 0 {
					continue
				}
				k := strings.ReplaceAll(row, " ", "-")
				give(t, pool, column, k, verdict, statuses[row])
				require.Equal(t, cells[i], becameOf(t, pool, k), row)
			}
		})
	}
}

// becameOf is what a key is, by its row and its effects.
func becameOf(t *testing.T, pool *pgxpool.Pool, k string) string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT state FROM effectonce.idempotency_keys WHERE key = $1`, k)
	require.NoError(t, err)
	states, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	n := effects(t, pool, k)
	if len(states) == 0 {
		require.Zero(t, n)
		return "free"
	}
	require.Len(t, states, 1)
	word := map[string]string{"finished": "refused", "running": "resumed", "indeterminate": "undecided"}[states[0]]
	if n == 1 && word == "refused" {
		return "stored"
	}
	require.Zero(t, n)
	return word
}

// give has the work of a column end with an error, or with a status.
func give(t *testing.T, pool *pgxpool.Pool, column, k string, verdict error, status int) {
	t.Helper()
	once := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201}, errors.Join(effect(ctx, tx, k), verdict)
	}
	phase := idempotency.Phase[payment]{Name: "work", AtMostOnce: column == "AtMostOnce" || column == "its Write" || column == "Reconcile"}
	phase.Write = func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
		step.Finish(idempotency.Response{Status: 201})
		if err := effect(ctx, tx, k); err != nil || !strings.HasSuffix(column, "Write") {
			return err
		}
		return verdict
	}
	var cfg idempotency.FlowConfig[payment]
	switch column {
	case "Handler":
		m, err := httpkey.New(pool, func(*http.Request) (string, error) { return "tenant", nil }, httpkey.Config{Operation: idempotency.Config{Operation: "order"}})
		require.NoError(t, err)
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", http.NoBody)
		request.Header.Set("Idempotency-Key", k)
		m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			assert.NoError(t, effect(r.Context(), httpkey.Tx(r), k))
			if verdict != nil {
				httpkey.Fail(r, verdict)
			}
			w.WriteHeader(max(status, 201))
		})).ServeHTTP(httptest.NewRecorder(), request)
		return
	case "Once":
		_, _ = newOperation(t, pool, idempotency.Config{}).Once(t.Context(), key(k), once)
		return
	case "webhook":
		scheme := webhook.SchemeOf(func(http.Header, []byte) (webhook.Event, error) { return webhook.Event{ID: k}, nil })
		receiver, err := webhook.New(pool, webhook.Config{Sender: "sender", Name: "webhook", Scheme: scheme}, func(ctx context.Context, tx pgx.Tx, _ webhook.Event) error {
			_, err := once(ctx, tx)
			return err
		})
		require.NoError(t, err)
		receiver.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", http.NoBody))
		return
	case "Call", "AtMostOnce":
		phase.Call = func(context.Context, *idempotency.Step[payment]) error { return verdict }
	case "its Write":
		phase.Call = func(context.Context, *idempotency.Step[payment]) error { return nil }
	case "Reconcile":
		phase.Call = func(context.Context, *idempotency.Step[payment]) error { return errAway }
		cfg.Reconcile = func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			return idempotency.Unknown(), verdict
		}
	}
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, []idempotency.Phase[payment]{phase})
	_, _ = flow.Do(t.Context(), key(k), nil)
	if cfg.Reconcile != nil {
		passes(t, pool, time.Minute)
		decided, err := flow.Reconcile(t.Context())
		require.ErrorIs(t, err, verdict)
		require.Zero(t, decided)
	}
}
