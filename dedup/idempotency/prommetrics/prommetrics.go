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
//   - effectonce_idempotency_keys_forgotten_total: expired keys that this process forgot
//   - effectonce_idempotency_differences{operation, phase, kind}: calls that, at the last comparison with a
//     ledger, only the keys or only the foreign system had: see idempotency.Flow.Compare
//   - effectonce_idempotency_weak_keys_total{operation, weakness}: requests whose key another client
//     could have, or guess: the values of idempotency.Weakness
//
// No label contains a key, a tenant or any other value that a client chooses.
package prommetrics

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Hooks returns callbacks for idempotency.Config that count, with their counters registered. All
// operations of a process may share them; repeated calls with the same registerer return callbacks
// of the same counters. The series of the named operations exist, at 0, before the first request,
// so that a rate includes it.
func Hooks(registerer prometheus.Registerer, operations ...string) (idempotency.Hooks, error) {
	requests, problem1 := registered(registerer, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "effectonce_idempotency_requests_total", Help: "Requests with idempotency keys, by outcome.",
	}, []string{"operation", "outcome"}))
	forgotten, problem2 := registered(registerer, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "effectonce_idempotency_keys_forgotten_total", Help: "Idempotency keys that were forgotten because their window was over.",
	}))
	weak, problem3 := registered(registerer, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "effectonce_idempotency_weak_keys_total", Help: "Requests whose idempotency key is weak, by weakness.",
	}, []string{"operation", "weakness"}))
	differences, problem4 := registered(registerer, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "effectonce_idempotency_differences", Help: "Calls that, at the last comparison, only the keys or only the foreign system had.",
	}, []string{"operation", "phase", "kind"}))
	if err := errors.Join(problem1, problem2, problem3, problem4); err != nil {
		return idempotency.Hooks{}, err
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
		Reaped: func(keys int64) { forgotten.Add(float64(keys)) },
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

// registered returns the collector, or an equal one that was registered before.
func registered[C prometheus.Collector](registerer prometheus.Registerer, c C) (C, error) {
	err := registerer.Register(c)
	var already prometheus.AlreadyRegisteredError
	if errors.As(err, &already) {
		if before, ok := already.ExistingCollector.(C); ok {
			return before, nil
		}
	}
	if err != nil {
		return c, fmt.Errorf("register metrics of idempotency keys: %w", err)
	}
	return c, nil
}
