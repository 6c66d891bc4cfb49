package httpkey_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// shipped is a flow of one phase, which finishes it.
func shipped(t *testing.T, m *httpkey.Middleware, cfg idempotency.FlowConfig[charge]) *idempotency.Flow[charge] {
	t.Helper()
	flow, err := idempotency.NewFlow(m.Operation(), cfg, idempotency.Phase[charge]{Name: "shipped", Write: func(_ context.Context, _ pgx.Tx, step *idempotency.Step[charge]) error {
		step.Finish(idempotency.Response{Status: 202 + len(step.Key.Operation)})
		return nil
	}})
	require.NoError(t, err)
	return flow
}

// Property: one Middleware serves several operations: the same key of two of them is two requests,
// each with its own replay, and its own flow; settings are shared, and a name is always the same
// operation.
func TestOneMiddlewareForSeveralOperations(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m := newMiddleware(t, pool, httpkey.Config{RequestBytesMax: 3})
	ship := m.For("ship")
	require.Same(t, ship, m.For("refund").For("ship"))
	require.Same(t, m, ship.For("api"))
	require.Equal(t, "ship", ship.Operation().Config().Operation)
	for handler, status := range map[*server]int{
		serve(t, m.Handler(insert(201))):                                                                                 201,
		serve(t, m.For("order").Handler(insert(202))):                                                                    202,
		serve(t, newFlowHandler(t, ship, shipped(t, ship, idempotency.FlowConfig[charge]{}), nil)):                       206,
		serve(t, newFlowHandler(t, m.For("refund"), shipped(t, m.For("refund"), idempotency.FlowConfig[charge]{}), nil)): 208,
	} {
		first, again := handler.post(t, "k", "a"), handler.post(t, "k", "a")
		require.Equal(t, status, first.status, first.body)
		require.False(t, first.replayed())
		require.Equal(t, status, again.status)
		require.True(t, again.replayed())
		requireProblem(t, handler.post(t, "l", "long"), 413, httpkey.ProblemTooLarge)
	}
	require.Equal(t, 4, keys(t, pool))
	require.Equal(t, 2, effects(t, pool))
	require.PanicsWithValue(t, fmt.Sprintf("httpkey: Middleware.For(%q): Operation: invalid idempotency key: operation has 256 bytes: want 1 to 255", strings.Repeat("a", 256)),
		func() { m.For(strings.Repeat("a", 256)) })
}

// Property: settings that would cut a call, or end a request that only waits, are refused where
// they come together.
func TestTimeLimitsAgree(t *testing.T) {
	t.Parallel()
	pool := pgtest.NoPool(t)
	for name, c := range map[string]struct {
		handler, wait, call time.Duration
		want                string
	}{
		"defaults":       {0, 0, 0, ""},
		"call as long":   {20 * time.Second, 0, 0, "FlowConfig.CallMax 20s: want less than Config.HandlerTimeout, 20s"},
		"call longer":    {time.Second, 0, time.Minute, "FlowConfig.CallMax 1m0s: want less than Config.HandlerTimeout, 1s"},
		"call fits":      {21 * time.Second, 0, 0, ""},
		"wait as long":   {time.Second, time.Second, time.Millisecond, "HandlerTimeout 1s: want more than Operation.WaitMax, 1s"},
		"wait's default": {200 * time.Millisecond, 0, time.Millisecond, "HandlerTimeout 200ms: want more than Operation.WaitMax, 250ms"},
	} {
		m, err := httpkey.New(pool, tenantOf, httpkey.Config{HandlerTimeout: c.handler, Operation: idempotency.Config{Operation: "api", WaitMax: c.wait}})
		if err == nil {
			_, err = httpkey.FlowHandler(m, shipped(t, m, idempotency.FlowConfig[charge]{CallMax: c.call}), nil)
		}
		if c.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, c.want, name)
		}
	}
	m := newMiddleware(t, pool, httpkey.Config{})
	_, err := httpkey.FlowHandler(m, shipped(t, m.For("ship"), idempotency.FlowConfig[charge]{CallMax: time.Hour}), nil)
	require.ErrorContains(t, err, `flow is of operation "ship" in schema "effectonce": want one of this Middleware's Operation, "api" in "effectonce"`)
	require.ErrorContains(t, err, "FlowConfig.CallMax 1h0m0s", "all problems at once")
}
