package httpkey_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: requests and keys beyond a caller's bounds are answered with 429, a type of its own,
// and the time of a retry. Row H29.
func TestTooManyRequestsAreAskedToWait(t *testing.T) {
	t.Parallel()
	m := newMiddleware(t, pgtest.NoPool(t), httpkey.Config{RetryAfter: 7 * time.Second})
	for _, c := range []struct {
		err   error
		kind  httpkey.Problem
		after string
	}{
		{&idempotency.CrowdedError{RetryAfter: 1500 * time.Millisecond}, httpkey.ProblemTooManyWaiting, "2"},
		{&idempotency.QuotaError{Max: 1, RetryAfter: time.Minute}, httpkey.ProblemTooManyKeys, "60"},
		{&idempotency.QuotaError{Max: 1}, httpkey.ProblemTooManyKeys, "7"},
	} {
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.Fail(w, r, fmt.Errorf("once: %w", c.err)) }))
		a := s.post(t, "k", "a")
		requireProblem(t, a, 429, c.kind)
		require.Equal(t, c.after, a.header.Get("Retry-After"))
	}
}

// Property: on a server, a request beyond the bound of a key is answered at once, and the others as
// usual; a new key beyond the quota of a tenant is refused, and a stored one replayed. Rows H15,
// H29.
func TestCrowdAndQuotaOverAServer(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	began, ended := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(ended) })
	defer release() // else the server waits for its handler
	s := serve(t, newMiddleware(t, pool, operation(idempotency.Config{KeyWaitersMax: 1, WaitMax: 20 * time.Second})).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(began)
		<-ended
		insert(201).ServeHTTP(w, r)
	})))
	first := s.posted(t, "k", "a")
	<-began
	others := make(chan answer, 3)
	for range cap(others) {
		go func() {
			a, _ := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
			others <- a
		}()
	}
	for range 2 {
		a := <-others
		requireProblem(t, a, 429, httpkey.ProblemTooManyWaiting)
		require.NotEmpty(t, a.header.Get("Retry-After"))
	}
	release()
	require.Equal(t, 201, (<-first).status)
	require.True(t, (<-others).replayed())
	require.Equal(t, 1, effects(t, pool))

	s = serve(t, newMiddleware(t, pool, operation(idempotency.Config{ScopeKeysMax: 1})).Handler(insert(201)))
	requireProblem(t, s.post(t, "new", "a"), 429, httpkey.ProblemTooManyKeys)
	require.True(t, s.post(t, "k", "a").replayed())
	require.Equal(t, 201, s.post(t, "new", "a", "X-Tenant", "other").status)
}

// stripe writes answers as Stripe's API does.
func stripe(r *http.Request, answer httpkey.Answer) (contentType string, body []byte) {
	kind := "invalid_request_error"
	switch answer.Problem { //nolint:exhaustive // all others are the request's
	case httpkey.ProblemKeyReused, httpkey.ProblemKeyInProgress, httpkey.ProblemKeyMissing, httpkey.ProblemKeyMalformed:
		kind = "idempotency_error"
	case httpkey.ProblemInternal, httpkey.ProblemUnavailable, httpkey.ProblemUnanswered:
		kind = "api_error"
	}
	body, err := json.Marshal(map[string]any{"error": map[string]string{"type": kind, "message": answer.Detail, "request_id": r.Header.Get("X-Request-Id")}})
	if err != nil {
		panic(err)
	}
	return "application/json", body
}

// An API whose errors have Stripe's format. Status, Retry-After and Link are unchanged.
func ExampleConfig_stripe() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	once, err := httpkey.New(pool, tenantOf, httpkey.Config{
		Operation: idempotency.Config{Operation: "payments-api"},
		Describe:  stripe,
		DocsURL:   "https://docs.example.com/idempotency",
	})
	if err != nil {
		panic(err)
	}
	w := httptest.NewRecorder()
	once.Handler(http.NotFoundHandler()).ServeHTTP(w, httptest.NewRequestWithContext(context.Background(), http.MethodPost, "/v1/charges", nil))
	fmt.Println(w.Code, w.Header().Get("Link"))
	fmt.Println(w.Body)
	// Output:
	// 400 <https://docs.example.com/idempotency>; rel="describedby"; type="text/html"
	// {"error":{"message":"This request needs the header Idempotency-Key: a value of its own, the same at each try.","request_id":"","type":"idempotency_error"}}
}

// Property: the hook writes the body of every answer that is not the handler's, and of none that
// is; clients that used a key wrongly get a link to the documentation, in addition to links of
// outer layers.
func TestAnswersHaveTheFormOfTheAPI(t *testing.T) {
	t.Parallel()
	const docs, link = "https://docs.example.com/keys", `<https://docs.example.com/keys>; rel="describedby"; type="text/html"`
	pool := newPool(t)
	m := newMiddleware(t, pool, httpkey.Config{
		Operation: idempotency.Config{ResponseBytesMax: 4}, RequestBytesMax: 10, DocsURL: docs,
		Describe: func(_ *http.Request, answer httpkey.Answer) (string, []byte) {
			return "text/x-own", []byte(fmt.Sprint(answer.Problem, " ", answer.Status, " ", answer.Outcome, " ", answer.Title != "" && answer.Detail != ""))
		},
	})
	inner := m.Handler(insert(201))
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</>; rel=home")
		inner.ServeHTTP(w, r)
	}))
	require.Equal(t, "made a", s.post(t, "k", "a").body)
	for _, c := range []struct {
		key, body string
		status    int
		kind      httpkey.Problem
		outcome   int
	}{
		{"", "a", 400, httpkey.ProblemKeyMissing, 0},
		{"k", "b", 422, httpkey.ProblemKeyReused, 0},
		{"k", "a", 410, httpkey.ProblemResponseDropped, 201},
		{"k", "12345678901", 413, httpkey.ProblemTooLarge, 0},
	} {
		a := s.post(t, c.key, c.body)
		require.Equal(t, c.status, a.status)
		require.Equal(t, "text/x-own", a.header.Get("Content-Type"))
		require.Equal(t, "no-store", a.header.Get("Cache-Control"))
		require.Equal(t, fmt.Sprint(c.kind, " ", c.status, " ", c.outcome, " true"), a.body)
		links := []string{"</>; rel=home"}
		if c.status == 400 || c.status == 422 {
			links = append(links, link)
		}
		require.Equal(t, links, a.header.Values("Link"))
	}
	plain := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(insert(201)))
	requireProblem(t, plain.post(t, "", "a"), 400, httpkey.ProblemKeyMissing)
	require.Empty(t, plain.post(t, "", "a").header.Values("Link"))
	for _, bad := range []string{"/keys", "ftp://example.com", "https://", "https://example.com/a b", "https://example.com/>;"} {
		_, err := httpkey.New(pool, tenantOf, httpkey.Config{Operation: idempotency.Config{Operation: "api"}, DocsURL: bad})
		require.ErrorContains(t, err, "want an absolute URL")
	}
}
