package metrics

import (
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/monitor"
	"github.com/effectonce/effectonce/relay"
)

// Config is the configuration of Metrics.
type Config struct {
	Relay   string // name of the relay: the label of most metrics
	Schema  string
	Version string        // of the program
	Every   time.Duration // pause between two readings of the database
	Logger  *slog.Logger
	State   *monitor.State // of the replica
}

// Metrics are the metrics of one replica.
type Metrics struct {
	cfg      Config
	registry *prometheus.Registry

	dispatched    *prometheus.CounterVec // by topic
	lag           prometheus.Observer
	dead          *prometheus.CounterVec // by reason
	leases        prometheus.Counter
	interruptions prometheus.Counter
	errors        prometheus.Counter
	truncateWaits *prometheus.GaugeVec // by slot

	// clockAhead is how far the database's clock, which stamps rows, is ahead of this process's.
	clockAhead atomic.Int64

	mu   sync.Mutex
	last map[string][]prometheus.Metric // by group, from the database; a group whose reading failed has none
}

// slots is the number of slots of the outbox.
const slots = 4

// New returns metrics with all counters at zero.
func New(cfg Config) *Metrics {
	m := &Metrics{cfg: cfg, registry: prometheus.NewRegistry(), last: map[string][]prometheus.Metric{}}
	of := promauto.With(prometheus.WrapRegistererWith(prometheus.Labels{"relay": cfg.Relay}, m.registry))
	vector := func(metric, help, label string) *prometheus.CounterVec {
		return of.NewCounterVec(prometheus.CounterOpts{Name: metric, Help: help}, []string{label})
	}
	gauge := func(metric, help string, value func(owned, hung int, away bool) float64) {
		of.NewGaugeFunc(prometheus.GaugeOpts{Name: metric, Help: help}, func() float64 { return value(cfg.State.Shards()) })
	}
	m.dispatched = vector("effectonce_outbox_messages_dispatched_total", "Rows that Kafka acknowledged to this replica, including repetitions.", "topic")
	m.dead = vector("effectonce_outbox_messages_dead_total", "Rows that this replica moved to outbox_dead.", "reason")
	for _, reason := range []relay.Reason{
		relay.ReasonUnknownTopic, relay.ReasonNotAuthorized, relay.ReasonTooLarge, relay.ReasonRefused, relay.ReasonBadHeaders, relay.ReasonBadPartition, relay.ReasonPaused, relay.ReasonBehind,
	} {
		m.dead.WithLabelValues(string(reason)) // 0, so that the first one is an increase
	}
	m.truncateWaits = of.NewGaugeVec(prometheus.GaugeOpts{
		Name: "effectonce_outbox_relay_truncate_waiting_seconds", Help: "Seconds for which published rows of a slot of the outbox could not be removed because a transaction holds a lock on it; 0 if they can be removed.",
	}, []string{"slot"})
	for slot := range slots {
		m.truncateWaits.WithLabelValues(strconv.Itoa(slot))
	}
	m.leases = of.NewCounter(prometheus.CounterOpts{
		Name: "effectonce_outbox_lease_changes_total", Help: "Shards that this replica took, released or lost.",
	})
	m.interruptions = of.NewCounter(prometheus.CounterOpts{
		Name: "effectonce_outbox_interruptions_total", Help: "Times that this replica had to start over from its stored progress.",
	})
	m.errors = promauto.With(m.registry).NewCounter(prometheus.CounterOpts{
		Name: "effectonce_outbox_metrics_errors_total", Help: "Failed readings of a group of gauges from the database.",
	})
	m.lag = of.NewHistogram(prometheus.HistogramOpts{
		Name: "effectonce_outbox_delivery_lag_seconds", Help: "Seconds from a row's created_at to Kafka's acknowledgement.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600},
	})
	gauge("effectonce_outbox_shards_owned", "Shards that this replica publishes; 0 if it stands by.", func(owned, _ int, _ bool) float64 { return float64(owned) })
	gauge("effectonce_outbox_shards_hung", "Shards of this replica whose work gives no sign of life.", func(_, hung int, _ bool) float64 { return float64(hung) })
	gauge("effectonce_outbox_kafka_away", "1 while Kafka accepts no rows from this replica, else 0.", func(_, _ int, away bool) float64 {
		if away {
			return 1
		}
		return 0
	})
	of.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "effectonce_outbox_relay_info", Help: "Version of the program; always 1.", ConstLabels: prometheus.Labels{"version": cfg.Version},
	}, func() float64 { return 1 })
	m.registry.MustRegister(m, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Hooks returns the callbacks through which the relay counts, and its state is kept.
func (m *Metrics) Hooks() relay.Hooks {
	hooks := m.cfg.State.Hooks()
	leased := hooks.Lease
	hooks.Delivered = m.delivered
	hooks.Dead = func(_ string, reason relay.Reason) { m.dead.WithLabelValues(string(reason)).Inc() }
	hooks.Lease = func(shard int16, held bool) {
		m.leases.Inc()
		leased(shard, held)
	}
	hooks.Interrupted = func(error) { m.interruptions.Inc() }
	hooks.TruncateWaits = func(slot int16, waiting time.Duration) {
		m.truncateWaits.WithLabelValues(strconv.Itoa(int(slot))).Set(waiting.Seconds())
	}
	return hooks
}

func (m *Metrics) delivered(topic string, created []time.Time) {
	m.dispatched.WithLabelValues(topic).Add(float64(len(created)))
	now := time.Now().Add(time.Duration(m.clockAhead.Load()))
	for _, at := range created {
		m.lag.Observe(max(now.Sub(at).Seconds(), 0))
	}
}

// scrapesMax is how many scrapes are served at once; more are refused.
const scrapesMax = 4

// Handler serves scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: scrapesMax})
}
