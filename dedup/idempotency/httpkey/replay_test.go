package httpkey_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Property: the same key of two tenants is two keys, with the same body and with another. Row H8 of
// guarantees.md.
func TestTenantsNeverMeet(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(insert(201)))
	for _, c := range []struct{ tenant, body string }{{"a", "same"}, {"b", "same"}, {"c", "other"}} {
		a := s.post(t, "k", c.body, "X-Tenant", c.tenant)
		require.Equal(t, 201, a.status)
		require.False(t, a.replayed())
		require.Equal(t, "made "+c.body, a.body)
	}
	require.Equal(t, 3, effects(t, pool))
}

// Property: work that takes longer than HandlerTimeout is rolled back, whatever the handler
// answers. Row H19 of guarantees.md.
func TestHandlerThatTakesTooLong(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{HandlerTimeout: 300 * time.Millisecond}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		insert(201).ServeHTTP(w, r)
		<-r.Context().Done()
	})))
	a := s.post(t, "k", "a")
	requireProblem(t, a, 503, serving.Unavailable)
	require.NotEmpty(t, a.header.Get("Retry-After"))
	require.Zero(t, effects(t, pool))
	require.Zero(t, keys(t, pool))
}

// Property: if the stored answer cannot be read, since its encryption key is missing, a client does
// not get the answer that nothing was done: it gets 503, for a retry with the same key, and gets
// the answer where it can be read. One effect. Row S13 of guarantees.md.
func TestUnreadableAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	sealer := func(name string) *idempotency.AESSealer {
		s, err := idempotency.NewAESSealer(map[string][]byte{name: bytes.Repeat([]byte(name), 32)}, name)
		require.NoError(t, err)
		return s
	}
	pool := newPool(t)
	var log bytes.Buffer
	with := func(s idempotency.Sealer) *server {
		return serve(t, newMiddleware(t, pool, operation(idempotency.Config{Seal: s, Logger: textLogger(&log)})).Handler(insert(201)))
	}
	before := with(sealer("a"))
	require.Equal(t, 201, before.post(t, "k", "a").status)
	for _, other := range []*server{with(sealer("b")), with(nil)} {
		a := other.post(t, "k", "a")
		requireProblem(t, a, 503, serving.Unanswered)
		require.NotEmpty(t, a.header.Get("Retry-After"))
		require.NotContains(t, a.body, "not executed")
	}
	require.Contains(t, log.String(), "unknown encryption key")
	require.True(t, before.post(t, "k", "a").replayed())
	require.Equal(t, 1, effects(t, pool))
}

// Property: a client that retries after the window, for a request whose rows the handler finds under IDs
// derived from its key, gets 410 (the request was executed), and so does each later retry; there is
// one effect. The same holds in a flow. Row H33.
func TestAfterTheWindow(t *testing.T) {
	t.Parallel()
	work := func(ctx context.Context, tx pgx.Tx, k idempotency.Key) error {
		tag, err := tx.Exec(ctx, `INSERT INTO orders (id) VALUES ($1) ON CONFLICT DO NOTHING`, k.ChildID("order"))
		if err == nil && tag.RowsAffected() == 0 {
			return idempotency.ErrExpired
		}
		return err
	}
	for name, strict := range map[string]bool{"strict": true, "not strict": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id uuid PRIMARY KEY)`)
			require.NoError(t, err)
			m := newMiddleware(t, pool, operation(idempotency.Config{Strict: strict}))
			handler := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if err := work(r.Context(), httpkey.Tx(r), httpkey.Key(r)); err != nil {
					httpkey.Fail(r, err)
					return
				}
				w.WriteHeader(http.StatusCreated)
			}))
			flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
				idempotency.Phase[charge]{Name: "begun", Write: func(context.Context, pgx.Tx, *idempotency.Step[charge]) error { return nil }},
				idempotency.Phase[charge]{Name: "order", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[charge]) error {
					step.Finish(idempotency.Response{Status: http.StatusCreated})
					return work(ctx, tx, step.Key)
				}})
			require.NoError(t, err)
			for made, handler := range []http.Handler{handler, newFlowHandler(t, m, flow, nil)} {
				s, key := serve(t, handler), fmt.Sprint("k", made)
				require.Equal(t, http.StatusCreated, s.post(t, key, "a").status)
				for range 2 {
					_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() - interval '1 second'`)
					require.NoError(t, err)
					_, err = idempotency.Reap(t.Context(), pool, "")
					require.NoError(t, err)
					require.Zero(t, keys(t, pool), "the window is over")
					for _, replayed := range []bool{false, true} {
						a := s.post(t, key, "a")
						requireProblem(t, a, 410, serving.KeyExpired)
						require.Equal(t, replayed, a.replayed())
					}
				}
				require.Equal(t, made+1, pgtest.Count(t, pool, `SELECT count(*) FROM orders`))
			}
		})
	}
}

// Property: the first client gets every header; stored and replayed are those of the list, and
// never cookies, credentials, or what belongs to the connection. Replays say that they are, and no
// cache keeps them. Rows H12, H24 of guarantees.md.
func TestOnlyListedHeadersAreStored(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	kept := http.Header{
		"Content-Type": {"text/x-receipt"}, "Etag": {`"v1"`}, "Content-Range": {"bytes 0-3/9"}, "X-Content-Type-Options": {"nosniff"},
		"Link": {"</a>; rel=next", "</b>; rel=prev"}, "Location": {"/orders/1"}, "X-Listed": {"yes"},
	}
	s := serve(t, newMiddleware(t, pool, httpkey.Config{Headers: []string{"x-listed"}}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range []string{
			"Set-Cookie", "Authorization", "WWW-Authenticate", "Proxy-Authenticate", "Authentication-Info", "X-Other", "Keep-Alive", "X-Api-Key",
		} {
			w.Header().Set(name, "canary")
		}
		maps.Copy(w.Header(), kept.Clone())
		w.Header().Set("Cache-Control", "public, max-age=600")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "body")
	})))
	once, again := s.post(t, "k", ""), s.post(t, "k", "")
	require.Equal(t, []string{"canary", "canary", ""}, []string{once.header.Get("Set-Cookie"), once.header.Get("X-Other"), once.header.Get("Idempotent-Replayed")})
	again.header.Del("Date")
	maps.Copy(kept, http.Header{"Cache-Control": {"no-store"}, "Content-Length": {"4"}, "Idempotent-Replayed": {"true"}})
	require.Equal(t, kept, again.header)
	require.Equal(t, "body", again.body)
	require.NotContains(t, stored(t, pool), "canary")
	for _, name := range []string{"Age", "cache-control", "Content-Length", "Date", "Set-Cookie", "Trailer", "TE", "X-Auth-Token", "x-api-key"} {
		_, err := httpkey.New(pool, tenantOf, httpkey.Config{Operation: idempotency.Config{Operation: "api"}, Headers: []string{name}})
		require.ErrorContains(t, err, "Headers "+name)
	}
}

// Property: at a replay, what an outer layer sets for that request stays, except what describes the
// body. Row H24 of guarantees.md.
func TestOuterLayersWin(t *testing.T) {
	t.Parallel()
	inner := newMiddleware(t, newPool(t), httpkey.Config{Headers: []string{"X-Layer", "X-Handler"}}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/x-receipt")
		w.Header().Set("X-Handler", "handler")
		w.Header().Set("Access-Control-Allow-Origin", "https://a.example")
		_, _ = io.WriteString(w, "body")
	}))
	requests := 0
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Layer", fmt.Sprint(requests))
		w.Header().Set("Vary", "Origin")
		inner.ServeHTTP(w, r)
	}))
	for n, want := range [][]string{{"text/x-receipt", "1", "handler", "Origin", "https://a.example"}, {"text/x-receipt", "2", "handler", "Origin", ""}} {
		a := s.post(t, "k", "")
		require.Equal(t, n == 1, a.replayed())
		got := []string{}
		for _, name := range []string{"Content-Type", "X-Layer", "X-Handler", "Vary", "Access-Control-Allow-Origin"} {
			got = append(got, a.header.Get(name))
		}
		require.Equal(t, want, got)
	}
}

// Property: a caller whose rights were revoked gets the answer of the authentication, and no
// replay. Row H13 of guarantees.md.
func TestRevokedCallerGetsNoReplay(t *testing.T) {
	t.Parallel()
	revoked := false
	m, err := httpkey.New(newPool(t), func(*http.Request) (string, error) {
		if revoked {
			return "acme", httpkey.ErrUnauthenticated
		}
		return "acme", nil
	}, operation(idempotency.Config{Operation: "api"}))
	require.NoError(t, err)
	s := serve(t, m.Handler(insert(201)))
	require.Equal(t, 201, s.post(t, "k", "a").status)
	require.True(t, s.post(t, "k", "a").replayed())
	revoked = true
	requireProblem(t, s.post(t, "k", "a"), 401, serving.Unauthenticated)
}

// Property: a key that a client sends counts, whatever the method: the same request is replayed, another
// one refused, also while the stored one stays as it is, and one with two keys, too. Row H6 of guarantees.md.
func TestAnotherRequestUnderTheKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	h := newMiddleware(t, pool, operation(idempotency.Config{})).Handler(insert(200))
	mux := http.NewServeMux()
	mux.Handle("/orders", h)
	mux.Handle("/v2/", http.StripPrefix("/v2", h))
	s := serve(t, mux)
	for n, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		ask := func(method, path, key, body string, header ...string) answer {
			a, err := s.ask(t.Context(), method, path, key, body, header...)
			require.NoError(t, err)
			return a
		}
		key, other := "k-"+method, map[bool]string{true: http.MethodPut, false: http.MethodPost}[method == http.MethodPost]
		require.Equal(t, "made a", ask(method, "/orders", key, "a").body)
		for _, reused := range []answer{
			ask(method, "/orders", key, "b"), ask(other, "/orders", key, "a"), ask(method, "/orders?x=1", key, "a"),
			ask(method, "/v2/orders", key, "a"), ask(method, "/orders", key, "a", "Content-Type", "text/csv"),
		} {
			requireProblem(t, reused, 422, serving.KeyReused)
		}
		requireProblem(t, ask(method, "/orders", key, "a", "Idempotency-Key", "j"), 400, serving.KeyMalformed)
		require.True(t, ask(method, "/orders", key, "a").replayed())
		require.True(t, ask(method, "/orders", `"`+key+`"`, "a").replayed(), "the quoted form is the same key")
		require.Equal(t, n+1, effects(t, pool))
	}
}

// Property: a client that goes away does not stop the work: it is committed, and the next request
// is answered with it. Row H19 of guarantees.md.
func TestWorkOutlivesItsClient(t *testing.T) {
	t.Parallel()
	for _, http2 := range []bool{false, true} {
		pool := newPool(t)
		ctx, leave := context.WithCancel(t.Context())
		type clientGone struct{}
		inner := newMiddleware(t, pool, httpkey.Config{HandlerTimeout: time.Hour, Operation: idempotency.Config{WaitMax: time.Minute}}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			leave()
			testwait.Chan(t, "the client goes", r.Context().Value(clientGone{}).(<-chan struct{}))
			insert(201).ServeHTTP(w, r)
		}))
		s := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			inner.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), clientGone{}, r.Context().Done())))
		}), http2)
		_, err := s.ask(ctx, http.MethodPost, "/orders", "k", "a")
		require.ErrorIs(t, err, context.Canceled)
		a := s.post(t, "k", "a")
		require.True(t, a.replayed())
		require.Equal(t, "made a", a.body)
		require.Equal(t, 1, effects(t, pool))
	}
}
