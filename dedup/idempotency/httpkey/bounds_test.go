package httpkey_test

import (
	"bytes"
	"context"
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

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
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

// Property: a request without a usable key, tenant or body is refused without a database. Rows H8,
// H9, H10 of guarantees.md.
func TestRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("t", 256)
	scope := func(r *http.Request) (string, error) {
		switch r.Header.Get("X-Tenant") {
		case "":
			return "acme", nil
		case "none":
			return "", nil
		case "stranger":
			return "", fmt.Errorf("token: %w", httpkey.ErrUnauthenticated)
		case "broken":
			return "acme", errors.New("canary")
		}
		return long, nil
	}
	m, err := httpkey.New(pgtest.NoPool(t), scope, httpkey.Config{
		Operation: idempotency.Config{Operation: "api"}, RequestBytesMax: 10,
		Fingerprint: func(_ *http.Request, body []byte) ([]byte, error) {
			if string(body) == "odd" {
				return nil, errors.New("canary")
			}
			return body, nil
		},
	})
	require.NoError(t, err)
	s := serve(t, m.Handler(insert(201)))
	for name, c := range map[string]struct {
		key, body string
		header    []string
		status    int
		kind      httpkey.Problem
	}{
		"no key":       {"", "a", nil, 400, httpkey.ProblemKeyMissing},
		"blank":        {"a b", "a", nil, 400, httpkey.ProblemKeyMalformed},
		"long":         {long, "a", nil, 400, httpkey.ProblemKeyMalformed},
		"two":          {"a", "a", []string{"Idempotency-Key", "b"}, 400, httpkey.ProblemKeyMalformed},
		"large":        {"a", "12345678901", nil, 413, httpkey.ProblemTooLarge},
		"odd":          {"a", "odd", nil, 400, httpkey.ProblemUnreadable},
		"no tenant":    {"a", "a", []string{"X-Tenant", "none"}, 500, httpkey.ProblemInternal},
		"stranger":     {"", "a", []string{"X-Tenant", "stranger"}, 401, httpkey.ProblemUnauthenticated},
		"broken scope": {"a", "a", []string{"X-Tenant", "broken"}, 500, httpkey.ProblemInternal},
		"long tenant":  {"a", "a", []string{"X-Tenant", "long"}, 500, httpkey.ProblemInternal},
		"well":         {"a", "1234567890", nil, 503, httpkey.ProblemUnavailable}, // only this one asks the database
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := s.post(t, c.key, c.body, c.header...)
			requireProblem(t, a, c.status, c.kind)
			require.NotContains(t, a.body, "canary")
		})
	}
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

// Property: a body that an outer layer has read is not taken for an empty one, under which all
// requests with a key would look the same, nor a partly read one for a whole one: they are refused,
// and the log gives the remedy. A layer that looks for a form where there is none, decodes the
// body, or restores it, does no harm. Row H6 of guarantees.md.
func TestBodyThatWasReadBefore(t *testing.T) {
	t.Parallel()
	const form, text = "application/x-www-form-urlencoded", "text/plain"
	decode := func(header string) func(r *http.Request) error { // makes it shorter, and shows that by one of two headers
		return func(r *http.Request) error {
			if r.Header.Set("Content-Encoding", "br"); header == "Content-Length" {
				r.Header.Del("Content-Encoding")
				r.Header.Del("Content-Length")
			}
			body, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(bytes.TrimPrefix(body, []byte("a="))))
			return err
		}
	}
	for name, c := range map[string]struct {
		media  string
		reads  func(r *http.Request) error
		chunks bool
		served bool
	}{
		"form":                     {form, (*http.Request).ParseForm, false, false},
		"form in chunks":           {form, (*http.Request).ParseForm, true, false},
		"value of a form":          {form, func(r *http.Request) error { _ = r.PostFormValue("a"); return nil }, false, false},
		"whole body":               {text, func(r *http.Request) error { _, err := io.ReadAll(r.Body); return err }, false, false},
		"first byte":               {text, func(r *http.Request) error { _, err := io.ReadFull(r.Body, make([]byte, 1)); return err }, false, false},
		"no form":                  {text, (*http.Request).ParseForm, false, true},
		"decoded":                  {text, decode("Content-Encoding"), false, true},
		"decoded, without lengths": {text, decode("Content-Length"), false, true},
		"form put back": {form, func(r *http.Request) error {
			body, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			err = errors.Join(err, r.ParseForm())
			r.Body = io.NopCloser(bytes.NewReader(body))
			return err
		}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			var log bytes.Buffer
			inner := newMiddleware(t, pool, operation(idempotency.Config{Logger: textLogger(&log)})).Handler(insert(201))
			s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if assert.NoError(t, c.reads(r)) {
					inner.ServeHTTP(w, r)
				}
			}))
			ask := func(key, body string) answer {
				r, err := s.request(t.Context(), http.MethodPost, "/orders", key, body, "Content-Type", c.media)
				require.NoError(t, err)
				if c.chunks {
					r.ContentLength = -1
				}
				a, err := s.send(r)
				require.NoError(t, err)
				return a
			}
			if c.served {
				require.Equal(t, 201, ask("k", "a=1").status)
				requireProblem(t, ask("k", "a=2"), 422, httpkey.ProblemKeyReused)
				require.Equal(t, 201, ask("empty", "").status)
				return
			}
			for _, body := range []string{"a=1", "a=2"} {
				requireProblem(t, ask("k", body), 500, httpkey.ProblemInternal)
			}
			require.Contains(t, log.String(), "put the middleware in front")
			require.Zero(t, effects(t, pool)+keys(t, pool))
		})
	}
}

// Property: files of a multipart form are gone after each run, one that is run again or panics,
// too, and after a flow has read its request.
func TestFilesOfFormsAreRemoved(t *testing.T) {
	t.Parallel()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, err := form.CreateFormFile("scan", "scan.png")
	require.NoError(t, err)
	_, err = part.Write(make([]byte, 100_000))
	require.NoError(t, errors.Join(err, form.Close()))
	// parsed is the name of the file that the form makes.
	parsed := func(r *http.Request) (string, error) {
		if err := r.ParseMultipartForm(1); err != nil {
			return "", err
		}
		scan, err := r.MultipartForm.File["scan"][0].Open()
		if err != nil {
			return "", err
		}
		file, ok := scan.(*os.File)
		if !ok {
			return "", errors.New("it is in memory")
		}
		return file.Name(), file.Close()
	}
	for name, runs := range map[string]int{"answer": 1, "conflict": 2, "panic": 1, "flow": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMiddleware(t, newPool(t), httpkey.Config{})
			var files []string
			handler := m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				file, err := parsed(r)
				if !assert.NoError(t, err) {
					return
				}
				assert.FileExists(t, file)
				files = append(files, file)
				switch {
				case name == "panic":
					panic(http.ErrAbortHandler)
				case name == "conflict" && len(files) == 1:
					httpkey.Fail(r, &pgconn.PgError{Code: "40001"})
				}
			}))
			if name == "flow" {
				flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
					idempotency.Phase[charge]{Name: "stored", Write: func(_ context.Context, _ pgx.Tx, step *idempotency.Step[charge]) error {
						step.Finish(idempotency.Response{Status: 200})
						return nil
					}})
				require.NoError(t, err)
				handler = newFlowHandler(t, m, flow, func(r *http.Request) ([]byte, error) {
					file, err := parsed(r)
					files = append(files, file)
					return nil, err
				})
			}
			s := serve(t, handler)
			a, err := s.ask(t.Context(), http.MethodPost, "/scans", "k", body.String(), "Content-Type", form.FormDataContentType())
			if name == "panic" {
				require.Error(t, err)
			} else {
				require.NoError(t, err)
				require.Equal(t, 200, a.status, a.body)
			}
			require.Len(t, files, runs)
			for _, file := range files {
				require.NoFileExists(t, file)
			}
		})
	}
}

// Property: ReadTimeout is not one of the handler, nor of the connection: a handler that takes
// longer is not taken for one whose client left, and the next request on the connection is served.
// Without a body net/http reads on from the connection at once, and would never take the deadline
// back by itself. Row H10 of guarantees.md.
func TestReadTimeoutEndsWithTheBody(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{"body": "a", "no body": ""} {
		t.Run(name, func(t *testing.T) {
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
			left := make(chan error, 2)
			connections := make(chan string, 2)
			s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				connections <- r.RemoteAddr
				inner.ServeHTTP(w, r)
				left <- r.Context().Err()
			}))
			for _, key := range []string{"k1", "k2"} {
				require.Equal(t, 201, s.post(t, key, body).status)
				require.NoError(t, <-left)
			}
			first, second := <-connections, <-connections
			require.Equal(t, first, second)
			require.Equal(t, 2, effects(t, pool))
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

// Property: what would bypass the transaction (flushing, hijacking, another protocol, a response
// without end) is an error for the handler, and rolls the request back even if the handler ignores
// it; what only looks like it is recorded. Row H21 of guarantees.md.
func TestStreamingIsRefused(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, c := range map[string]struct {
		stream func(w http.ResponseWriter) error
		want   error
	}{
		"flush":    {func(w http.ResponseWriter) error { return http.NewResponseController(w).Flush() }, httpkey.ErrStreaming},
		"hijack":   {func(w http.ResponseWriter) error { _, _, err := http.NewResponseController(w).Hijack(); return err }, httpkey.ErrStreaming},
		"hijacker": {func(w http.ResponseWriter) error { _, _, err := w.(http.Hijacker).Hijack(); return err }, httpkey.ErrStreaming},
		"events": {func(w http.ResponseWriter) error {
			w.Header().Set("Content-Type", "text/event-stream")
			_, err := io.WriteString(w, "data: a\n\n")
			return errors.Join(err, http.NewResponseController(w).Flush())
		}, httpkey.ErrStreaming},
		"protocol": {func(w http.ResponseWriter) error {
			w.WriteHeader(http.StatusSwitchingProtocols)
			_, err := io.WriteString(w, "a")
			return err
		}, httpkey.ErrStreaming},
		"endless":   {func(w http.ResponseWriter) error { _, err := io.Copy(w, &endless{}); return err }, httpkey.ErrResponseTooLarge},
		"copy":      {func(w http.ResponseWriter) error { _, err := io.Copy(w, strings.NewReader("copied")); return err }, nil},
		"early":     {func(w http.ResponseWriter) error { w.WriteHeader(http.StatusEarlyHints); return nil }, nil},
		"deadlines": {func(w http.ResponseWriter) error { return http.NewResponseController(w).SetWriteDeadline(time.Now()) }, http.ErrNotSupported},
		"is no flusher": {func(w http.ResponseWriter) error {
			if _, ok := w.(http.Flusher); ok {
				return errors.New("it has a Flush that cannot refuse")
			}
			if _, ok := w.(io.ReaderFrom); ok {
				return errors.New("it has a ReadFrom")
			}
			return nil
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got error
			s := serve(t, newMiddleware(t, pool, httpkey.Config{BufferBytesMax: 1 << 20}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if err := effect(r, name); err != nil {
					httpkey.Fail(r, err)
					return
				}
				got = c.stream(w)
				w.WriteHeader(http.StatusAccepted) // it does not mind
			})))
			a := s.post(t, strings.ReplaceAll(name, " ", "-"), "a")
			if c.want != nil {
				require.ErrorIs(t, got, c.want)
			} else {
				require.NoError(t, got)
			}
			want := 1
			if errors.Is(c.want, httpkey.ErrStreaming) || errors.Is(c.want, httpkey.ErrResponseTooLarge) {
				requireProblem(t, a, 500, httpkey.ProblemInternal)
				want = 0
			} else {
				require.Less(t, a.status, 300)
			}
			require.Equal(t, want, pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE name = $1`, name))
			require.Equal(t, want, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, strings.ReplaceAll(name, " ", "-")))
		})
	}
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
