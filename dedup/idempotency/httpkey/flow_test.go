package httpkey_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

type charge struct{ Receipt string }

// Property: an endpoint in phases continues where it failed, at the next request, and replays its
// outcome.
func TestFlowIsResumedByTheNextRequest(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m := newMiddleware(t, pool, httpkey.Config{})
	var charged, asked atomic.Int64
	flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
		idempotency.Phase[charge]{Name: "reserved", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[charge]) error {
			_, err := tx.Exec(ctx, `INSERT INTO effects (name) VALUES ($1)`, string(step.Request))
			return err
		}},
		idempotency.Phase[charge]{Name: "charged", Call: func(_ context.Context, step *idempotency.Step[charge]) error {
			if charged.Add(1) == 1 {
				return errors.New("canary: the bank is away")
			}
			step.State.Receipt = "r-1"
			step.Finish(idempotency.Response{Status: 201, Header: http.Header{"Location": {"/charges/1"}, "Set-Cookie": {"canary"}}, Body: []byte(step.State.Receipt)})
			return nil
		}},
	)
	require.NoError(t, err)
	s := serve(t, newFlowHandler(t, m, flow, func(r *http.Request) ([]byte, error) {
		asked.Add(1)
		switch r.Header.Get("X-Kind") {
		case "odd":
			return nil, errors.New("canary")
		case "final":
			return nil, idempotency.Final(idempotency.Response{Status: 404, Body: []byte("no such account")}, errors.New("no account"))
		}
		return []byte("amount 5"), nil
	}))
	requireProblem(t, s.post(t, "", "a"), 400, httpkey.ProblemKeyMissing)
	requireProblem(t, s.post(t, "k", "a", "X-Kind", "odd"), 400, httpkey.ProblemUnreadable)
	require.Equal(t, 404, s.post(t, "k", "a", "X-Kind", "final").status)
	require.Zero(t, keys(t, pool))

	a := s.post(t, "k", "a")
	requireProblem(t, a, 503, httpkey.ProblemUnavailable)
	require.NotContains(t, a.body, "canary")
	require.NotEmpty(t, a.header.Get("Retry-After"))
	a = s.post(t, "k", "a")
	require.Equal(t, 201, a.status)
	require.False(t, a.replayed())
	a = s.post(t, "k", "a")
	require.True(t, a.replayed())
	require.Equal(t, "r-1", a.body)
	require.Equal(t, "/charges/1", a.header.Get("Location"))
	require.Empty(t, a.header.Get("Set-Cookie"))
	require.NotContains(t, stored(t, pool), "canary", "it is not stored either")
	requireProblem(t, s.post(t, "k", "b"), 422, httpkey.ProblemKeyReused)
	require.Equal(t, 1, effects(t, pool))
	require.EqualValues(t, 2, charged.Load())
}

// Property: a flow inside of a middleware's transaction, which has its key, is refused at once,
// with no effect, and says what is wrong in the log; a pool of two connections serves others as
// before. Row H22 of guarantees.md.
func TestFlowInsideAMiddleware(t *testing.T) {
	t.Parallel()
	plain := newPool(t)
	config := plain.Config()
	config.MaxConns = 2
	pool := pgtest.PoolOf(t, config)
	var log bytes.Buffer
	m := newMiddleware(t, pool, operation(idempotency.Config{Logger: textLogger(&log)}))
	flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
		idempotency.Phase[charge]{Name: "charged", Write: func(_ context.Context, _ pgx.Tx, step *idempotency.Step[charge]) error {
			step.Finish(idempotency.Response{Status: 201})
			return nil
		}})
	require.NoError(t, err)
	inside, alone := serve(t, m.Handler(newFlowHandler(t, m, flow, nil))), serve(t, newFlowHandler(t, m, flow, nil))
	var group sync.WaitGroup
	for n := range 4 {
		group.Go(func() {
			a, err := inside.ask(t.Context(), http.MethodPost, "/orders", fmt.Sprint("inside-", n), "a")
			assert.NoError(t, err) //nolint:testifylint // not the test's goroutine
			assert.Equal(t, httpkey.ProblemInternal, a.problem.Type)
		})
	}
	group.Wait()
	require.Contains(t, log.String(), "take the route out")
	require.Equal(t, 201, alone.post(t, "k", "a").status)
	require.Equal(t, 1, keys(t, pool))
}

// Property: a flow whose foreign call has an unknown outcome answers 409 without Retry-After, now
// and later; one that another worker is at, 409 with it.
func TestFlowThatIsUndecidedOrBusy(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m := newMiddleware(t, pool, operation(idempotency.Config{WaitMax: time.Millisecond}))
	begun, release := make(chan struct{}), make(chan struct{})
	var calls atomic.Int64
	flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[charge]{},
		idempotency.Phase[charge]{Name: "charged", AtMostOnce: true, Call: func(context.Context, *idempotency.Step[charge]) error {
			calls.Add(1)
			close(begun)
			<-release
			return errors.New("no answer")
		}})
	require.NoError(t, err)
	s := serve(t, newFlowHandler(t, m, flow, nil))
	first := make(chan answer, 1)
	go func() {
		a, _ := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
		first <- a
	}()
	<-begun
	a := s.post(t, "k", "a")
	requireProblem(t, a, 409, httpkey.ProblemKeyInProgress)
	require.NotEmpty(t, a.header.Get("Retry-After"))
	close(release)
	for _, a := range []answer{<-first, s.post(t, "k", "a")} {
		requireProblem(t, a, 409, httpkey.ProblemKeyUndecided)
		require.Empty(t, a.header.Get("Retry-After"))
	}
	require.EqualValues(t, 1, calls.Load())
}
