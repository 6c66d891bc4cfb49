package httpkey_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// accepting serves a flow of one call at /charges, and its status resources.
func accepting(t *testing.T, pool *pgxpool.Pool, cfg httpkey.Config, accept httpkey.Accept, call func(step *idempotency.Step[charge]) error) (*server, *idempotency.Flow[charge]) {
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
	return serve(t, mux), flow
}

// status asks a status resource.
func (s *server) status(t *testing.T, location string, header ...string) answer {
	t.Helper()
	a, err := s.ask(t.Context(), http.MethodGet, location, "", "", header...)
	require.NoError(t, err)
	return a
}

// wait ends with a test that failed, too, so that its server can be closed.
func wait(t *testing.T, until <-chan struct{}) {
	t.Helper()
	select {
	case <-until:
	case <-t.Context().Done():
	}
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

// outcome asks until there is one.
func (s *server) outcome(t *testing.T, location string) (a answer) {
	t.Helper()
	for a = s.status(t, location); a.status == 202; a = s.status(t, location) {
		require.NoError(t, t.Context().Err())
	}
	return a
}

func requireAccepted(t *testing.T, a answer) (location string) {
	t.Helper()
	require.Equal(t, 202, a.status, a.body)
	require.JSONEq(t, `{"status": "in progress"}`, a.body)
	require.Equal(t, "3", a.header.Get("Retry-After"))
	require.Equal(t, "no-store", a.header.Get("Cache-Control"))
	return a.header.Get("Location")
}

// Property: a slow flow is accepted, at each attempt, with a status resource that has its outcome
// later, for its caller alone, and runs once.
func TestLongFlowIsAccepted(t *testing.T) {
	t.Parallel()
	for name, seal := range map[string]bool{"plain": false, "sealed": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := httpkey.Config{RetryAfter: 3 * time.Second, Operation: idempotency.Config{WaitMax: 300 * time.Millisecond}}
			if seal {
				sealer, err := idempotency.NewAESSealer(map[string][]byte{"a": bytes.Repeat([]byte("k1"), 16)}, "a")
				require.NoError(t, err)
				cfg.Operation.Seal = sealer
			}
			calls, release := make(chan struct{}, 9), make(chan struct{})
			pool := newPool(t)
			s, _ := accepting(t, pool, cfg, httpkey.Accept{After: 10 * time.Millisecond}, func(*idempotency.Step[charge]) error {
				calls <- struct{}{}
				wait(t, release)
				return nil
			})
			location := requireAccepted(t, s.post(t, "canary/key", "a"))
			mark := strings.TrimPrefix(location, "/status/")
			plain, err := base64.RawURLEncoding.DecodeString(mark)
			require.NoError(t, err)
			require.Equal(t, seal, string(plain) != "canary/key")
			<-calls
			again := requireAccepted(t, s.post(t, "canary/key", "a"))
			require.Empty(t, requireAccepted(t, s.status(t, again)))
			patient, _ := accepting(t, pool, cfg, httpkey.Accept{After: 20 * time.Second}, func(*idempotency.Step[charge]) error { panic("a second call") })
			require.NotEmpty(t, requireAccepted(t, patient.post(t, "canary/key", "a")), "it is in progress elsewhere")
			requireProblem(t, s.post(t, "canary/key", "b"), 422, httpkey.ProblemKeyReused)
			requireProblem(t, s.status(t, location, "X-Tenant", "other"), 404, httpkey.ProblemKeyUnknown)
			for _, unknown := range []string{base64.RawURLEncoding.EncodeToString([]byte("other")), base64.RawURLEncoding.EncodeToString([]byte("\x00")), "!", "a"} {
				requireProblem(t, s.status(t, "/status/"+unknown), 404, httpkey.ProblemKeyUnknown)
			}
			close(release)
			a := s.outcome(t, location)
			require.Equal(t, 201, a.status)
			require.True(t, a.replayed())
			require.Equal(t, "charged a", a.body)
			require.Equal(t, "no-store", a.header.Get("Cache-Control"))
			a = s.post(t, "canary/key", "a")
			require.Equal(t, 201, a.status)
			require.True(t, a.replayed())
			require.Empty(t, calls, "one call")
			_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'indeterminate'`)
			require.NoError(t, err)
			requireProblem(t, s.status(t, location), 409, httpkey.ProblemKeyUndecided)
		})
	}
}

// Property: a quick flow is answered as by a FlowHandler, also if it fails.
func TestQuickFlowIsNotAccepted(t *testing.T) {
	t.Parallel()
	s, _ := accepting(t, newPool(t), httpkey.Config{}, httpkey.Accept{After: 20 * time.Second}, func(step *idempotency.Step[charge]) error {
		if string(step.Request) == "bad" {
			return errors.New("canary")
		}
		return nil
	})
	a := s.post(t, "k", "a")
	require.Equal(t, 201, a.status)
	require.False(t, a.replayed())
	requireProblem(t, s.post(t, "l", "bad"), 503, httpkey.ProblemUnavailable)
}

// Property: beyond AtOnceMax clients wait for the outcome, so that the number of concurrent flows
// in this process is bounded.
func TestAcceptedFlowsAreBounded(t *testing.T) {
	t.Parallel()
	began, release := make(chan struct{}), map[string]chan struct{}{"a": make(chan struct{}), "b": make(chan struct{})}
	s, _ := accepting(t, newPool(t), httpkey.Config{RetryAfter: 3 * time.Second}, httpkey.Accept{After: time.Millisecond, AtOnceMax: 1}, func(step *idempotency.Step[charge]) error {
		began <- struct{}{}
		wait(t, release[string(step.Request)])
		return nil
	})
	first := s.posted(t, "k1", "a")
	<-began
	location := requireAccepted(t, <-first)
	second := s.posted(t, "k2", "b")
	<-began
	close(release["b"])
	require.Equal(t, 201, (<-second).status)
	close(release["a"])
	require.Equal(t, 201, s.outcome(t, location).status)
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

// Property: a failure after a 202 is logged, and the completer finishes the flow; a panic does not
// end the process, and if the client still waits, it continues in the handler with its stack.
func TestAcceptedFlowThatFailsIsCompleted(t *testing.T) {
	t.Parallel()
	var log locked
	cfg := operation(idempotency.Config{Logger: slog.New(slog.NewTextHandler(&log, nil)), Lock: time.Second})
	cfg.RetryAfter = 3 * time.Second
	for name, failure := range map[string]func() error{
		"error": func() error { return errors.New("away for now") },
		"panic": func() error { panic("panicked in the call") },
	} {
		began, fail := make(chan struct{}), make(chan struct{})
		s, flow := accepting(t, newPool(t), cfg, httpkey.Accept{After: time.Millisecond}, func(step *idempotency.Step[charge]) error {
			if step.Attempt > 1 {
				return nil
			}
			began <- struct{}{}
			wait(t, fail)
			return failure()
		})
		first := s.posted(t, "k", "a")
		<-began
		location := requireAccepted(t, <-first)
		fail <- struct{}{}
		ctx, stop := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() {
			for ctx.Err() == nil {
				_, _ = flow.Complete(ctx)
			}
		})
		require.Equal(t, 201, s.outcome(t, location).status, name)
		stop()
		group.Wait()
	}
	for _, failure := range []string{"away for now", "panicked in the call"} {
		// The line comes after the key is free, and so perhaps after another worker's outcome.
		require.Eventually(t, func() bool { return strings.Contains(log.String(), failure) }, 2*time.Minute, time.Millisecond, failure)
	}

	s, _ := accepting(t, newPool(t), cfg, httpkey.Accept{After: 20 * time.Second}, func(*idempotency.Step[charge]) error { panic("early") })
	_, err := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
	require.Error(t, err, "net/http ends the connection")
}

// Property: an AcceptHandler inside of a middleware, of its own operation or of another one, is
// refused: the outer one would store 202 as the outcome. Nothing is stored, and no flow runs.
func TestAcceptInsideAMiddleware(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var log bytes.Buffer
	m := newMiddleware(t, pool, operation(idempotency.Config{Logger: textLogger(&log)}))
	ship := m.For("ship")
	handler, err := httpkey.AcceptHandler(ship, shipped(t, ship, idempotency.FlowConfig[charge]{StoreRequest: true}), nil, httpkey.Accept{StatusURL: "/status/"})
	require.NoError(t, err)
	for _, outer := range []*httpkey.Middleware{m, ship} {
		requireProblem(t, serve(t, outer.Handler(handler)).post(t, "k", "a"), 500, httpkey.ProblemInternal)
		require.Contains(t, log.String(), "take the route out")
		log.Reset()
	}
	require.Zero(t, keys(t, pool))
	require.Equal(t, 206, serve(t, handler).post(t, "k", "a").status)
}

// Property: http.Server.Shutdown does not wait for a flow after a 202; Drain does, for each
// operation, or until its context ends; then the outcome is stored, and the pool can be closed. It
// returns at once if no flow runs.
func TestDrainWaitsForAcceptedFlows(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m := newMiddleware(t, pool, httpkey.Config{RetryAfter: 3 * time.Second})
	require.NoError(t, m.Drain(t.Context()))
	pay := m.For("pay")
	began, release := make(chan struct{}), make(chan struct{})
	flow, err := idempotency.NewFlow(pay.Operation(), idempotency.FlowConfig[charge]{StoreRequest: true}, idempotency.Phase[charge]{
		Name: "paid", AtMostOnce: true,
		Call: func(_ context.Context, step *idempotency.Step[charge]) error {
			close(began)
			wait(t, release)
			step.Finish(idempotency.Response{Status: 201, Body: []byte("paid")})
			return nil
		},
	})
	require.NoError(t, err)
	handler, err := httpkey.AcceptHandler(pay, flow, nil, httpkey.Accept{StatusURL: "/status/", After: time.Millisecond})
	require.NoError(t, err)
	s := serve(t, handler)
	first := s.posted(t, "k", "a")
	<-began
	requireAccepted(t, <-first)
	require.NoError(t, s.Config.Shutdown(t.Context()))
	ended, end := context.WithCancel(t.Context())
	end()
	err = m.Drain(ended)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "of 1 accepted flows")
	drained := make(chan error, 2)
	for _, one := range []*httpkey.Middleware{m, pay} {
		go func() { drained <- one.Drain(t.Context()) }()
	}
	close(release)
	for range 2 {
		require.NoError(t, <-drained)
		response, err := pay.Operation().Look(t.Context(), pay.Operation().Key("acme", "k", idempotency.Fingerprint{}))
		require.NoError(t, err, "the outcome is stored by then")
		require.Equal(t, "paid", string(response.Body))
	}
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
