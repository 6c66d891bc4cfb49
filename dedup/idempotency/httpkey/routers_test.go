package httpkey_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// netRoutes are of net/http itself.
func netRoutes(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) http.Handler {
	router := http.NewServeMux()
	router.HandleFunc("POST /orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) { ship(w, r, r.PathValue("order")) })
	router.HandleFunc("POST /shops/{shop}/orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) {
		ship(w, r, r.PathValue("shop")+"-"+r.PathValue("order"))
	})
	return authenticate(once.Handler(router))
}

// newShop is a database in which the first transaction with an order named conflict, and the first
// with shop-conflict, meets a serialization failure; a sequence counts on through the rollback.
func newShop(t *testing.T) *pgxpool.Pool {
	t.Helper()
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
	return pool
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
			pool := newShop(t)
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
				requireProblem(t, post("/orders/bad/shipments", "bad"), 500, httpkey.ProblemInternal)
				require.Equal(t, http.StatusUnauthorized, post("/orders/4127/shipments", "k4127", "X-Tenant", "stranger").status)
			}
			require.Equal(t, http.StatusNotFound, post("/nowhere", "nowhere").status)
			requireProblem(t, post("/orders/4127/shipments", ""), 400, httpkey.ProblemKeyMissing)
			require.Equal(t, 4, pgtest.Count(t, pool, `SELECT count(*) FROM shipments`))
			require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'bad'`))
		})
	}
}

// Property: an error that a handler of echo returns is the answer, and decides what is kept.
func TestErrorsOfEcho(t *testing.T) {
	t.Parallel()
	pool := newShop(t)
	none := func(next http.Handler) http.Handler { return next }
	s := serve(t, echoRoutes(none, newMiddleware(t, pool, operation(idempotency.Config{}))))
	for i := range 2 {
		a, err := s.ask(t.Context(), http.MethodPost, "/orders/unknown/shipments", "k", "")
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(http.StatusNotFound, i > 0), fmt.Sprint(a.status, a.replayed()))
		require.JSONEq(t, `{"message": "Not Found"}`, a.body)
	}
}

// Property: an error that a handler of echo returns behind its answer gives the request up: no
// effect, the key is free.
func TestErrorsOfEchoBehindTheAnswer(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	router := echo.New()
	router.Use(echo.WrapMiddleware(newMiddleware(t, pool, httpkey.Config{}).Handler), writeErrors)
	router.Any("/orders", func(c *echo.Context) error {
		if c.Request().Method == http.MethodPost {
			if err := effect(c.Request(), "half"); err != nil {
				return err
			}
		}
		return errors.Join(c.String(http.StatusCreated, "made"), errors.New("canary: the other half"))
	})
	s := serve(t, router)
	a := s.post(t, "k", "a")
	requireProblem(t, a, 500, httpkey.ProblemInternal)
	require.NotContains(t, a.body, "canary")
	require.Zero(t, effects(t, pool)+keys(t, pool))
	a, err := s.ask(t.Context(), http.MethodGet, "/orders", "", "")
	require.NoError(t, err)
	require.Equal(t, 201, a.status, "what passes through has no transaction to give up")
}
