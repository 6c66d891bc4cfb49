package httpkey_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/labstack/echo/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
)

// Property: methods that change nothing pass, whether or not they have a key, and those that are
// idempotent by themselves without one, all without SQL.
func TestMethodsThatPassThrough(t *testing.T) {
	t.Parallel()
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "passed") })
	passes := func(with string) (methods []string) {
		s := serve(t, newMiddleware(t, pgtest.NoPool(t), httpkey.Config{}).Handler(next))
		for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "POST", "PATCH"} {
			a, err := s.ask(t.Context(), method, "/", with, "")
			require.NoError(t, err)
			if a.status == http.StatusOK {
				methods = append(methods, method)
			}
		}
		return methods
	}
	require.Equal(t, []string{"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"}, passes(""))
	require.Equal(t, []string{"GET", "HEAD", "OPTIONS", "TRACE"}, passes("k"))
}

// Property: a failure after a success rolls back, stores nothing and is 500, whether the handler
// wrote it, or a layer inside of the middleware that recovers its panic, as chi's Recoverer does.
// The next request is executed.
func TestFailureBehindASuccessRollsBack(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, late := range map[string]func(w http.ResponseWriter){
		"recovered": func(w http.ResponseWriter) { w.WriteHeader(http.StatusInternalServerError) },
		"error":     func(w http.ResponseWriter) { http.Error(w, "canary", http.StatusInternalServerError) },
		"refusal":   func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) },
	} {
		for answer, status := range map[string]int{"status": http.StatusCreated, "body-alone": 0} {
			fails := true
			s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				assert.NoError(t, effect(r, name+answer))
				if status != 0 {
					w.WriteHeader(status)
				}
				_, _ = io.WriteString(w, "made")
				if fails {
					late(w)
				}
			})))
			before := effects(t, pool)
			a := s.post(t, name+answer, "a")
			requireProblem(t, a, 500, serving.Internal)
			require.NotContains(t, a.body, "canary")
			require.Equal(t, before, effects(t, pool))
			fails = false
			require.Less(t, s.post(t, name+answer, "a").status, 400)
			require.Equal(t, before+1, effects(t, pool))
		}
	}
}

// shipped is a flow of one phase, which finishes it.
func shipped(t *testing.T, m *httpkey.Middleware, cfg idempotency.FlowConfig[charge]) *idempotency.Flow[charge] {
	t.Helper()
	flow, err := idempotency.NewFlow(m.Operation(), cfg, idempotency.Phase[charge]{Name: "shipped", Write: func(_ context.Context, _ pgx.Tx, step *idempotency.Step[charge]) error {
		step.Finish(idempotency.Response{Status: 202 + len(step.Key.Operation)})
		return nil
	}})
	require.NoError(t, err)
	return flow
}

// Property: settings that would cut a call, or end a request that only waits, are refused where
// they come together.
func TestTimeLimitsAgree(t *testing.T) {
	t.Parallel()
	pool := pgtest.NoPool(t)
	for name, c := range map[string]struct {
		handler, wait, call time.Duration
		want                string
	}{
		"defaults":       {0, 0, 0, ""},
		"call as long":   {20 * time.Second, 0, 0, "FlowConfig.CallMax 20s: want less than Config.HandlerTimeout, 20s"},
		"call longer":    {time.Second, 0, time.Minute, "FlowConfig.CallMax 1m0s: want less than Config.HandlerTimeout, 1s"},
		"call fits":      {21 * time.Second, 0, 0, ""},
		"wait as long":   {time.Second, time.Second, time.Millisecond, "HandlerTimeout 1s: want more than Operation.WaitMax, 1s"},
		"wait's default": {200 * time.Millisecond, 0, time.Millisecond, "HandlerTimeout 200ms: want more than Operation.WaitMax, 250ms"},
	} {
		m, err := httpkey.New(pool, tenantOf, httpkey.Config{HandlerTimeout: c.handler, Operation: idempotency.Config{Operation: "api", WaitMax: c.wait}})
		if err == nil {
			_, err = httpkey.FlowHandler(m, shipped(t, m, idempotency.FlowConfig[charge]{CallMax: c.call}), nil)
		}
		if c.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, c.want, name)
		}
	}
	m := newMiddleware(t, pool, httpkey.Config{})
	_, err := httpkey.FlowHandler(m, shipped(t, newMiddleware(t, pool, operation(idempotency.Config{Operation: "ship"})), idempotency.FlowConfig[charge]{CallMax: time.Hour}), nil)
	require.ErrorContains(t, err, `flow is of operation "ship" in schema "effectonce": want one of this Middleware's Operation, "api" in "effectonce"`)
	require.ErrorContains(t, err, "FlowConfig.CallMax 1h0m0s", "all problems at once")
}

type charge struct{ Receipt string }

// Property: each status does with the handler's writes, its messages and its response what the
// package's text says, at the first and at the second request. Row H18 of
// guarantees.md.
func TestStatusDecidesWhatIsKept(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	runs := 0
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		runs++
		status, err := strconv.Atoi(r.Header.Get("X-Status"))
		err = errors.Join(err, outbox.Publish(r.Context(), httpkey.Tx(r), outbox.Message{ID: httpkey.Key(r).ChildID("event"), Topic: "orders", Payload: []byte("p")}))
		if err != nil {
			httpkey.Fail(r, err)
			return
		}
		insert(status).ServeHTTP(w, r)
	})
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(handler))
	s.Client().CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	keeps := func(ran, effects, keys int, statuses ...int) {
		for _, status := range statuses {
			name, header := strconv.Itoa(status), []string{"X-Status", strconv.Itoa(status)}
			runs = 0
			once, again := s.post(t, name, name, header...), s.post(t, name, name, header...)
			require.Equal(t, []int{status, status}, []int{once.status, again.status})
			require.Equal(t, once.body, again.body)
			require.Equal(t, []bool{false, keys == 1}, []bool{once.replayed(), again.replayed()}, status)
			require.Equal(t, [3]int{ran, effects, keys}, [3]int{
				runs, pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE name = $1`, name), pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, name),
			}, status)
		}
	}
	keeps(1, 1, 1, 200, 201, 202, 204, 299, 301, 303, 304, 399)
	keeps(1, 0, 1, 400, 402, 404, 405, 406, 410, 412, 413, 415, 422, 428, 451, 499)
	keeps(2, 0, 0, 401, 403, 408, 409, 423, 425, 429, 500, 501, 502, 503, 504, 599)
	require.Equal(t, effects(t, pool), pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox`))
}

// Property: a panic rolls back, stores nothing and ends the connection as without this package; the
// next request is executed. A middleware inside of another one is one transaction.
func TestPanicRollsBackAndGoesOn(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m := newMiddleware(t, pool, httpkey.Config{})
	var ran atomic.Bool
	inner := m.Handler(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if insert(201).ServeHTTP(w, r); ran.CompareAndSwap(false, true) {
			panic("trouble")
		}
	})))
	seen := make(chan any, 3)
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if p := recover(); p != nil {
				seen <- p
				panic(http.ErrAbortHandler)
			}
		}()
		inner.ServeHTTP(w, r)
	}))
	_, err := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
	require.Error(t, err)
	require.Equal(t, "trouble", testwait.Chan(t, "the panic", seen))
	require.Zero(t, effects(t, pool)+keys(t, pool))
	require.False(t, s.post(t, "k", "a").replayed())
	require.True(t, s.post(t, "k", "a").replayed())
	require.Equal(t, 1, effects(t, pool))
}

// Property: an endpoint in phases continues where it failed, at the next request, and replays its
// outcome; a request that it refuses, or that it cannot read, begins nothing.
func TestFlowIsResumedByTheNextRequest(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m, charged := newMiddleware(t, pool, httpkey.Config{}), 0
	flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
		idempotency.Phase[charge]{Name: "reserved", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[charge]) error {
			_, err := tx.Exec(ctx, `INSERT INTO effects (name) VALUES ($1)`, string(step.Request))
			return err
		}},
		idempotency.Phase[charge]{Name: "charged", Call: func(_ context.Context, step *idempotency.Step[charge]) error {
			if charged++; charged == 1 {
				return errors.New("canary: the bank is away")
			}
			step.Finish(idempotency.Response{Status: 201, Header: http.Header{"Location": {"/charges/1"}, "Set-Cookie": {"canary"}}, Body: []byte("r-1")})
			return nil
		}},
	)
	require.NoError(t, err)
	s := serve(t, newFlowHandler(t, m, flow, func(r *http.Request) ([]byte, error) {
		switch r.Header.Get("X-Kind") {
		case "odd":
			return nil, errors.New("canary")
		case "final":
			return nil, idempotency.Final(idempotency.Response{Status: 404, Body: []byte("no such account")}, errors.New("no account"))
		}
		return []byte("amount 5"), nil
	}))
	requireProblem(t, s.post(t, "", "a"), 400, serving.KeyMissing)
	requireProblem(t, s.post(t, "k", "a", "X-Kind", "odd"), 400, serving.Unreadable)
	require.Equal(t, 404, s.post(t, "k", "a", "X-Kind", "final").status)
	require.Zero(t, keys(t, pool))
	a := s.post(t, "k", "a")
	requireProblem(t, a, 503, serving.Unavailable)
	require.NotContains(t, a.body, "canary")
	require.NotEmpty(t, a.header.Get("Retry-After"))
	for _, replayed := range []bool{false, true} {
		a = s.post(t, "k", "a")
		require.Equal(t, []any{201, replayed, "r-1"}, []any{a.status, a.replayed(), a.body})
	}
	require.Equal(t, "/charges/1", a.header.Get("Location"))
	require.NotContains(t, stored(t, pool), "canary")
	requireProblem(t, s.post(t, "k", "b"), 422, serving.KeyReused)
	require.Equal(t, []int{1, 2}, []int{effects(t, pool), charged})
}

// Property: a flow inside of a middleware's transaction, which has its key, is refused at once, with
// no effect, and says what is wrong in the log. Row H22 of guarantees.md.
func TestFlowInsideAMiddleware(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var log bytes.Buffer
	m := newMiddleware(t, pool, operation(idempotency.Config{Logger: textLogger(&log)}))
	flow := newFlowHandler(t, m, shipped(t, m, idempotency.FlowConfig[charge]{}), nil)
	requireProblem(t, serve(t, m.Handler(flow)).post(t, "k", "a"), 500, serving.Internal)
	require.Contains(t, log.String(), "take the route out")
	require.Zero(t, keys(t, pool))
	require.Less(t, serve(t, flow).post(t, "k", "a").status, 300)
}

// netRoutes are of net/http itself.
func netRoutes(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) http.Handler {
	router := http.NewServeMux()
	router.HandleFunc("POST /orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) { ship(w, r, r.PathValue("order")) })
	router.HandleFunc("POST /shops/{shop}/orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) {
		ship(w, r, r.PathValue("shop")+"-"+r.PathValue("order"))
	})
	return authenticate(once.Handler(router))
}

// Property: behind each router the handler gets the parameters of its route and the request's
// transaction, also when it runs again after a serialization failure; its effect is there once, and
// a replay says that it is one. An error rolls back and frees the key. Rows H7, H18, H20 of
// guarantees.md.
func TestRouters(t *testing.T) {
	t.Parallel()
	authenticate := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Tenant") == "stranger" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
	for name, routes := range map[string]func(func(http.Handler) http.Handler, *httpkey.Middleware) http.Handler{
		"net/http": netRoutes, "chi": chiRoutes, "gorilla": gorillaRoutes, "echo": echoRoutes,
	} {
		t.Run(strings.ReplaceAll(name, "/", "-"), func(t *testing.T) {
			t.Parallel()
			// The first transaction with an order named conflict, and the first with shop-conflict, meets a
			// serialization failure; a sequence counts on through the rollback.
			pool := newPool(t)
			_, err := pool.Exec(t.Context(), `
		CREATE TABLE shipments (id uuid PRIMARY KEY, order_name text NOT NULL CHECK (order_name <> 'bad'));
		CREATE SEQUENCE "conflict"; CREATE SEQUENCE "shop-conflict";
		CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval(quote_ident(NEW.order_name)::regclass) = 1 THEN RAISE EXCEPTION 'meets' USING ERRCODE = '40001'; END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER meet BEFORE INSERT ON shipments FOR EACH ROW WHEN (NEW.order_name LIKE '%conflict') EXECUTE FUNCTION meet()`)
			require.NoError(t, err)
			s := serve(t, routes(authenticate, newMiddleware(t, pool, operation(idempotency.Config{}))))
			post := func(path, key string, header ...string) answer {
				a, err := s.ask(t.Context(), http.MethodPost, path, key, "", header...)
				require.NoError(t, err)
				return a
			}
			for path, order := range map[string]string{
				"/orders/4127/shipments": "4127", "/shops/shop/orders/4127/shipments": "shop-4127",
				"/orders/conflict/shipments": "conflict", "/shops/shop/orders/conflict/shipments": "shop-conflict",
			} {
				fresh, again := post(path, "k"+order), post(path, "k"+order)
				require.Equal(t, []int{201, 201}, []int{fresh.status, again.status}, path)
				require.Equal(t, []bool{false, true}, []bool{fresh.replayed(), again.replayed()}, path)
				require.Equal(t, fresh.header.Get("Location"), again.header.Get("Location"))
				require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM shipments WHERE order_name = $1 AND '/shipments/' || id = $2`, order, fresh.header.Get("Location")), path)
			}
			for range 2 {
				requireProblem(t, post("/orders/bad/shipments", "bad"), 500, serving.Internal)
				require.Equal(t, http.StatusUnauthorized, post("/orders/4127/shipments", "k4127", "X-Tenant", "stranger").status)
			}
			require.Equal(t, http.StatusNotFound, post("/nowhere", "nowhere").status)
			requireProblem(t, post("/orders/4127/shipments", ""), 400, serving.KeyMissing)
			require.Equal(t, 4, pgtest.Count(t, pool, `SELECT count(*) FROM shipments`))
			require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'bad'`))
		})
	}
}

// Property: an error that a handler of echo returns is the answer, and decides what is kept; behind
// an answer it gives the request up: no half of an effect, the key is free.
func TestErrorsOfEcho(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	router := echo.New()
	router.Use(echo.WrapMiddleware(newMiddleware(t, pool, httpkey.Config{}).Handler), writeErrors)
	router.POST("/orders", func(c *echo.Context) error {
		if c.Request().Header.Get("Idempotency-Key") == "unknown" {
			return echo.ErrNotFound
		}
		return errors.Join(effect(c.Request(), "half"), c.String(http.StatusCreated, "made"), errors.New("canary: the other half"))
	})
	s := serve(t, router)
	for _, replayed := range []bool{false, true} {
		a := s.post(t, "unknown", "")
		require.Equal(t, []any{404, replayed}, []any{a.status, a.replayed()})
	}
	a := s.post(t, "k", "a")
	requireProblem(t, a, 500, serving.Internal)
	require.NotContains(t, a.body, "canary")
	require.Equal(t, []int{0, 1}, []int{effects(t, pool), keys(t, pool)})
}
