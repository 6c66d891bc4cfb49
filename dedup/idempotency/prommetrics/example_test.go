package prommetrics_test

import (
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/prommetrics"
)

func ExampleHooks() {
	var pool *pgxpool.Pool // of the primary
	hooks, err := prommetrics.Hooks(prometheus.DefaultRegisterer, "create-order")
	if err != nil {
		panic(err)
	}
	orders, err := idempotency.New(pool, idempotency.Config{Operation: "create-order", Hooks: hooks})
	if err != nil {
		panic(err)
	}
	_ = orders // answers requests
	http.Handle("/metrics", promhttp.Handler())
}
