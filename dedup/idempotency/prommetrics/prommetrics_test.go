package prommetrics_test

import (
	"context"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/prommetrics"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// scraped returns the samples that Prometheus would read, by series.
func scraped(t *testing.T, registry *prometheus.Registry) map[string]string {
	t.Helper()
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	found := map[string]string{}
	for line := range strings.Lines(w.Body.String()) {
		if series, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok {
			found[series+"}"] = value
		} else if series, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && series != "#" {
			found[series] = value
		}
	}
	return found
}

func operation(t *testing.T, pool *pgxpool.Pool, name string, hooks idempotency.Hooks) *idempotency.Operation {
	t.Helper()
	op, err := idempotency.New(pool, idempotency.Config{Operation: name, Hooks: hooks, WaitMax: 10 * time.Millisecond})
	require.NoError(t, err)
	return op
}

// Property: the verdict on each request is counted for its operation, of all operations that share
// a registry; named operations have all their series before the first request. No label contains a key or a
// tenant.
func TestRequestsAreCounted(t *testing.T) {
	t.Parallel()
	ctx, pool, registry := t.Context(), pgtest.Pool(t), prometheus.NewRegistry()
	hooks, err := prommetrics.Hooks(registry, "order")
	require.NoError(t, err)
	orders, refunds := operation(t, pool, "order", hooks), operation(t, pool, "refund", hooks)
	before := scraped(t, registry)
	require.Len(t, before, 10, "the outcomes of orders")
	require.Equal(t, "0", before[`effectonce_idempotency_requests_total{operation="order",outcome="lock_lost"}`])

	failure := errors.New("away")
	ask := func(op *idempotency.Operation, k idempotency.Key, err error) {
		_, got := op.Once(ctx, k, func(context.Context, pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201}, err
		})
		require.ErrorIs(t, got, err)
	}
	k := idempotency.Key{Scope: "tenant-7", Value: "secret-key"}
	for range 3 {
		ask(orders, k, nil)
	}
	ask(refunds, k, nil)
	_, err = orders.Once(ctx, idempotency.Key{Scope: "tenant-7", Value: "other"}, func(ctx context.Context, _ pgx.Tx) (idempotency.Response, error) {
		_, err := orders.Once(ctx, idempotency.Key{Scope: "tenant-7", Value: "other"}, nil)
		require.ErrorIs(t, err, idempotency.ErrInProgress)
		return idempotency.Response{}, failure
	})
	require.ErrorIs(t, err, failure)
	_, err = orders.Once(ctx, idempotency.Key{Scope: "tenant-7"}, nil)
	require.ErrorIs(t, err, idempotency.ErrInvalid)
	k.Fingerprint[0]++
	_, err = orders.Once(ctx, k, nil)
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	hooks.Compared("order", "charge", map[idempotency.DifferenceKind]int{idempotency.DidNotAct: 2, idempotency.ActedForNoKey: 0})

	found := scraped(t, registry)
	for series, want := range map[string]string{
		`effectonce_idempotency_requests_total{operation="order",outcome="executed"}`: "1", `effectonce_idempotency_requests_total{operation="order",outcome="replayed"}`: "2",
		`effectonce_idempotency_requests_total{operation="order",outcome="mismatch"}`: "1", `effectonce_idempotency_requests_total{operation="order",outcome="failed"}`: "1",
		`effectonce_idempotency_requests_total{operation="order",outcome="invalid"}`: "1", `effectonce_idempotency_requests_total{operation="order",outcome="in_progress"}`: "1",
		`effectonce_idempotency_requests_total{operation="refund",outcome="executed"}`:            "1",
		`effectonce_idempotency_differences{kind="did_not_act",operation="order",phase="charge"}`: "2",
		`effectonce_idempotency_weak_keys_total{operation="order",weakness="short"}`:              "2",
	} {
		require.Equal(t, want, found[series], series)
	}
	for series := range found {
		require.NotContains(t, series, "tenant-7")
		require.NotContains(t, series, "secret-key")
	}
}

// Property: a name that is taken is an error, not a panic in the middle of a request.
func TestNameThatIsTaken(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	require.NoError(t, registry.Register(prometheus.NewCounter(prometheus.CounterOpts{Name: "effectonce_idempotency_requests_total", Help: "other"})))
	_, err := prommetrics.Hooks(registry)
	require.ErrorContains(t, err, "register metrics of idempotency keys")
}
