// Package metrics exposes a relay to Prometheus: what its callbacks count, and what is in the
// database.
//
//	m := metrics.New(metrics.Config{Relay: "default", Schema: "effectonce", Version: version, State: state})
//	config.Hooks = m.Hooks()
//	go m.Watch(ctx, pool)
//	http.Handle("/metrics", m.Handler())
//
// Gauges of the database are read in the background, not at each scrape, each group in a short
// transaction of its own. A group that cannot be read is left out until it can be read again: a
// value is never older than one interval plus the time of the reading. docs/reference/metrics.md
// lists them all.
package metrics
