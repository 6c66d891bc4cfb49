package httpkey_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// newPool is a database with a table for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, `CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL)`)
}

// tenantOf replaces authentication.
func tenantOf(r *http.Request) (string, error) {
	if r.Header.Get("X-Tenant") == "" {
		return "acme", nil
	}
	return r.Header.Get("X-Tenant"), nil
}

func newMiddleware(t *testing.T, pool *pgxpool.Pool, cfg httpkey.Config) *httpkey.Middleware {
	t.Helper()
	cfg.Operation.Operation = cmp.Or(cfg.Operation.Operation, "api")
	m, err := httpkey.New(pool, tenantOf, cfg)
	require.NoError(t, err)
	return m
}

func newFlowHandler[S any](t *testing.T, m *httpkey.Middleware, flow *idempotency.Flow[S], request func(r *http.Request) ([]byte, error)) http.Handler {
	t.Helper()
	handler, err := httpkey.FlowHandler(m, flow, request)
	require.NoError(t, err)
	return handler
}

// server is a real one.
type server struct {
	*httptest.Server
}

func serve(t *testing.T, handler http.Handler) *server {
	t.Helper()
	return start(t, handler, false)
}

func start(t *testing.T, handler http.Handler, http2 bool) *server {
	t.Helper()
	s := httptest.NewUnstartedServer(handler)
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // panics of handlers
	if http2 {
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return &server{s}
}

// answer is what a client sees.
type answer struct {
	status  int
	header  http.Header
	body    string
	problem struct {
		Type    serving.Problem
		Title   string
		Status  int
		Detail  string
		Outcome int
	}
}

func (a answer) replayed() bool { return a.header.Get("Idempotent-Replayed") == "true" }

func (s *server) request(ctx context.Context, method, path, key, body string, header ...string) (*http.Request, error) {
	r, err := http.NewRequestWithContext(ctx, method, s.URL+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, err
	}
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r, nil
}

// ask fails the test only for what is not an answer; it may be called in other goroutines.
func (s *server) ask(ctx context.Context, method, path, key, body string, header ...string) (a answer, err error) {
	r, err := s.request(ctx, method, path, key, body, header...)
	if err != nil {
		return a, err
	}
	return s.send(r)
}

func (s *server) send(r *http.Request) (a answer, err error) {
	response, err := s.Client().Do(r)
	if err != nil {
		return a, err
	}
	content, err := io.ReadAll(response.Body)
	if err = errors.Join(err, response.Body.Close()); err != nil {
		return a, err
	}
	a.status, a.header, a.body = response.StatusCode, response.Header, string(content)
	if response.Header.Get("Content-Type") == "application/problem+json" && r.Method != http.MethodHead {
		err = json.Unmarshal(content, &a.problem)
	}
	return a, err
}

func (s *server) post(t *testing.T, key, body string, header ...string) answer {
	t.Helper()
	a, err := s.ask(t.Context(), http.MethodPost, "/orders", key, body, header...)
	require.NoError(t, err)
	return a
}

// requireProblem checks that an answer is a problem of a kind, whole.
func requireProblem(t *testing.T, a answer, status int, kind serving.Problem) {
	t.Helper()
	require.Equal(t, status, a.status, a.body)
	require.Equal(t, "application/problem+json", a.header.Get("Content-Type"))
	require.Equal(t, "urn:effectonce:problem:"+kind, a.problem.Type)
	require.Equal(t, status, a.problem.Status)
	require.NotEmpty(t, a.problem.Title)
	require.NotEmpty(t, a.problem.Detail)
}

func effect(r *http.Request, name string) error {
	tx, there := httpkey.TxOf(r)
	if !there {
		return errors.New("no transaction")
	}
	_, err := tx.Exec(r.Context(), `INSERT INTO effects (name) VALUES ($1)`, name)
	return err
}

// insert is a handler with one effect, which is named after the body.
func insert(status int) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = effect(r, string(body))
		}
		if err != nil {
			httpkey.Fail(r, err)
			return
		}
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, "made "+string(body))
	})
}

func effects(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effects`)
}

func keys(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`)
}

func operation(cfg idempotency.Config) httpkey.Config { return httpkey.Config{Operation: cfg} }

// stored is all that the table of keys holds.
func stored(t *testing.T, pool *pgxpool.Pool) (all string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT string_agg(k::text, ',') FROM effectonce.idempotency_keys k`).Scan(&all))
	return all
}

func textLogger(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

func TestMain(m *testing.M) { pgtest.Main(m) }
