package httpkey_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// windowPasses forgets all keys, as the reaper does when their window is over.
func windowPasses(t *testing.T, pool *pgxpool.Pool, m *httpkey.Middleware) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() - interval '1 second'`)
	require.NoError(t, err)
	_, err = m.Operation().Reap(t.Context())
	require.NoError(t, err)
	require.Zero(t, keys(t, pool))
}

// Property: a client that retries after the window, for a request whose rows exist under IDs
// derived from its key, gets 410 (the request was executed), and so does each later retry; there is
// one effect. The same holds if the handler checks itself, or fails only then, and in a flow. Row
// H33.
func TestAfterTheWindow(t *testing.T) {
	t.Parallel()
	type work = func(ctx context.Context, tx pgx.Tx, k idempotency.Key) error
	exec := func(sql string) work {
		return func(ctx context.Context, tx pgx.Tx, k idempotency.Key) error {
			_, err := tx.Exec(ctx, sql, k.ChildID("order"))
			return err
		}
	}
	order := exec(`INSERT INTO orders (id) VALUES ($1)`)
	for name, c := range map[string]struct {
		cfg  idempotency.Config
		work work
	}{
		"primary key":  {idempotency.Config{}, order},
		"several":      {idempotency.Config{}, exec(`INSERT INTO "Order lines" ("Order No", line, tenant) SELECT $1, n, 'a b' FROM generate_series(1, 3) AS n`)},
		"text":         {idempotency.Config{}, exec(`INSERT INTO "Texts" (id) VALUES ($1::uuid)`)},
		"strict":       {idempotency.Config{Strict: true}, order},
		"attempts":     {idempotency.Config{AttemptsMax: 1}, order},
		"own Failed":   {idempotency.Config{Strict: true, Failed: func(error) idempotency.Response { return idempotency.Response{Status: 500} }}, order},
		"serializable": {idempotency.Config{Isolation: pgx.Serializable}, order},
		"in a savepoint": {idempotency.Config{}, func(ctx context.Context, tx pgx.Tx, k idempotency.Key) error {
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return order(ctx, tx, k) })
		}},
		"explicit": {idempotency.Config{}, func(ctx context.Context, tx pgx.Tx, k idempotency.Key) error {
			tag, err := tx.Exec(ctx, `INSERT INTO orders (id) VALUES ($1) ON CONFLICT DO NOTHING`, k.ChildID("order"))
			if err == nil && tag.RowsAffected() == 0 {
				return idempotency.ErrExpired
			}
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id uuid PRIMARY KEY); CREATE TABLE "Texts" (id text UNIQUE);
				CREATE TABLE "Order lines" ("Order No" uuid, line int, tenant text, PRIMARY KEY (line, tenant, "Order No"))`)
			require.NoError(t, err)
			var described atomic.Int64
			made := func() int {
				return pgtest.Count(t, pool, `SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM "Texts") + (SELECT count(DISTINCT "Order No") FROM "Order lines")`)
			}
			check := func(s *server, m *httpkey.Middleware, path string) {
				before := made()
				ask := func() answer {
					a, err := s.ask(t.Context(), http.MethodPost, path, "k"+path, "a")
					require.NoError(t, err)
					return a
				}
				require.Equal(t, http.StatusCreated, ask().status)
				require.Equal(t, before+1, made())
				for range 2 {
					windowPasses(t, pool, m)
					for _, replayed := range []bool{false, true} {
						before := described.Load()
						a := ask()
						require.Equal(t, before+1, described.Load(), "in the form of this API")
						requireProblem(t, a, 410, httpkey.ProblemKeyExpired)
						require.Equal(t, replayed, a.replayed())
						require.Equal(t, "no-store", a.header.Get("Cache-Control"))
					}
					require.Equal(t, before+1, made())
				}
			}
			m := newMiddleware(t, pool, httpkey.Config{Operation: c.cfg, Describe: func(r *http.Request, answer httpkey.Answer) (string, []byte) {
				described.Add(1)
				return httpkey.ProblemJSON(r, answer)
			}})
			check(serve(t, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if err := c.work(r.Context(), httpkey.Tx(r), httpkey.Key(r)); err != nil {
					httpkey.Fail(r, err)
					return
				}
				w.WriteHeader(http.StatusCreated)
			}))), m, "/handler")
			if c.cfg.Isolation != "" {
				return
			}
			flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
				idempotency.Phase[charge]{Name: "begun", Write: func(context.Context, pgx.Tx, *idempotency.Step[charge]) error { return nil }},
				idempotency.Phase[charge]{
					Name: "order", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[charge]) error {
						step.Finish(idempotency.Response{Status: http.StatusCreated})
						return c.work(ctx, tx, step.Key)
					},
				})
			require.NoError(t, err)
			check(serve(t, newFlowHandler(t, m, flow, nil)), m, "/flow")
		})
	}
}

// Property: a refusal because of any other row is no proof that the request was executed, and stays
// a failure: of another request's ID, of an ID that is no child's, of one that the handler inserts
// twice itself, of a row that its role cannot see. Row H33 of guarantees.md.
func TestOtherRefusalsStayFailures(t *testing.T) {
	t.Parallel()
	insert := func(r *http.Request, ids ...any) error {
		for _, id := range ids {
			if _, err := httpkey.Tx(r).Exec(r.Context(), `INSERT INTO orders (id) VALUES ($1)`, id); err != nil {
				return err
			}
		}
		return nil
	}
	for name, work := range map[string]func(r *http.Request) error{
		"another's": func(r *http.Request) error {
			k := httpkey.Key(r)
			_ = k.ChildID("order")
			return insert(r, idempotency.Key{Scope: k.Scope, Operation: k.Operation, Value: "other"}.ChildID("order"))
		},
		"not derived": func(r *http.Request) error {
			k := httpkey.Key(r)
			return insert(r, idempotency.Key{Scope: k.Scope, Operation: k.Operation, Value: k.Value}.ChildID("order"))
		},
		"twice": func(r *http.Request) error { id := httpkey.Key(r).ChildID("line"); return insert(r, id, id) },
		"unseen": func(r *http.Request) error {
			_, err := httpkey.Tx(r).Exec(r.Context(), `SET ROLE pg_monitor`)
			return errors.Join(err, insert(r, httpkey.Key(r).ChildID("order")))
		},
		"forged": func(r *http.Request) error {
			_, err := httpkey.Tx(r).Exec(r.Context(), fmt.Sprintf(`DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '23505', SCHEMA = 'public', TABLE = 'orders',
				DETAIL = 'Key (true OR id)=(%s) already exists.'; END $$`, httpkey.Key(r).ChildID("forged")))
			return err
		},
		"not there": func(r *http.Request) error {
			_, err := httpkey.Tx(r).Exec(r.Context(), fmt.Sprintf(`DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '23505', SCHEMA = 'public', TABLE = 'orders',
				DETAIL = 'Key (id)=(%s) already exists.'; END $$`, httpkey.Key(r).ChildID("nowhere")))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id uuid PRIMARY KEY); GRANT INSERT ON orders TO PUBLIC`)
			require.NoError(t, err)
			for _, value := range []string{"k", "other"} {
				_, err := pool.Exec(t.Context(), `INSERT INTO orders (id) VALUES ($1)`, idempotency.Key{Scope: "acme", Operation: "api", Value: value}.ChildID("order"))
				require.NoError(t, err)
			}
			s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { httpkey.Fail(r, work(r)) })))
			requireProblem(t, s.post(t, "k", "a"), 500, httpkey.ProblemInternal)
			require.Zero(t, keys(t, pool))
		})
	}
}

// Property: a row that an earlier phase of the same flow inserted, or that a call commits by
// itself, is no earlier execution: the phase fails, as for any other row. Row H33 of guarantees.md.
func TestRowOfTheSameFlowIsNoEarlierExecution(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id uuid PRIMARY KEY)`)
	require.NoError(t, err)
	const order = `INSERT INTO orders (id) VALUES ($1)`
	m := newMiddleware(t, pool, httpkey.Config{})
	last := idempotency.Phase[charge]{Name: "last", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[charge]) error {
		_, err := tx.Exec(ctx, order, step.Key.ChildID("first"))
		return err
	}}
	for name, first := range map[string]idempotency.Phase[charge]{
		"phase": {Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[charge]) error {
			_, err := tx.Exec(ctx, order, step.ChildID())
			return err
		}},
		"call": {Call: func(ctx context.Context, step *idempotency.Step[charge]) error {
			_, err := pool.Exec(ctx, order, step.ChildID())
			return errors.Join(err, errors.New("no answer"))
		}},
	} {
		first.Name = "first"
		of := m.For(name)
		flow, err := idempotency.NewFlow(of.Operation(), idempotency.FlowConfig[charge]{}, first, last)
		require.NoError(t, err)
		s := serve(t, newFlowHandler(t, of, flow, nil))
		for range 2 {
			requireProblem(t, s.post(t, name, "a"), 503, httpkey.ProblemUnavailable)
		}
	}
	require.Equal(t, 2, pgtest.Count(t, pool, `SELECT count(*) FROM orders`))
}
