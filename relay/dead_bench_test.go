package relay_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// BenchmarkOtherTopic measures how long rows of a topic take, from their insert to Kafka's
// acknowledgement, at 500 a second, while none, and a million, rows of other topics wait in
// outbox_dead. It takes five minutes:
//
//	go test ./relay -run '^$' -bench OtherTopic -benchtime 1x
func BenchmarkOtherTopic(b *testing.B) {
	for _, exactly := range []bool{false, true} {
		for _, waiting := range []int{0, 500_000} { // of each kind
			b.Run(fmt.Sprintf("exactly=%v/waiting=%d", exactly, 2*waiting), func(b *testing.B) {
				pool, fake := pgtest.Pool(b), kafkatest.Fake(b, kfake.NumBrokers(1), kfake.SeedTopics(1, "other"))
				fill(b, pool, waitingSQL, waiting)
				_, err := relay.Pause(b.Context(), pool, relay.Operator{Who: "bench", Why: "bench"}, "paused")
				require.NoError(b, err)
				fill(b, pool, `VACUUM ANALYZE effectonce.outbox_dead`)
				d := deliver(b, pool, fake, relay.Config{ExactlyOnce: exactly}, "other")
				b.ResetTimer()
				for range b.N {
					d.write(b, 20*time.Second)
				}
				d.report(b)
			})
		}
	}
}

// BenchmarkPause measures the same while a topic with a million rows in the outbox is paused: its
// rows move to outbox_dead, and those of the other topic come in between and behind. (published:
// the topic is not paused, for comparison.)
func BenchmarkPause(b *testing.B) {
	for _, paused := range []bool{false, true} {
		b.Run(fmt.Sprintf("paused=%v", paused), func(b *testing.B) {
			pool, fake := pgtest.Pool(b), kafkatest.Fake(b, kfake.NumBrokers(1), kfake.SeedTopics(1, "other", "many"))
			fill(b, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'many', int4send((i % 10000)::int), 'payload' FROM generate_series(1, 1000000) AS i`)
			fill(b, pool, `VACUUM ANALYZE effectonce.outbox`)
			if paused {
				_, err := relay.Pause(b.Context(), pool, relay.Operator{Who: "bench", Why: "bench"}, "many")
				require.NoError(b, err)
			}
			b.ResetTimer()
			for range b.N {
				d := deliver(b, pool, fake, relay.Config{}, "other")
				d.write(b, 20*time.Second)
				d.report(b)
			}
		})
	}
}

func fill(b *testing.B, pool *pgxpool.Pool, sql string, args ...any) {
	b.Helper()
	_, err := pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

// delivering is a relay, and how long the rows of a topic took.
type delivering struct {
	pool  *pgxpool.Pool
	topic string
	mu    sync.Mutex
	took  []time.Duration
}

func deliver(b *testing.B, pool *pgxpool.Pool, fake *kfake.Cluster, cfg relay.Config, topic string) *delivering {
	b.Helper()
	d := &delivering{pool: pool, topic: topic}
	cfg.Hooks.Delivered = func(of string, created []time.Time) {
		now := time.Now()
		if of != topic {
			return
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, c := range created {
			d.took = append(d.took, now.Sub(c))
		}
	}
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, cfg)
	require.NoError(b, err)
	ctx, stop := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	b.Cleanup(func() { stop(); require.NoError(b, <-done) })
	return d
}

// write inserts 500 rows a second, and returns when all are delivered.
func (d *delivering) write(b *testing.B, whole time.Duration) {
	b.Helper()
	const every = 2 * time.Millisecond
	ticker, rows := time.NewTicker(every), int(whole/every)
	defer ticker.Stop()
	for range rows {
		<-ticker.C
		fill(b, d.pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', 'payload')`, d.topic)
	}
	require.Eventually(b, func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.took) >= rows
	}, 10*time.Minute, 10*time.Millisecond)
}

func (d *delivering) report(b *testing.B) {
	b.Helper()
	slices.Sort(d.took)
	milliseconds := func(part float64) float64 { return d.took[int(part*float64(len(d.took)-1))].Seconds() * 1000 }
	b.ReportMetric(milliseconds(0.5), "p50-ms")
	b.ReportMetric(milliseconds(0.99), "p99-ms")
	b.ReportMetric(milliseconds(1), "max-ms")
}
