// Package prommetrics counts requests with idempotency keys by outcome, for Prometheus:
//
//	hooks, err := prommetrics.Hooks(prometheus.DefaultRegisterer, "create-order")
//	...
//	orders, err := idempotency.New(pool, idempotency.Config{Operation: "create-order", Hooks: hooks})
//
// The metrics are
//
//   - effectonce_idempotency_requests_total{operation, outcome}: requests; the outcomes are the
//     values of idempotency.Verdict
//   - effectonce_idempotency_differences{operation, phase, kind}: calls that, at the last comparison with a
//     ledger, only the keys or only the foreign system had: see idempotency.Flow.Compare
//   - effectonce_idempotency_weak_keys_total{operation, weakness}: requests whose key another client
//     could have, or guess: the values of idempotency.Weakness
//
// No label contains a key, a tenant or any other value that a client chooses.
package prommetrics

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Hooks returns callbacks for idempotency.Config that count, with their counters registered. All
// operations of a process share them: call it once for a registerer. The series of the named operations
// exist, at 0, before the first request, so that a rate includes it.
func Hooks(registerer prometheus.Registerer, operations ...string) (idempotency.Hooks, error) {
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "effectonce_idempotency_requests_total", Help: "Requests with idempotency keys, by outcome.",
	}, []string{"operation", "outcome"})
	weak := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "effectonce_idempotency_weak_keys_total", Help: "Requests whose idempotency key is weak, by weakness.",
	}, []string{"operation", "weakness"})
	differences := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "effectonce_idempotency_differences", Help: "Calls that, at the last comparison, only the keys or only the foreign system had.",
	}, []string{"operation", "phase", "kind"})
	for _, metric := range []prometheus.Collector{requests, weak, differences} {
		if err := registerer.Register(metric); err != nil {
			return idempotency.Hooks{}, fmt.Errorf("register metrics of idempotency keys: %w", err)
		}
	}
	for _, operation := range operations {
		for _, verdict := range verdicts() {
			requests.WithLabelValues(operation, string(verdict))
		}
	}
	return idempotency.Hooks{
		Answered: func(operation string, verdict idempotency.Verdict) {
			requests.WithLabelValues(operation, string(verdict)).Inc()
		},
		Weak: func(operation string, weakness idempotency.Weakness) {
			weak.WithLabelValues(operation, string(weakness)).Inc()
		},
		Compared: func(operation, phase string, found map[idempotency.DifferenceKind]int) {
			for kind, n := range found {
				differences.WithLabelValues(operation, phase, string(kind)).Set(float64(n))
			}
		},
	}, nil
}

func verdicts() []idempotency.Verdict {
	return []idempotency.Verdict{
		idempotency.Executed, idempotency.Replayed, idempotency.Mismatch, idempotency.InProgress, idempotency.Crowded, idempotency.Undecided,
		idempotency.FailedForNow, idempotency.InvalidKey, idempotency.LostItsLock, idempotency.NotAnswered,
	}
}
