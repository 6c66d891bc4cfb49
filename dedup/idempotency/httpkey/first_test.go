package httpkey_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: the first client gets what a replay gives, byte for byte, but for headers that are not
// stored: also where the outcome is another response of the same status than the handler wrote, or
// an earlier run of the handler wrote one that was rolled back. Rows H4, H18 of guarantees.md.
func TestFirstAnswerIsWhatIsReplayed(t *testing.T) {
	t.Parallel()
	failed := func(error) idempotency.Response {
		return idempotency.Response{Status: 500, Header: http.Header{"Location": {"/b"}, "Set-Cookie": {"canary"}}, Body: []byte("B")}
	}
	handler := func(w http.ResponseWriter, status int) {
		w.Header().Set("Location", "/caf\xe9")
		w.Header().Set("Content-Disposition", "attachment; filename=\"r\xe9sum\xe9.pdf\"")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "A\x00\xff")
	}
	final := idempotency.Final(idempotency.Response{Status: 200, Header: http.Header{"Location": {"/b"}}, Body: []byte("B")}, errors.New("declined"))
	rolledBack := func(r *http.Request, run int64, then error) {
		if run > 1 {
			httpkey.Fail(r, then)
		} else if err := effect(r, "conflict"); err != nil {
			httpkey.Fail(r, err)
		}
	}
	for name, test := range map[string]struct {
		cfg    idempotency.Config
		status int
		run    func(w http.ResponseWriter, r *http.Request, run int64)
		body   string
	}{
		"committed":           {idempotency.Config{}, 201, func(w http.ResponseWriter, _ *http.Request, _ int64) { handler(w, 201) }, "A\x00\xff"},
		"refused":             {idempotency.Config{}, 404, func(w http.ResponseWriter, _ *http.Request, _ int64) { handler(w, 404) }, "A\x00\xff"},
		"strict":              {idempotency.Config{Strict: true}, 500, func(w http.ResponseWriter, _ *http.Request, _ int64) { handler(w, 500) }, "A\x00\xff"},
		"strict and Failed":   {idempotency.Config{Strict: true, Failed: failed}, 500, func(w http.ResponseWriter, _ *http.Request, _ int64) { handler(w, 500) }, "B"},
		"attempts":            {idempotency.Config{AttemptsMax: 1}, 500, func(w http.ResponseWriter, _ *http.Request, _ int64) { handler(w, 500) }, "A\x00\xff"},
		"attempts and Failed": {idempotency.Config{AttemptsMax: 1, Failed: failed}, 500, func(w http.ResponseWriter, _ *http.Request, _ int64) { handler(w, 500) }, "B"},
		"strict and misuse": {idempotency.Config{Strict: true}, 500, func(w http.ResponseWriter, r *http.Request, _ int64) {
			_ = httpkey.Tx(r).Commit(r.Context())
			handler(w, 201)
		}, ""},
		"Fail": {idempotency.Config{}, 200, func(w http.ResponseWriter, r *http.Request, _ int64) {
			handler(w, 200)
			httpkey.Fail(r, final)
		}, "B"},
		"conflict at COMMIT": {idempotency.Config{}, 200, func(w http.ResponseWriter, r *http.Request, run int64) {
			rolledBack(r, run, final)
			handler(w, 200)
		}, "B"},
		"conflict at COMMIT, the same answer": {idempotency.Config{}, 200, func(w http.ResponseWriter, r *http.Request, run int64) {
			rolledBack(r, run, final)
			if run == 1 {
				w.Header().Set("Location", "/b")
				w.Header().Set("X-Session", "of what was rolled back")
				_, _ = io.WriteString(w, "B")
			}
		}, "B"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			_, err := pool.Exec(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN RAISE EXCEPTION 'at COMMIT' USING ERRCODE = '40001'; END $$;
				CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
				WHEN (NEW.name = 'conflict') EXECUTE FUNCTION refuse()`)
			require.NoError(t, err)
			var runs atomic.Int64
			s := serve(t, newMiddleware(t, pool, operation(test.cfg)).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				test.run(w, r, runs.Add(1))
			})))
			once, again := s.post(t, "k", ""), s.post(t, "k", "")
			require.False(t, once.replayed())
			require.True(t, again.replayed())
			for _, a := range []answer{once, again} {
				require.Equal(t, test.status, a.status)
				require.Equal(t, test.body, a.body)
				for _, name := range []string{"Date", "Idempotent-Replayed", "Cache-Control"} {
					a.header.Del(name)
				}
			}
			require.Equal(t, once.header, again.header)
			require.NotContains(t, stored(t, pool), "canary")
		})
	}
}

// breaking is a connection that can be ended, as by a peer or by the network.
type breaking struct {
	net.Conn
	broken *atomic.Pointer[error]
}

func (c *breaking) Read(p []byte) (int, error) {
	if broken := c.broken.Load(); broken != nil {
		return 0, *broken
	}
	return c.Conn.Read(p)
}

// Property: a request whose connection to the database breaks, before its claim or in its handler,
// gets 503, and its retry is executed; an EOF of the handler's own, with an intact connection, is
// its failure (500).
func TestBrokenDatabaseConnectionIsUnavailable(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]error{
		"EOF": io.EOF, "unexpected EOF": io.ErrUnexpectedEOF, "reset": &net.OpError{Op: "read", Net: "tcp", Err: errors.New("connection reset by peer")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plain := newPool(t)
			var broken atomic.Pointer[error]
			config := plain.Config()
			dial := config.ConnConfig.DialFunc
			config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := dial(ctx, network, address)
				broken.Store(nil) // a retry gets a working connection
				return &breaking{conn, &broken}, err
			}
			config.MaxConns = 1
			config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
			pool := pgtest.PoolOf(t, config)
			s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch r.Header.Get("X-Break") {
				case "handler":
					broken.Store(&ends)
				case "own":
					httpkey.Fail(r, ends)
					return
				}
				insert(201).ServeHTTP(w, r)
			})))
			requireProblem(t, s.post(t, "k", "a", "X-Break", "own"), 500, httpkey.ProblemInternal)
			a := s.post(t, "k", "a", "X-Break", "handler")
			requireProblem(t, a, 503, httpkey.ProblemUnavailable)
			require.NotEmpty(t, a.header.Get("Retry-After"))
			require.Equal(t, 201, s.post(t, "k", "a").status)

			broken.Store(&ends)
			requireProblem(t, s.post(t, "j", "b"), 503, httpkey.ProblemUnavailable)
			require.Equal(t, 201, s.post(t, "j", "b").status)
			require.Equal(t, 2, pgtest.Count(t, plain, `SELECT count(*) FROM effects`))
		})
	}
}

// Property: work that has not begun when its client goes is ended by its context, at once:
// otherwise it would pass for a failure of the work, which Strict stores. Rows H18, H19 of
// guarantees.md.
func TestWorkThatDidNotBeginIsCancelled(t *testing.T) {
	t.Parallel()
	for range 1000 {
		parent, leave := context.WithCancel(t.Context())
		ctx, begun, cancel := serving.Detach(parent, time.Hour)
		leave()
		require.False(t, begun())
		require.ErrorIs(t, ctx.Err(), context.Canceled)
		cancel()

		parent, leave = context.WithCancel(t.Context())
		ctx, begun, cancel = serving.Detach(parent, time.Hour)
		require.True(t, begun())
		leave()
		require.True(t, begun())
		require.NoError(t, ctx.Err())
		cancel()
	}
}
