package httpkey_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: New reports everything that is wrong at once, with field, value and bound.
func TestNewReportsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := httpkey.New(nil, nil, httpkey.Config{
		Operation:       idempotency.Config{ResponseBytesMax: 100, Failed: func(error) idempotency.Response { return idempotency.Response{} }},
		RequestBytesMax: -1, ReadTimeout: -1, HandlerTimeout: 2 * time.Hour,
		Headers: []string{"X-Good", "set-cookie", "Date", "bad name"},
	})
	for _, part := range []string{
		"scope is nil", "pool is nil", "Operation", "RequestBytesMax -1", "ReadTimeout -1ns",
		"HandlerTimeout 2h0m0s", "Operation.Failed", "Headers set-cookie", "Headers Date", `Headers "bad name"`,
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
		requireProblem(t, again, 410, serving.ResponseDropped)
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
		require.PanicsWithValue(t, "httpkey: no transaction: wrap the route in Middleware.Handler, and call TxOf where a request may come without a key", use)
	}
	_, there := httpkey.TxOf(r)
	require.False(t, there)
}

// Property: a body that an outer layer has read is not taken for an empty one, under which all
// requests with a key would look the same: they are refused, and the log gives the remedy. A layer
// that looks for a form where there is none, decodes the body, or restores it, does no harm. Row H6 of
// guarantees.md.
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
				requireProblem(t, a, 500, serving.Internal)
				require.Contains(t, log.String(), "put the middleware in front")
			case i == 0:
				require.Equal(t, 201, a.status, name)
			default:
				requireProblem(t, a, 422, serving.KeyReused)
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
	ship := newMiddleware(t, newPool(t), operation(idempotency.Config{Operation: "ship"}))
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
		kind              serving.Problem
	}{
		{"", "acme", "a", 400, serving.KeyMissing},
		{"a b", "acme", "a", 400, serving.KeyMalformed},
		{long, "acme", "a", 400, serving.KeyMalformed},
		{"a", "acme", "12345678901", 413, serving.TooLarge},
		{"a", "acme", "odd", 400, serving.Unreadable},
		{"a", "", "a", 500, serving.Internal},
		{"", "stranger", "a", 401, serving.Unauthenticated},
		{"a", "broken", "a", 500, serving.Internal},
		{"a", long, "a", 500, serving.Internal},
		{"a", "acme", "1234567890", 503, serving.Unavailable}, // only this one asks the database
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
	m := newMiddleware(t, pool, httpkey.Config{})
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
			requireProblem(t, a, 500, serving.Internal)
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
