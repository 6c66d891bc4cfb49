// Package prommetrics counts for Prometheus what became of requests under idempotency keys:
//
//	hooks, err := prommetrics.Hooks(prometheus.DefaultRegisterer, "create-order")
//	...
//	orders, err := idempotency.New(pool, idempotency.Config{Operation: "create-order", Hooks: hooks})
//
// The metrics are
//
//   - idempotency_requests_total{operation, outcome}: requests; the outcomes are the values of idempotency.Verdict
//   - idempotency_keys_overdue{operation}: keys of flows that are unfinished for longer than FlowConfig.AgeMax, as this process last saw
//   - idempotency_keys_forgotten_total: keys that this process forgot because their window was over
//
// No label has a key, a tenant or anything else in it that a client chooses.
package prommetrics

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Hooks returns the callbacks of idempotency.Config that count, with their counters registered. All operations of a
// process may share them; called again with the same registerer, it returns callbacks of the same counters. The series of
// the operations that are named are there, at 0, before their first request, so that a rate sees the first one too.
func Hooks(registerer prometheus.Registerer, operations ...string) (idempotency.Hooks, error) {
	requests, err := registered(registerer, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "idempotency_requests_total", Help: "Requests under idempotency keys, by what became of them.",
	}, []string{"operation", "outcome"}))
	if err != nil {
		return idempotency.Hooks{}, err
	}
	forgotten, err := registered(registerer, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "idempotency_keys_forgotten_total", Help: "Idempotency keys that were forgotten because their window was over.",
	}))
	if err != nil {
		return idempotency.Hooks{}, err
	}
	overdue, err := registered(registerer, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "idempotency_keys_overdue", Help: "Keys of flows that are unfinished for longer than AgeMax, at most 10000.",
	}, []string{"operation"}))
	if err != nil {
		return idempotency.Hooks{}, err
	}
	for _, operation := range operations {
		overdue.WithLabelValues(operation)
		for _, verdict := range verdicts() {
			requests.WithLabelValues(operation, string(verdict))
		}
	}
	return idempotency.Hooks{
		Answered: func(operation string, verdict idempotency.Verdict) {
			requests.WithLabelValues(operation, string(verdict)).Inc()
		},
		Overdue: func(operation string, keys int64) { overdue.WithLabelValues(operation).Set(float64(keys)) },
		Reaped:  func(keys int64) { forgotten.Add(float64(keys)) },
	}, nil
}

func verdicts() []idempotency.Verdict {
	return []idempotency.Verdict{
		idempotency.Executed, idempotency.Replayed, idempotency.Mismatch, idempotency.InProgress, idempotency.Crowded, idempotency.OverQuota, idempotency.Undecided,
		idempotency.FailedForNow, idempotency.InvalidKey, idempotency.LostItsLock, idempotency.NotAnswered,
	}
}

// registered returns the collector, or the same one that was registered before.
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
