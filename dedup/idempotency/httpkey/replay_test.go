package httpkey_test

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: the first client gets every header; stored and replayed are those of the list, and
// never cookies, credentials, or what belongs to the connection. Replays say that they are, and no
// cache keeps them. Rows H12, H24 of guarantees.md.
func TestOnlyListedHeadersAreStored(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{Headers: []string{"x-listed", "X-Hop"}}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range []string{
			"Set-Cookie", "Authorization", "WWW-Authenticate", "Proxy-Authenticate", "Authentication-Info", "X-Other", "Keep-Alive", "X-Hop",
		} {
			w.Header().Set(name, "canary")
		}
		w.Header().Set("Connection", "x-hop")
		w.Header().Set("Cache-Control", "public, max-age=600")
		w.Header().Set("Content-Type", "text/x-receipt")
		w.Header().Set("ETag", `"v1"`)
		w.Header().Set("Content-Range", "bytes 0-3/9")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Add("Link", "</a>; rel=next")
		w.Header().Add("Link", "</b>; rel=prev")
		w.Header().Set("Location", "/orders/1")
		w.Header().Set("X-Listed", "yes")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "body")
	})))
	once, again := s.post(t, "k", ""), s.post(t, "k", "")
	require.Equal(t, "canary", once.header.Get("Set-Cookie"))
	require.Equal(t, "canary", once.header.Get("X-Other"))
	require.Empty(t, once.header.Get("Idempotent-Replayed"))
	again.header.Del("Date")
	require.Equal(t, http.Header{
		"Cache-Control": {"no-store"}, "Content-Length": {"4"}, "Content-Range": {"bytes 0-3/9"}, "Content-Type": {"text/x-receipt"}, "Etag": {`"v1"`},
		"Idempotent-Replayed": {"true"}, "Link": {"</a>; rel=next", "</b>; rel=prev"}, "Location": {"/orders/1"}, "X-Content-Type-Options": {"nosniff"},
		"X-Listed": {"yes"},
	}, again.header)
	require.Equal(t, "body", again.body)
	require.Contains(t, stored(t, pool), "x-receipt")
	require.NotContains(t, stored(t, pool), "canary")
}

// Property: which headers are stored and replayed by default does not change unnoticed: what is
// added here is shown to other requests, what is taken away is missing in their answers.
func TestHeadersReplayedByDefault(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{
		"Access-Control-Allow-Credentials", "Access-Control-Allow-Headers", "Access-Control-Allow-Methods", "Access-Control-Allow-Origin",
		"Access-Control-Expose-Headers", "Access-Control-Max-Age", "Allow", "Content-Disposition", "Content-Encoding", "Content-Language",
		"Content-Location", "Content-Range", "Content-Type", "Etag", "Last-Modified", "Link", "Location", "Preference-Applied", "Retry-After",
		"Timing-Allow-Origin", "Vary", "X-Content-Type-Options",
	}, httpkey.ReplayedHeaders())
	for _, name := range []string{
		"Age", "cache-control", "Content-Length", "Date", "Expires", "Idempotency-Key", "Idempotent-Replayed", "Set-Cookie", "Trailer", "TE",
		"X-Auth-Token", "x-api-key", "X-CSRF-Token",
	} {
		_, err := httpkey.New(pgtest.NoPool(t), tenantOf, httpkey.Config{Operation: idempotency.Config{Operation: "api"}, Headers: []string{name}})
		require.ErrorContains(t, err, "Headers "+name)
	}
}

// Property: a replay has Vary and the CORS headers that the handler set. If an outer layer sets
// some, then or now, Vary has both, and for origins only the layer's current headers count: an
// origin never gets the credentials that were granted to another one.
func TestReplayKeepsVaryAndCORS(t *testing.T) {
	t.Parallel()
	const origin, credentials, exposed, vary = "Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Access-Control-Expose-Headers", "Vary"
	of := func(pairs ...string) http.Header {
		h := http.Header{}
		for i := 0; i < len(pairs); i += 2 {
			h.Add(pairs[i], pairs[i+1])
		}
		return h
	}
	handlers := of(origin, "https://a.example", credentials, "true", exposed, "Location", vary, "Origin, Accept", "Timing-Allow-Origin", "*")
	for name, c := range map[string]struct{ handler, then, now, want http.Header }{
		"handler": {handlers, nil, nil, handlers},
		"outer":   {nil, of(origin, "https://a.example", vary, "Origin"), of(origin, "https://b.example", vary, "Origin"), of(origin, "https://b.example", vary, "Origin")},
		"both": {
			handlers, of(origin, "*", vary, "Accept-Encoding"), of(origin, "https://b.example", vary, "accept, Accept-Encoding"),
			of(origin, "https://b.example", exposed, "Location", vary, "accept, Accept-Encoding", vary, "Origin", "Timing-Allow-Origin", "*"),
		},
		"outer, only now": {
			handlers, nil, of(origin, "https://b.example", exposed, "Etag", "Timing-Allow-Origin", "https://b.example"),
			of(origin, "https://b.example", exposed, "Etag", vary, "Origin, Accept", "Timing-Allow-Origin", "https://b.example"),
		},
		"credentials of outer": {
			handlers, nil, of(credentials, "true"), of(credentials, "true", exposed, "Location", vary, "Origin, Accept", "Timing-Allow-Origin", "*"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inner := newMiddleware(t, newPool(t), httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				for name, values := range c.handler {
					if name == vary {
						w.Header().Add(name, values[0]) // as what compresses, or answers for origins, does
					} else {
						w.Header()[name] = values
					}
				}
				_, _ = io.WriteString(w, "body")
			}))
			var asked atomic.Int64
			s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				outer := c.then
				if asked.Add(1) > 1 {
					outer = c.now
				}
				maps.Copy(w.Header(), outer.Clone())
				inner.ServeHTTP(w, r)
			}))
			require.False(t, s.post(t, "k", "").replayed())
			again := s.post(t, "k", "")
			require.True(t, again.replayed())
			for _, name := range []string{"Date", "Content-Length", "Content-Type", "Cache-Control", "Idempotent-Replayed"} {
				again.header.Del(name)
			}
			require.Equal(t, c.want, again.header)
		})
	}
}

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

// Property: a caller whose rights were revoked gets the answer of the authentication, and no
// replay. Row H13 of guarantees.md.
func TestRevokedCallerGetsNoReplay(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var revoked atomic.Bool
	inner := newMiddleware(t, pool, httpkey.Config{}).Handler(insert(201))
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if revoked.Load() {
			http.Error(w, "revoked", http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	require.Equal(t, 201, s.post(t, "k", "a").status)
	require.True(t, s.post(t, "k", "a").replayed())
	revoked.Store(true)
	a := s.post(t, "k", "a")
	require.Equal(t, 401, a.status)
	require.NotContains(t, a.body, "made")
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
	for name, handler := range map[string]func(m *httpkey.Middleware) http.Handler{
		"transaction": func(m *httpkey.Middleware) http.Handler { return m.Handler(insert(201)) },
		"flow": func(m *httpkey.Middleware) http.Handler {
			flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
				idempotency.Phase[charge]{Name: "made", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[charge]) error {
					step.Finish(idempotency.Response{Status: 201, Body: []byte("made a")})
					_, err := tx.Exec(ctx, `INSERT INTO effects (name) VALUES ('a')`)
					return err
				}})
			require.NoError(t, err)
			return newFlowHandler(t, m, flow, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			var log bytes.Buffer
			with := func(s idempotency.Sealer) *server {
				return serve(t, handler(newMiddleware(t, pool, operation(idempotency.Config{Seal: s, Logger: textLogger(&log)}))))
			}
			before := with(sealer("a"))
			require.Equal(t, 201, before.post(t, "k", "a").status)
			for _, other := range []*server{with(sealer("b")), with(nil)} {
				a := other.post(t, "k", "a")
				requireProblem(t, a, 503, httpkey.ProblemUnanswered)
				require.NotEmpty(t, a.header.Get("Retry-After"))
				require.NotContains(t, a.body, "not executed")
			}
			require.Contains(t, log.String(), "unknown encryption key")
			require.NotContains(t, log.String(), "not executed")
			a := before.post(t, "k", "a")
			require.True(t, a.replayed())
			require.Equal(t, "made a", a.body)
			require.Equal(t, 1, effects(t, pool))
		})
	}
}

// Property: another request under a key is 422, also while the stored one stays as it is. Row H6 of
// guarantees.md.
func TestAnotherRequestUnderTheKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	h := newMiddleware(t, pool, operation(idempotency.Config{})).Handler(insert(201))
	mux := http.NewServeMux()
	mux.Handle("/orders", h)
	mux.Handle("/v2/", http.StripPrefix("/v2", h))
	s := serve(t, mux)
	require.Equal(t, 201, s.post(t, "k", "a").status)
	for name, c := range map[string]struct{ method, path, body, media string }{
		"body":   {"POST", "/orders", "b", ""},
		"method": {"PATCH", "/orders", "a", ""},
		"query":  {"POST", "/orders?x=1", "a", ""},
		"prefix": {"POST", "/v2/orders", "a", ""},
		"media":  {"POST", "/orders", "a", "text/csv"},
	} {
		header := []string{}
		if c.media != "" {
			header = []string{"Content-Type", c.media}
		}
		a, err := s.ask(t.Context(), c.method, c.path, "k", c.body, header...)
		require.NoError(t, err, name)
		requireProblem(t, a, 422, httpkey.ProblemKeyReused)
	}
	require.True(t, s.post(t, "k", "a").replayed())
	require.True(t, s.post(t, `"k"`, "a").replayed(), "the quoted form is the same key")
	require.Equal(t, 1, effects(t, pool))
}

// Property: a request whose key is being worked on gets 409 with Retry-After; keys that a person
// has to decide about get 409 without. Rows H1, H7 of guarantees.md.
func TestUnfinishedKeys(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	begun, release := make(chan struct{}), make(chan struct{})
	s := serve(t, newMiddleware(t, pool, operation(idempotency.Config{WaitMax: 10 * time.Millisecond})).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(begun)
		<-release
		insert(201).ServeHTTP(w, r)
	})))
	first := make(chan answer, 1)
	go func() {
		a, err := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
		assert.NoError(t, err)
		first <- a
	}()
	<-begun
	a := s.post(t, "k", "a")
	requireProblem(t, a, 409, httpkey.ProblemKeyInProgress)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	close(release)
	require.Equal(t, 201, (<-first).status)
	for state, kind := range map[string]httpkey.Problem{"indeterminate": httpkey.ProblemKeyUndecided, "abandoned": httpkey.ProblemKeyAbandoned} {
		_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = $1`, state)
		require.NoError(t, err)
		a := s.post(t, "k", "a")
		requireProblem(t, a, 409, kind)
		require.Empty(t, a.header.Get("Retry-After"))
	}
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'finished'`) // for the checks of the schema
	require.NoError(t, err)
}

// Property: a client that goes away does not stop the work: it is committed, and the next request
// is answered with it. Row H19 of guarantees.md.
func TestWorkOutlivesItsClient(t *testing.T) {
	t.Parallel()
	for name, http2 := range map[string]bool{"HTTP1": false, "HTTP2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			begun := make(chan struct{})
			type clientGone struct{}
			inner := newMiddleware(t, pool, operation(idempotency.Config{WaitMax: 10 * time.Second})).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				close(begun)
				<-r.Context().Value(clientGone{}).(<-chan struct{})
				insert(201).ServeHTTP(w, r)
			}))
			s := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				inner.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), clientGone{}, r.Context().Done())))
			}), http2)
			ctx, leave := context.WithCancel(t.Context())
			left := make(chan error, 1)
			go func() {
				_, err := s.ask(ctx, http.MethodPost, "/orders", "k", "a")
				left <- err
			}()
			<-begun
			leave()
			require.ErrorIs(t, <-left, context.Canceled)
			a := s.post(t, "k", "a")
			require.True(t, a.replayed())
			require.Equal(t, "made a", a.body)
			require.Equal(t, 1, effects(t, pool))
		})
	}
}

// Property: a client that disconnects while its request waits for a connection costs nothing more,
// and leaves no work behind.
func TestClientThatLeftBeforeTheWork(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var all []*pgxpool.Conn
	for int32(len(all)) < pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		all = append(all, conn)
	}
	entered, done := make(chan struct{}), make(chan struct{})
	inner := newMiddleware(t, pool, httpkey.Config{HandlerTimeout: time.Hour}).Handler(insert(201))
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		inner.ServeHTTP(w, r)
		close(done)
	}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := s.ask(ctx, http.MethodPost, "/orders", "k", "a")
		left <- err
	}()
	<-entered
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	assert.Eventually(t, func() bool { // though no connection became free
		select {
		case <-done:
			return true
		default:
			return false
		}
	}, 2*time.Minute, time.Millisecond, "the request still waits for a connection after its client has gone")
	for _, conn := range all {
		conn.Release()
	}
	<-done
	require.Zero(t, effects(t, pool))
	require.Zero(t, keys(t, pool))
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
	requireProblem(t, a, 503, httpkey.ProblemUnavailable)
	require.NotEmpty(t, a.header.Get("Retry-After"))
	require.Zero(t, effects(t, pool))
	require.Zero(t, keys(t, pool))
}
