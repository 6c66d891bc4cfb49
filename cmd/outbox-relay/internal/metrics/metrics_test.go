package metrics_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/metrics"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/monitor"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

func newMetrics(schema string) *metrics.Metrics {
	return metrics.New(metrics.Config{
		Relay: "default", Schema: schema, Version: "v1.2.3", Every: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler), State: monitor.NewState(),
	})
}

// Every metric of a working relay has the right value: what waits while no broker answers and how
// old it is, what was delivered and how late, what is dead or parked, who holds what. And
// docs/reference/metrics.md lists all of them with their labels and types, and no others.
func TestMetricsOfARun(t *testing.T) {
	longtest.Only(t, "ages in real time")
	t.Parallel()
	pool := pgtest.Pool(t)
	fake := kafkatest.Fake(t)
	topic := kafkatest.TopicAt(t, fake.ListenAddrs(), 1)
	m := newMetrics("effectonce")
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, relay.Config{Hooks: m.Hooks(), Lease: 30 * time.Second})
	require.NoError(t, err)
	watch(t, m, pool)
	owned, pending := of("effectonce_outbox_shards_owned", "relay", "default"), of("effectonce_outbox_pending_messages", "relay", "default")
	age := of("effectonce_outbox_oldest_pending_age_seconds", "relay", "default")
	dispatched := of("effectonce_outbox_messages_dispatched_total", "relay", "default", "topic", topic)

	s := await(t, m, "nothing waits", func(s series) bool { v, there := s[pending]; return there && v == 0 })
	assert.Zero(t, s[age])
	assert.Zero(t, s[owned])
	end := inBackground(t, func(ctx context.Context) { assert.NoError(t, r.Run(ctx)) })
	await(t, m, "the lease", func(s series) bool { return s[owned] == 1 })

	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) VALUES ('never-created')")
	s = await(t, m, "a dead row, which does not wait", func(s series) bool {
		return s[of("effectonce_outbox_dead_messages", "reason", "unknown_topic", "relay", "default", "state", "held")] == 1 && s[pending] == 0 &&
			s[of("effectonce_outbox_messages_dead_total", "reason", "unknown_topic", "relay", "default")] == 1
	})
	assert.InDelta(t, 0, s[of("effectonce_outbox_messages_dead_total", "reason", "too_large", "relay", "default")], 0)

	// Kafka takes records and does not answer.
	release := make(chan struct{})
	fake.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		fake.SleepControl(func() { <-release })
		return nil, nil, false
	})
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic, created_at) SELECT $1, clock_timestamp() - interval '100 s' FROM generate_series(1, 3)", topic)
	s = await(t, m, "three rows wait", func(s series) bool { return s[pending] == 3 })
	assert.GreaterOrEqual(t, s[age], 100.0)
	first := s[age]
	s = await(t, m, "they get older", func(s series) bool { return s[age] > first })
	assert.Zero(t, s[dispatched])
	close(release)
	s = await(t, m, "they are delivered", func(s series) bool { return s[dispatched] == 3 && s[pending] == 0 })
	assert.Zero(t, s[age])
	assert.InDelta(t, 3, s[of("effectonce_outbox_delivery_lag_seconds_count", "relay", "default")], 0)
	assert.GreaterOrEqual(t, s[of("effectonce_outbox_delivery_lag_seconds_sum", "relay", "default")], 300.0)
	assert.InDelta(t, 0, s[of("effectonce_outbox_delivery_lag_seconds_bucket", "relay", "default", "le", "60")], 0)
	assert.InDelta(t, 3, s[of("effectonce_outbox_delivery_lag_seconds_bucket", "relay", "default", "le", "300")], 0)

	// A lease that another replica took is an interruption, and two changes more.
	assert.Zero(t, s[of("effectonce_outbox_interruptions_total", "relay", "default")])
	pgtest.Exec(t, pool, "UPDATE effectonce.outbox_progress SET epoch = epoch + 1, lease_until = NULL")
	await(t, m, "the lease is lost and taken again", func(s series) bool {
		return s[of("effectonce_outbox_interruptions_total", "relay", "default")] >= 1 && s[of("effectonce_outbox_lease_changes_total", "relay", "default")] >= 3
	})

	waits := of("effectonce_outbox_relay_truncate_waiting_seconds", "relay", "default", "slot", "1")
	for _, waiting := range []time.Duration{90 * time.Second, 0} {
		m.Hooks().TruncateWaits(1, waiting)
		s, _ = scrape(t, m)
		assert.Contains(t, s, waits)
		assert.InDelta(t, waiting.Seconds(), s[waits], 0)
	}

	openTransaction(t, m, pool)
	end()
	tablesAtRest(t, m, pool)
	s, types := scrape(t, m)
	assert.Zero(t, s[owned])
	assert.GreaterOrEqual(t, s[of("effectonce_outbox_lease_changes_total", "relay", "default")], 4.0)
	assert.InDelta(t, 1, s[of("effectonce_outbox_relay_info", "relay", "default", "version", "v1.2.3")], 0)
	assert.InDelta(t, 0, s["effectonce_outbox_metrics_errors_total"], 0)
	assert.Contains(t, types, "go_goroutines")
	assert.Contains(t, types, "process_cpu_seconds_total")
	compareWithDocs(t, s, types)
}

// openTransaction is seen while it has written, and only then.
func openTransaction(t *testing.T, m *metrics.Metrics, pool *pgxpool.Pool) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), "SELECT pg_current_xact_id()")
	require.NoError(t, err)
	await(t, m, "an open transaction", func(s series) bool { return s["effectonce_outbox_oldest_transaction_age_seconds"] > 0.2 })
}

// tablesAtRest checks what is in the database when no relay runs.
func tablesAtRest(t *testing.T, m *metrics.Metrics, pool *pgxpool.Pool) {
	t.Helper()
	before, _ := scrape(t, m)
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic, payload) SELECT 't', string_agg(uuid_send(gen_random_uuid()), '') FROM generate_series(1, 20000)")
	await(t, m, "320 kB more", func(s series) bool {
		return s["effectonce_outbox_table_bytes"] >= before["effectonce_outbox_table_bytes"]+320_000
	})

	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_paused (relay, topic, who, why) VALUES ('default', 'a', 'ana', '-'), ('default', 'b', 'ana', '-'), ('other', 'a', 'ana', '-')")
	await(t, m, "paused topics", func(s series) bool { return s[of("effectonce_outbox_paused_topics", "relay", "default")] == 2 })
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 4), ('other', 7) ON CONFLICT (relay) DO UPDATE SET shards = excluded.shards")
	await(t, m, "shards", func(s series) bool { return s[of("effectonce_outbox_shards", "relay", "default")] == 4 })

	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() + interval '1 hour', 't')")
	later, overdue := "effectonce_outbox_scheduled_messages", "effectonce_outbox_oldest_overdue_age_seconds"
	soon := await(t, m, "a message for later", func(s series) bool { return s[later] == 1 })
	assert.Contains(t, soon, overdue)
	assert.Zero(t, soon[overdue])
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() - interval '200 s', 't')")
	late := await(t, m, "one that is overdue", func(s series) bool { return s[later] == 2 })
	assert.InDelta(t, 230, late[overdue], 30)

	keys := func(state string) string { return of("effectonce_idempotency_keys", "state", state) }
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, created_at)
		SELECT 't', 'charge', n::text, sha256('x'), (ARRAY['running', 'running', 'finished', 'indeterminate', 'abandoned'])[n], now() - n * interval '1 hour' FROM generate_series(1, 5) n`)
	open := await(t, m, "unfinished keys", func(s series) bool {
		return s[keys("running")] == 2 && s[keys("indeterminate")] == 1 && s[keys("abandoned")] == 1
	})
	assert.InDelta(t, 7230, open["effectonce_oldest_unfinished_key_age_seconds"], 30)
	assert.NotContains(t, open, keys("finished"))

	pgtest.Exec(t, pool, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing/orders', 'billing', '{orders}')")
	pgtest.Exec(t, pool, `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", reason, error, state)
		SELECT c.id, gen_random_uuid(), 'orders', 0, n, CASE n WHEN 1 THEN 'failed' ELSE 'behind' END, '', 'parked'
		FROM effectonce.consumers c, generate_series(1, 3) n`)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, record_time, caught_up_at) VALUES
		('billing', 'orders', 0, clock_timestamp() - interval '200 s', NULL),
		('billing', 'orders', 1, clock_timestamp() - interval '200 s', clock_timestamp()), ('billing', 'paid', 0, clock_timestamp(), NULL)`)
	position := func(partition string) string {
		return of("effectonce_consumer_position_age_seconds", "group", "billing", "partition", partition, "topic", "orders")
	}
	s := await(t, m, "consumers", func(s series) bool {
		_, there := s[position("1")]
		return there && s[of("effectonce_parked_messages", "group", "billing", "reason", "failed", "topic", "orders")] == 1
	})
	assert.InDelta(t, 2, s[of("effectonce_parked_messages", "group", "billing", "reason", "behind", "topic", "orders")], 0)
	assert.InDelta(t, 230, s[position("0")], 30)
	assert.InDelta(t, 15, s[position("1")], 15, "an idle partition at its end is not late")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why) VALUES ('billing', 'orders', 'ana', 'w')")
	await(t, m, "a pause", func(s series) bool {
		_, late := s[position("0")]
		return !late && s[of("effectonce_consumer_paused_topics", "group", "billing")] == 1
	})
}

// compareWithDocs compares names, types and labels in both directions.
func compareWithDocs(t *testing.T, samples series, types map[string]string) {
	t.Helper()
	text, err := os.ReadFile("../../../../docs/reference/metrics.md")
	require.NoError(t, err)
	documented := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\w+) \\| ([^|]*) \\|").FindAllStringSubmatch(string(text), -1) {
		documented[row[1]] = row[2] + " " + strings.Join(regexp.MustCompile(`\w+`).FindAllString(row[3], -1), ",")
	}
	exposed := map[string]string{}
	label := regexp.MustCompile(`(\w+)="`)
	for s := range samples {
		name, labels, _ := strings.Cut(s, "{")
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			if types[strings.TrimSuffix(name, suffix)] == "histogram" {
				name = strings.TrimSuffix(name, suffix)
			}
		}
		if !strings.HasPrefix(name, "effectonce_") {
			continue
		}
		var names []string
		for _, found := range label.FindAllStringSubmatch(labels, -1) {
			if found[1] != "le" {
				names = append(names, found[1])
			}
		}
		exposed[name] = types[name] + " " + strings.Join(names, ",")
	}
	assert.Equal(t, documented, exposed)
	assert.Len(t, exposed, 25)
}

// Values that cannot be read are left out and counted, not shown as they were; all others stay, and
// the missing ones return.
func TestNoValueIsStale(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	m := newMetrics("effectonce")
	pgtest.Exec(t, pool, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		VALUES ('default', 1, gen_random_uuid(), 't', '{}', now(), 'too_large', 'e', 'held')`)
	watch(t, m, pool)
	dead := of("effectonce_outbox_dead_messages", "reason", "too_large", "relay", "default", "state", "held")
	s := await(t, m, "a dead row", func(s series) bool { return s[dead] == 1 })
	assert.Zero(t, s["effectonce_outbox_metrics_errors_total"])

	pgtest.Exec(t, pool, "ALTER TABLE effectonce.outbox_dead RENAME TO elsewhere")
	s = await(t, m, "no dead rows, and an error", func(s series) bool {
		_, there := s[dead]
		return !there && s["effectonce_outbox_metrics_errors_total"] >= 1
	})
	assert.Contains(t, s, of("effectonce_outbox_pending_messages", "relay", "default"))
	assert.Contains(t, s, "effectonce_outbox_table_bytes")
	pgtest.Exec(t, pool, "ALTER TABLE effectonce.elsewhere RENAME TO outbox_dead")
	s = await(t, m, "the dead row again", func(s series) bool { return s[dead] == 1 })

	// A lock that is not given soon is such a failure, and ends the wait.
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), "LOCK TABLE effectonce.outbox_dead IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	before := s["effectonce_outbox_metrics_errors_total"]
	s = await(t, m, "no dead rows while they are locked", func(s series) bool {
		_, there := s[dead]
		return !there && s["effectonce_outbox_metrics_errors_total"] > before
	})
	assert.Contains(t, s, "effectonce_outbox_table_bytes", "what is read after them does not wait as long")
	require.NoError(t, tx.Rollback(t.Context()))
	await(t, m, "the dead row once more", func(s series) bool { return s[dead] == 1 })
}

// The state of the health checks has a lease. A name that is no UTF-8, which a database with another encoding may
// have, does not end the process.
func TestALeaseIsKeptAndLabelsAreUTF8(t *testing.T) {
	t.Parallel()
	state := monitor.NewState()
	metrics.New(metrics.Config{Relay: "default", Schema: "effectonce", State: state}).Hooks().Lease(3, true)
	owned, _, _ := state.Shards()
	assert.Equal(t, 1, owned)
	assert.NotPanics(t, func() { metrics.Gauge(prometheus.NewDesc("rows", "Rows.", []string{"topic"}, nil), 1, "caf\xe9") })
}

func TestMain(m *testing.M) { pgtest.Main(m) }

// series are samples by name and labels, as they are written.
type series map[string]float64

// scrape reads what Prometheus would.
func scrape(t *testing.T, m *metrics.Metrics) (samples series, types map[string]string) {
	t.Helper()
	recorder := httptest.NewRecorder()
	m.Handler().ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	require.Equal(t, 200, recorder.Code, recorder.Body)
	text, err := io.ReadAll(recorder.Body)
	require.NoError(t, err)
	samples, types = series{}, map[string]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if rest, isType := strings.CutPrefix(line, "# TYPE "); isType {
			name, kind, _ := strings.Cut(rest, " ")
			types[name] = kind
		}
		if strings.HasPrefix(line, "#") {
			continue
		}
		i := strings.LastIndex(line, " ")
		value, err := strconv.ParseFloat(line[i+1:], 64)
		require.NoError(t, err, line)
		samples[line[:i]] = value
	}
	return samples, types
}

// await scrapes until a condition holds.
func await(t *testing.T, m *metrics.Metrics, what string, holds func(series) bool) series {
	t.Helper()
	return testwait.For(t, what, func() (series, bool) {
		s, _ := scrape(t, m)
		return s, holds(s)
	})
}

// watch reads the database until the test ends.
func watch(t *testing.T, m *metrics.Metrics, pool *pgxpool.Pool) {
	t.Helper()
	inBackground(t, func(ctx context.Context) { m.Watch(ctx, pool) })
}

// inBackground runs something until the test, or what it returns, ends it.
func inBackground(t *testing.T, work func(context.Context)) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		work(ctx)
	}()
	end = func() {
		cancel()
		testwait.Chan(t, "the end", done)
	}
	t.Cleanup(end)
	return end
}

func of(name string, labels ...string) string {
	var pairs []string
	for i := 0; i < len(labels); i += 2 {
		pairs = append(pairs, fmt.Sprintf("%s=%q", labels[i], labels[i+1]))
	}
	return name + "{" + strings.Join(pairs, ",") + "}"
}
