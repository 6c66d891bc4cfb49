package httpkey_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Property: New reports everything that is wrong at once, with field, value and bound.
func TestNewReportsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := httpkey.New(nil, nil, httpkey.Config{
		Operation:       idempotency.Config{ResponseBytesMax: 100},
		PassThrough:     []string{"get", ""},
		PassWithoutKey:  []string{"put"},
		RequestBytesMax: -1, JSONDepthMax: 1001, ReadTimeout: -1, HandlerTimeout: 2 * time.Hour, BufferBytesMax: 99, RetryAfter: time.Millisecond,
		Headers: []string{"X-Good", "set-cookie", "Date", "bad name"},
	})
	for _, part := range []string{
		"scope is nil", "pool is nil", "Operation", `PassThrough "get"`, `PassThrough ""`, `PassWithoutKey "put"`, "RequestBytesMax -1", "JSONDepthMax 1001", "ReadTimeout -1ns",
		"HandlerTimeout 2h0m0s", "BufferBytesMax 99", "RetryAfter 1ms", "Headers set-cookie", "Headers Date", `Headers "bad name"`,
	} {
		require.ErrorContains(t, err, part)
	}
	require.NotContains(t, err.Error(), "X-Good")
}

// endless is a body that never ends and does not say so before.
type endless struct{ read atomic.Int64 }

func (e *endless) Read(p []byte) (int, error) {
	e.read.Add(int64(len(p)))
	return len(p), nil
}

// Property: a body without end is cut off at the limit, one that does not come is given up, and
// neither needs the database. Row H10 of guarantees.md.
func TestHugeAndSlowBodies(t *testing.T) {
	t.Parallel()
	for name, http2 := range map[string]bool{"HTTP1": false, "HTTP2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			slow, end := io.Pipe()
			defer func() { assert.NoError(t, end.Close()) }()
			go func() { _, _ = end.Write([]byte("a")) }()
			huge := &endless{}
			for status, c := range map[int]struct {
				body io.Reader
				max  time.Duration // a busy machine takes its time for a large body
			}{
				http.StatusRequestTimeout:        {slow, 100 * time.Millisecond},
				http.StatusRequestEntityTooLarge: {io.LimitReader(huge, 10<<30), time.Minute},
			} {
				m := newMiddleware(t, pgtest.NoPool(t), httpkey.Config{ReadTimeout: c.max, RequestBytesMax: 1 << 20})
				s := start(t, m.Handler(insert(201)), http2)
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, c.body)
				require.NoError(t, err)
				r.Header.Set("Idempotency-Key", "k")
				response, err := s.Client().Do(r)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.Equal(t, status, response.StatusCode)
			}
			require.Less(t, huge.read.Load(), int64(64<<20))
		})
	}
}

// Property: a response that is too large to be stored reaches the first client whole; a later
// request gets the answer that it was executed, with the status, and nothing runs again. Row H11 of
// guarantees.md.
func TestResponseTooLargeToStore(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	body := strings.Repeat("x", 5<<20)
	s := serve(t, newMiddleware(t, pool, operation(idempotency.Config{ResponseBytesMax: 1000})).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := effect(r, "a"); err != nil {
			httpkey.Fail(r, err)
			return
		}
		w.Header().Set("Location", "/orders/1")
		w.Header().Set("Content-Type", "text/csv")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.Copy(w, strings.NewReader(body))
	})))
	once := s.post(t, "k", "")
	require.Equal(t, 201, once.status)
	require.Equal(t, body, once.body)
	for range 2 {
		again := s.post(t, "k", "")
		requireProblem(t, again, 410, httpkey.ProblemResponseDropped)
		require.True(t, again.replayed())
		require.Equal(t, 201, again.problem.Outcome)
		require.Equal(t, "/orders/1", again.header.Get("Location"))
		require.Equal(t, "no-store", again.header.Get("Cache-Control"))
	}
	require.Equal(t, 1, effects(t, pool))
}

// Property: a handler whose method passes through, or that is not behind the middleware, gets no
// transaction, and says so.
func TestNoTransactionWithoutMiddleware(t *testing.T) {
	t.Parallel()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	require.NoError(t, err)
	for _, use := range []func(){func() { httpkey.Tx(r) }, func() { httpkey.Key(r) }, func() { httpkey.Fail(r, io.EOF) }} {
		require.PanicsWithValue(t, "httpkey: no transaction: wrap the route in Middleware.Handler, and take its method out of Config.PassThrough and Config.PassWithoutKey", use)
	}
	_, there := httpkey.TxOf(r)
	require.False(t, there)
}

// Property: a body that an outer layer has read is not taken for an empty one, under which all
// requests with a key would look the same, nor a partly read one for a whole one: they are refused,
// and the log gives the remedy. A layer that looks for a form where there is none, decodes the
// body, or restores it, does no harm. Row H6 of guarantees.md.
func TestBodyThatWasReadBefore(t *testing.T) {
	t.Parallel()
	const form, text = "application/x-www-form-urlencoded", "text/plain"
	for name, c := range map[string]struct {
		media  string
		reads  func(r *http.Request) error
		length int64
		served bool
	}{
		"form":           {form, (*http.Request).ParseForm, 3, false},
		"form in chunks": {form, (*http.Request).ParseForm, -1, false},
		"first byte":     {text, func(r *http.Request) error { _, err := io.ReadFull(r.Body, make([]byte, 1)); return err }, 3, false},
		"no form":        {text, (*http.Request).ParseForm, 3, true},
		"decoded": {text, func(r *http.Request) error { // makes it shorter
			r.Header.Set("Content-Encoding", "br")
			body, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(bytes.TrimPrefix(body, []byte("a="))))
			return err
		}, 3, true},
		"form put back": {form, func(r *http.Request) error {
			body, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			err = errors.Join(err, r.ParseForm())
			r.Body = io.NopCloser(bytes.NewReader(body))
			return err
		}, 3, true},
	} {
		pool := newPool(t)
		var log bytes.Buffer
		inner := newMiddleware(t, pool, operation(idempotency.Config{Logger: textLogger(&log)})).Handler(insert(201))
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if assert.NoError(t, c.reads(r)) {
				inner.ServeHTTP(w, r)
			}
		}))
		for i, body := range []string{"a=1", "a=2"} {
			r, err := s.request(t.Context(), http.MethodPost, "/orders", "k", body, "Content-Type", c.media)
			require.NoError(t, err)
			r.ContentLength = c.length
			a, err := s.send(r)
			require.NoError(t, err)
			switch {
			case !c.served:
				requireProblem(t, a, 500, httpkey.ProblemInternal)
				require.Contains(t, log.String(), "put the middleware in front")
			case i == 0:
				require.Equal(t, 201, a.status, name)
			default:
				requireProblem(t, a, 422, httpkey.ProblemKeyReused)
			}
		}
		require.Equal(t, map[bool]int{true: 1}[c.served], effects(t, pool), name)
	}
}

// Property: files of a multipart form are gone after each run, also one that is run again, and after
// a flow has read its request.
func TestFilesOfFormsAreRemoved(t *testing.T) {
	t.Parallel()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, err := form.CreateFormFile("scan", "scan.png")
	require.NoError(t, err)
	_, err = part.Write(make([]byte, 100_000))
	require.NoError(t, errors.Join(err, form.Close()))
	var files []string
	parse := func(r *http.Request) error {
		if err := r.ParseMultipartForm(1); err != nil {
			return err
		}
		scan, err := r.MultipartForm.File["scan"][0].Open()
		if err != nil {
			return err
		}
		files = append(files, scan.(*os.File).Name())
		return scan.Close()
	}
	m := newMiddleware(t, newPool(t), httpkey.Config{})
	handler := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if assert.NoError(t, parse(r)); len(files) == 1 {
			httpkey.Fail(r, &pgconn.PgError{Code: "40001"})
		}
	}))
	ship := m.For("ship")
	flow := newFlowHandler(t, ship, shipped(t, ship, idempotency.FlowConfig[charge]{}), func(r *http.Request) ([]byte, error) { return nil, parse(r) })
	for _, handler := range []http.Handler{handler, flow} {
		a, err := serve(t, handler).ask(t.Context(), http.MethodPost, "/scans", "k", body.String(), "Content-Type", form.FormDataContentType())
		require.NoError(t, err)
		require.Less(t, a.status, 300, a.body)
	}
	require.Len(t, files, 3)
	for _, file := range files {
		require.NoFileExists(t, file)
	}
}

// Property: a request without a usable key, tenant or body is refused without a database. Rows H8,
// H9, H10 of guarantees.md.
func TestRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("t", 256)
	m, err := httpkey.New(pgtest.NoPool(t), func(r *http.Request) (string, error) {
		switch tenant := r.Header.Get("X-Tenant"); tenant {
		case "stranger":
			return "", fmt.Errorf("token: %w", httpkey.ErrUnauthenticated)
		case "broken":
			return "acme", errors.New("canary")
		default:
			return tenant, nil
		}
	}, httpkey.Config{Operation: idempotency.Config{Operation: "api"}, RequestBytesMax: 10, Fingerprint: func(_ *http.Request, body []byte) ([]byte, error) {
		if string(body) == "odd" {
			return nil, errors.New("canary")
		}
		return body, nil
	}})
	require.NoError(t, err)
	s := serve(t, m.Handler(insert(201)))
	for _, c := range []struct {
		key, tenant, body string
		status            int
		kind              httpkey.Problem
	}{
		{"", "acme", "a", 400, httpkey.ProblemKeyMissing},
		{"a b", "acme", "a", 400, httpkey.ProblemKeyMalformed},
		{long, "acme", "a", 400, httpkey.ProblemKeyMalformed},
		{"a", "acme", "12345678901", 413, httpkey.ProblemTooLarge},
		{"a", "acme", "odd", 400, httpkey.ProblemUnreadable},
		{"a", "", "a", 500, httpkey.ProblemInternal},
		{"", "stranger", "a", 401, httpkey.ProblemUnauthenticated},
		{"a", "broken", "a", 500, httpkey.ProblemInternal},
		{"a", long, "a", 500, httpkey.ProblemInternal},
		{"a", "acme", "1234567890", 503, httpkey.ProblemUnavailable}, // only this one asks the database
	} {
		a := s.post(t, c.key, c.body, "X-Tenant", c.tenant)
		requireProblem(t, a, c.status, c.kind)
		require.NotContains(t, a.body, "canary")
	}
}

// Property: what would bypass the transaction (flushing, hijacking, another protocol, a response
// without end) is an error for the handler, and rolls the request back even if the handler ignores
// it; what only looks like it is recorded. Row H21 of guarantees.md.
func TestStreamingIsRefused(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m := newMiddleware(t, pool, httpkey.Config{BufferBytesMax: 1 << 20})
	for name, c := range map[string]struct {
		stream func(w http.ResponseWriter) error
		want   error
	}{
		"flush":    {func(w http.ResponseWriter) error { return http.NewResponseController(w).Flush() }, httpkey.ErrStreaming},
		"hijack":   {func(w http.ResponseWriter) error { _, _, err := http.NewResponseController(w).Hijack(); return err }, httpkey.ErrStreaming},
		"hijacker": {func(w http.ResponseWriter) error { _, _, err := w.(http.Hijacker).Hijack(); return err }, httpkey.ErrStreaming},
		"protocol": {func(w http.ResponseWriter) error {
			w.WriteHeader(http.StatusSwitchingProtocols)
			_, err := io.WriteString(w, "a")
			return err
		}, httpkey.ErrStreaming},
		"endless":   {func(w http.ResponseWriter) error { _, err := io.Copy(w, &endless{}); return err }, httpkey.ErrResponseTooLarge},
		"copy":      {func(w http.ResponseWriter) error { _, err := io.Copy(w, strings.NewReader("copied")); return err }, nil},
		"early":     {func(w http.ResponseWriter) error { w.WriteHeader(http.StatusEarlyHints); return nil }, nil},
		"deadlines": {func(w http.ResponseWriter) error { return http.NewResponseController(w).SetWriteDeadline(time.Now()) }, http.ErrNotSupported},
		"is-none": {func(w http.ResponseWriter) error {
			_, flushes := w.(http.Flusher) // that could not refuse
			_, reads := w.(io.ReaderFrom)
			if flushes || reads {
				return errors.New("it has a Flush or a ReadFrom")
			}
			return nil
		}, nil},
	} {
		var got error
		a := serve(t, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if got = effect(r, name); got == nil {
				got = c.stream(w)
			}
			w.WriteHeader(http.StatusAccepted) // it does not mind
		}))).post(t, name, "a")
		require.ErrorIs(t, got, c.want, name)
		want := 1
		if errors.Is(c.want, httpkey.ErrStreaming) || errors.Is(c.want, httpkey.ErrResponseTooLarge) {
			requireProblem(t, a, 500, httpkey.ProblemInternal)
			want = 0
		} else {
			require.Less(t, a.status, 300)
		}
		require.Equal(t, want, pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE name = $1`, name), name)
		require.Equal(t, want, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, name))
	}
}

// Property: ReadTimeout is not one of the handler, nor of the connection: a handler that takes
// longer is not taken for one whose client left, and the next request on the connection is served.
// Without a body net/http reads on from the connection at once, and would never take the deadline
// back by itself. Row H10 of guarantees.md.
func TestReadTimeoutEndsWithTheBody(t *testing.T) {
	longtest.Only(t, "a handler that takes longer than a limit that a busy machine keeps")
	t.Parallel()
	pool := newPool(t)
	const readTimeout = time.Second
	inner := newMiddleware(t, pool, httpkey.Config{ReadTimeout: readTimeout}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := httpkey.Tx(r).Exec(r.Context(), `SELECT pg_sleep($1)`, 2*readTimeout.Seconds()); err != nil {
			httpkey.Fail(r, err)
			return
		}
		insert(201).ServeHTTP(w, r)
	}))
	connections := map[string]bool{}
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		connections[r.RemoteAddr] = true
		inner.ServeHTTP(w, r)
		assert.NoError(t, r.Context().Err())
	}))
	for key, body := range map[string]string{"k1": "a", "k2": "", "k3": "b", "k4": ""} {
		require.Equal(t, 201, s.post(t, key, body).status)
	}
	require.Len(t, connections, 1)
	require.Equal(t, 4, effects(t, pool))
}

// accepting serves a flow of one call at /charges, and its status resources.
func accepting(t *testing.T, pool *pgxpool.Pool, cfg httpkey.Config, accept httpkey.Accept, call func(step *idempotency.Step[charge]) error) (*server, *httpkey.Middleware) {
	t.Helper()
	m := newMiddleware(t, pool, cfg)
	flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{StoreRequest: true, RetryAfter: time.Millisecond}, idempotency.Phase[charge]{
		Name: "charged",
		Call: func(_ context.Context, step *idempotency.Step[charge]) error {
			step.Finish(idempotency.Response{Status: 201, Header: http.Header{"X-Drop": {"a"}}, Body: append([]byte("charged "), step.Request...)})
			return call(step)
		},
	})
	require.NoError(t, err)
	accept.StatusURL = "/status/"
	handler, err := httpkey.AcceptHandler(m, flow, nil, accept)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("POST /orders", handler)
	mux.Handle("GET /status/{request}", m.StatusHandler())
	return serve(t, mux), m
}

// status asks a status resource.
func (s *server) status(t *testing.T, location string, header ...string) answer {
	t.Helper()
	a, err := s.ask(t.Context(), http.MethodGet, location, "", "", header...)
	require.NoError(t, err)
	return a
}

// posted sends a request in a goroutine of its own.
func (s *server) posted(t *testing.T, key, body string) <-chan answer {
	t.Helper()
	answers := make(chan answer, 1)
	go func() {
		a, _ := s.ask(t.Context(), http.MethodPost, "/orders", key, body)
		answers <- a
	}()
	return answers
}

func requireAccepted(t *testing.T, a answer) (location string) {
	t.Helper()
	require.Equal(t, 202, a.status, a.body)
	require.JSONEq(t, `{"status": "in progress"}`, a.body)
	require.Equal(t, "3", a.header.Get("Retry-After"))
	require.Equal(t, "no-store", a.header.Get("Cache-Control"))
	return a.header.Get("Location")
}

// locked is a buffer for logs of goroutines.
type locked struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Property: settings with which a 202 could not be honoured are rejected, all at once.
func TestAcceptSettingsAreChecked(t *testing.T) {
	t.Parallel()
	m := newMiddleware(t, pgtest.NoPool(t), httpkey.Config{})
	_, err := httpkey.AcceptHandler(m, shipped(t, m, idempotency.FlowConfig[charge]{CallMax: time.Hour}), nil, httpkey.Accept{After: 30 * time.Second, AtOnceMax: -1})
	for _, want := range []string{
		"FlowConfig.CallMax 1h0m0s: want less", "After 30s: want less than Config.HandlerTimeout, 30s", "AtOnceMax -1: want 1 to 100000",
		`StatusURL "": want a URL or a path that ends with a slash`, "FlowConfig.StoreRequest false: want true",
	} {
		require.ErrorContains(t, err, want)
	}
}

// Property: a slow flow is accepted, at each attempt, with a status resource that has its outcome
// later, for its caller alone, and runs once. Drain waits for it, or until its context ends.
func TestLongFlowIsAccepted(t *testing.T) {
	t.Parallel()
	sealer, err := idempotency.NewAESSealer(map[string][]byte{"a": bytes.Repeat([]byte("k1"), 16)}, "a")
	require.NoError(t, err)
	cfg := httpkey.Config{RetryAfter: 3 * time.Second, Operation: idempotency.Config{WaitMax: 300 * time.Millisecond, Seal: sealer}}
	calls, release := make(chan struct{}, 9), make(chan struct{})
	pool := newPool(t)
	s, m := accepting(t, pool, cfg, httpkey.Accept{After: 10 * time.Millisecond}, func(*idempotency.Step[charge]) error {
		calls <- struct{}{}
		<-release
		return nil
	})
	require.NoError(t, m.Drain(t.Context()), "none runs")
	location := requireAccepted(t, s.post(t, "canary/key", "a"))
	plain, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(location, "/status/"))
	require.NoError(t, err)
	require.NotContains(t, string(plain), "canary")
	testwait.Chan(t, "the call begins", calls)
	again := requireAccepted(t, s.post(t, "canary/key", "a"))
	require.Empty(t, requireAccepted(t, s.status(t, again)))
	requireProblem(t, s.post(t, "canary/key", "b"), 422, httpkey.ProblemKeyReused)
	requireProblem(t, s.status(t, location, "X-Tenant", "other"), 404, httpkey.ProblemKeyUnknown)
	for _, unknown := range []string{base64.RawURLEncoding.EncodeToString([]byte("other")), "!", "a"} {
		requireProblem(t, s.status(t, "/status/"+unknown), 404, httpkey.ProblemKeyUnknown)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	err = m.Drain(ended)
	require.ErrorIs(t, err, context.Canceled)
	require.Regexp(t, "of [12] accepted flows", err.Error(), "the second attempt may still wait for the first")
	close(release)
	require.NoError(t, m.For("another").Drain(t.Context()), "the outcome is stored by then")
	a := s.status(t, location)
	require.Equal(t, 201, a.status)
	require.True(t, a.replayed())
	require.Equal(t, "charged a", a.body)
	require.Equal(t, "no-store", a.header.Get("Cache-Control"))
	require.True(t, s.post(t, "canary/key", "a").replayed())
	require.Empty(t, calls, "one call")
}

// Property: an error or a panic after a 202 is logged, and does not end the process; the next request
// continues. If the client still waits, it gets the answer of a FlowHandler, or the panic.
func TestAcceptedFlowThatFails(t *testing.T) {
	t.Parallel()
	var log locked
	cfg := operation(idempotency.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	cfg.RetryAfter = 3 * time.Second
	for _, failure := range []string{"away for now", "panicked in the call"} {
		fail := make(chan struct{})
		s, _ := accepting(t, newPool(t), cfg, httpkey.Accept{After: time.Millisecond}, func(step *idempotency.Step[charge]) error {
			if step.Attempt > 1 {
				return nil
			}
			testwait.Chan(t, "the call fails", fail)
			if failure == "away for now" {
				return errors.New(failure)
			}
			panic(failure)
		})
		requireAccepted(t, s.post(t, "k", "a"))
		close(fail)
		testwait.True(t, "it is logged", func() bool { return strings.Contains(log.String(), failure) })
		testwait.Equal(t, 201, "the next request continues", func() int { return s.post(t, "k", "a").status })
	}
	s, _ := accepting(t, newPool(t), cfg, httpkey.Accept{After: 20 * time.Second}, func(step *idempotency.Step[charge]) error {
		if string(step.Request) == "bad" {
			return errors.New("canary")
		}
		panic("early")
	})
	requireProblem(t, s.post(t, "l", "bad"), 503, httpkey.ProblemUnavailable)
	_, err := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
	require.Error(t, err, "net/http ends the connection")
}

// Property: a key that another process works on is accepted; its status resource tells the states of
// a key.
func TestStatusOfAKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	cfg := httpkey.Config{RetryAfter: 3 * time.Second, Operation: idempotency.Config{WaitMax: time.Millisecond}}
	s, _ := accepting(t, pool, cfg, httpkey.Accept{After: 20 * time.Second}, func(*idempotency.Step[charge]) error { return nil })
	require.Equal(t, 201, s.post(t, "k", "a").status)
	status := func(key string) answer {
		return s.status(t, "/status/"+base64.RawURLEncoding.EncodeToString([]byte(key)))
	}
	require.True(t, status("k").replayed())
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'running', locked_until = clock_timestamp() + interval '1 hour'`)
	require.NoError(t, err)
	require.NotEmpty(t, requireAccepted(t, s.post(t, "k", "a")))
	require.Empty(t, requireAccepted(t, status("k")))
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'indeterminate', locked_until = NULL`)
	require.NoError(t, err)
	requireProblem(t, status("k"), 409, httpkey.ProblemKeyUndecided)
	requireProblem(t, status("other"), 404, httpkey.ProblemKeyUnknown)
}
