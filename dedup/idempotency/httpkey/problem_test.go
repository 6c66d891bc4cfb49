package httpkey_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: each error that the engine, or a handler, ends with has its answer, and the time of a retry
// where one helps: a key that is being worked on, or too many wait for; none for a key that a person
// decides about. Errors of the database that are gone with time are 503: a conflict that stays, a
// server that has become a standby, or that ended the transaction because it was idle, or took, too
// long. The others are the handler's own. Rows H1, H7, H29 of guarantees.md.
func TestErrorsHaveTheirAnswers(t *testing.T) {
	t.Parallel()
	code := func(code string) error { return &pgconn.PgError{Code: code, Message: "canary"} }
	m := newMiddleware(t, pgtest.NoPool(t), httpkey.Config{})
	for _, c := range []struct {
		err    error
		status int
		kind   serving.Problem
		after  string
	}{
		{&idempotency.InProgressError{Crowded: true, RetryAfter: 1500 * time.Millisecond}, 429, serving.TooManyWaiting, "2"},
		{&idempotency.InProgressError{RetryAfter: 200 * time.Millisecond}, 409, serving.KeyInProgress, "1"},
		{idempotency.ErrLockLost, 409, serving.KeyInProgress, "1"},
		{idempotency.ErrIndeterminate, 409, serving.KeyUndecided, ""},
		{idempotency.ErrAbandoned, 409, serving.KeyUndecided, ""},
		{idempotency.ErrUnanswered, 503, serving.Unanswered, "1"},
		{code("40P01"), 503, serving.Unavailable, "1"},
		{code("25006"), 503, serving.Unavailable, "1"},
		{code("25P03"), 503, serving.Unavailable, "1"},
		{code("25P04"), 503, serving.Unavailable, "1"},
		{code("25001"), 500, serving.Internal, ""},
		{code("25P02"), 500, serving.Internal, ""},
		{code("22012"), 500, serving.Internal, ""},
	} {
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.Fail(w, r, fmt.Errorf("once: %w", c.err)) }))
		a := s.post(t, "k", "a")
		requireProblem(t, a, c.status, c.kind)
		require.Equal(t, c.after, a.header.Get("Retry-After"), c.err)
		require.NotContains(t, a.body, "canary")
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
// gets 503, and its retry is executed; so does one whose handler fails with such an error of its own.
func TestBrokenDatabaseConnectionIsUnavailable(t *testing.T) {
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
	var ends error
	s := serve(t, newMiddleware(t, pgtest.PoolOf(t, config), httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("X-Break") {
		case "handler":
			broken.Store(&ends)
		case "own":
			httpkey.Fail(r, ends)
			return
		}
		insert(201).ServeHTTP(w, r)
	})))
	for key, end := range map[string]error{"eof": io.EOF, "reset": &net.OpError{Op: "read", Net: "tcp", Err: errors.New("connection reset by peer")}} {
		ends = end
		requireProblem(t, s.post(t, key, "a", "X-Break", "own"), 503, serving.Unavailable)
		requireProblem(t, s.post(t, key, "a", "X-Break", "handler"), 503, serving.Unavailable)
		require.Equal(t, 201, s.post(t, key, "a").status)
		broken.Store(&ends)
		requireProblem(t, s.post(t, key+"2", "b"), 503, serving.Unavailable)
		require.Equal(t, 201, s.post(t, key+"2", "b").status)
	}
	require.Equal(t, 4, effects(t, plain))
}

// Property: the first client gets what a replay gives, byte for byte, but for headers that are not
// stored: also where the outcome is another response of the same status than the handler wrote, or
// an earlier run of the handler wrote one that was rolled back. Rows H4, H18 of guarantees.md.
func TestFirstAnswerIsWhatIsReplayed(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN RAISE EXCEPTION 'at COMMIT' USING ERRCODE = '40001'; END $$;
		CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.name = 'conflict') EXECUTE FUNCTION refuse()`)
	require.NoError(t, err)
	write := func(w http.ResponseWriter, status int) {
		w.Header().Set("Location", "/café")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "A\x00\xff")
	}
	fails := func(w http.ResponseWriter, _ *http.Request, _ int) { write(w, 500) }
	final := idempotency.Final(idempotency.Response{Status: 200, Header: http.Header{"Location": {"/b"}}, Body: []byte("B")}, errors.New("declined"))
	for name, test := range map[string]struct {
		cfg    idempotency.Config
		status int
		run    func(w http.ResponseWriter, r *http.Request, run int)
		body   string
	}{
		"committed": {idempotency.Config{}, 201, func(w http.ResponseWriter, _ *http.Request, _ int) { write(w, 201) }, "A\x00\xff"},
		"strict":    {idempotency.Config{Strict: true}, 500, fails, "A\x00\xff"},
		"strict-and-misuse": {idempotency.Config{Strict: true}, 500, func(w http.ResponseWriter, r *http.Request, _ int) {
			_ = httpkey.Tx(r).Commit(r.Context())
			write(w, 201)
		}, ""},
		"Fail": {idempotency.Config{}, 200, func(w http.ResponseWriter, r *http.Request, _ int) {
			write(w, 200)
			httpkey.Fail(r, final)
		}, "B"},
		"conflict": {idempotency.Config{}, 200, func(w http.ResponseWriter, r *http.Request, run int) {
			if run > 1 {
				httpkey.Fail(r, final)
				return
			}
			if err := effect(r, "conflict"); err != nil {
				httpkey.Fail(r, err)
			}
			w.Header().Set("Location", "/b")
			w.Header().Set("X-Session", "of what was rolled back")
			_, _ = io.WriteString(w, "B")
		}, "B"},
	} {
		runs := 0
		s := serve(t, newMiddleware(t, pool, operation(test.cfg)).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			runs++
			test.run(w, r, runs)
		})))
		once, again := s.post(t, name, ""), s.post(t, name, "")
		require.Equal(t, []bool{false, true}, []bool{once.replayed(), again.replayed()}, name)
		for _, a := range []answer{once, again} {
			require.Equal(t, test.status, a.status, name)
			require.Equal(t, test.body, a.body, name)
			for _, name := range []string{"Date", "Idempotent-Replayed", "Cache-Control"} {
				a.header.Del(name)
			}
		}
		require.Equal(t, once.header, again.header, name)
	}
	require.NotContains(t, stored(t, pool), "canary")
}

// Property: a failure is logged even if the client has disconnected.
func TestFailureWithoutClientIsLogged(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	ctx, leave := context.WithCancel(t.Context())
	handler := newMiddleware(t, newPool(t), operation(idempotency.Config{Logger: textLogger(&log)})).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		leave()
		httpkey.Fail(r, errors.New("out of paper"))
	}))
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/orders", http.NoBody)
	r.Header.Set("Idempotency-Key", "k")
	handler.ServeHTTP(httptest.NewRecorder(), r)
	require.Contains(t, log.String(), "out of paper")
	require.Contains(t, log.String(), "level=ERROR")
}

func jsonRequest(t *testing.T, media string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	require.NoError(t, err)
	r.Header.Set("Content-Type", media)
	return r
}

// Property: JSON that says the same is the same request, amounts that differ in any digit are not,
// and what is not proper JSON counts byte for byte. Row H6 of guarantees.md.
func TestCanonicalJSON(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		media, a, b string
		same        bool
	}{
		"order and space":   {"application/json; charset=utf-8", `{"b":1,"a":[1, 2]}`, "{\"a\":[1,2],\n \"b\":1}", true},
		"escapes":           {"application/merge-patch+json", `{"a":"\u0041"}`, `{"a":"A"}`, true},
		"order of elements": {"application/json", `[1,2]`, `[2,1]`, false},
		"large integers":    {"application/json", `{"amount":9007199254740993}`, `{"amount":9007199254740992}`, false},
		"small digits":      {"application/json", `{"amount":1234567890123456.71}`, `{"amount":1234567890123456.72}`, false},
		"number and string": {"application/json", `{"amount":1}`, `{"amount":"1"}`, false},
		"member twice":      {"application/json", `{"a":1,"a":2}`, `{"a":2,"a":1}`, false},
		"member twice too":  {"application/json", `{"a":1, "a":2}`, `{"a":1,"a":2}`, false},
		"no JSON":           {"application/json", `{"a":1`, `{"a":1 `, false},
		"two values":        {"application/json", `{"a":1} {"b":1}`, `{"a":1}`, false},
		"other media":       {"text/plain", `{"a": 1}`, `{"a":1}`, false},
		"nested too deeply": {"application/json", strings.Repeat("[", 1<<19), strings.Repeat("[", 1<<19) + " ", false},
		"null and absent":   {"application/json", `{"a":null}`, `{}`, false},
	} {
		r := jsonRequest(t, c.media)
		a, err := httpkey.Canonical(r, []byte(c.a))
		require.NoError(t, err)
		b, err := httpkey.Canonical(r, []byte(c.b))
		require.NoError(t, err)
		require.Equal(t, c.same, string(a) == string(b), name)
	}
	body := []byte(`{"b":1, "a":2}`)
	_, err := httpkey.Canonical(jsonRequest(t, "application/json"), body)
	require.NoError(t, err)
	require.Equal(t, `{"b":1, "a":2}`, string(body), "the handler reads it")
}

// Property: no header makes the parser panic; what it accepts is within bounds, and quoting it
// gives the same key.
func FuzzParseKey(f *testing.F) {
	for _, seed := range []string{`a`, `"a"`, `"a\"\\"`, `"`, `"\`, `"a";b`, ``, "\x00", `a b`, strings.Repeat("x", 256)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		key, err := httpkey.ParseKey(http.Header{"Idempotency-Key": {header}})
		if err != nil {
			require.Empty(t, key)
			return
		}
		require.True(t, key != "" && len(key) <= 255, "%q", key)
		for _, c := range []byte(key) {
			require.True(t, c > ' ' && c < 0x7f, "%q", key)
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
		again, err := httpkey.ParseKey(http.Header{"Idempotency-Key": {quoted}})
		require.NoError(t, err)
		require.Equal(t, key, again)
	})
}

// Property: a key comes once, has 1 to 255 visible ASCII characters, and is the same key with and
// without quotes. Row H9 of guarantees.md.
func TestKeysOfHeaders(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 255)
	for header, want := range map[string]string{
		`a`: `a`, `"a"`: `a`, `"a\"b\\c"`: `a"b\c`, `a"b`: `a"b`, `~!`: `~!`, long: long, `"` + long + `"`: long, `charge-order-4127`: `charge-order-4127`,
	} {
		key, err := httpkey.ParseKey(http.Header{"Idempotency-Key": {header}})
		require.NoError(t, err, header)
		require.Equal(t, want, key)
	}
	for _, bad := range [][]string{
		nil,
		{},
		{``},
		{`""`},
		{`"a`},
		{`"`},
		{`"a"b`},
		{`"a\n"`},
		{`"a\`},
		{`"a";p=1`},
		{`a b`},
		{`"a b"`},
		{"a\x00"},
		{"a\x7f"},
		{"ä"},
		{long + "k"},
		{`"` + long + `k"`},
		{`a`, `a`},
		{`a, b`},
		{`a`, ``},
	} {
		_, err := httpkey.ParseKey(http.Header{"Idempotency-Key": bad})
		require.Error(t, err, bad)
	}
}
