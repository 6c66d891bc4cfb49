package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// held is a Kafka that does not take records for a while.
type held struct {
	brokers []string
	waits   atomic.Bool
	refused atomic.Int64
}

func newHeld(t *testing.T, topic string) *held {
	t.Helper()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, topic))
	h := &held{brokers: fake.ListenAddrs()}
	fake.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		if !h.waits.Load() {
			return nil, nil, false
		}
		h.refused.Add(1)
		return nil, errors.New("connection cut"), true
	})
	return h
}

// values of a topic, each once.
func (h *held) values(t *testing.T, topic string) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for _, record := range kafkatest.ReadAllAt(t, h.brokers, topic) {
		found[string(record.Value)] = true
	}
	return found
}

// running is a relay in this process, until the test ends.
func running(t *testing.T, pool *pgxpool.Pool, brokers []string, cfg relay.Config) {
	t.Helper()
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, cfg)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() { stop(); require.NoError(t, <-done) })
}

// Property: a relay that runs on through a crash of the server which loses commits that it has read (writers use
// synchronous_commit=off), and whose transaction ids are given out again, skips nothing that is there afterwards:
// what it learned before the crash is not stored, however late Kafka acknowledges. Row O24.
func TestCrashThatLosesCommitsSkipsNothing(t *testing.T) {
	t.Parallel()
	for _, exactly := range []bool{false, true} {
		t.Run(guarantee(exactly), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			cluster := pgtest.Cluster(t, map[string]string{"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"})
			pgtest.Migrate(t, cluster.URL)
			pool := open(t, cluster.URL)
			const topic, insert = "orders", `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', 'k', $1::text::bytea)`
			kafka := newHeld(t, topic)
			running(t, pool, kafka.brokers, relay.Config{ExactlyOnce: exactly, InFlightBytesMax: 64 << 10})
			_, err := pool.Exec(ctx, insert, "first")
			require.NoError(t, err)
			eventually(t, 20*time.Second, "the first row is stored as published", func() (bool, any) {
				n := count(ctx, t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress`)
				return n == 1, n
			})
			_, err = pool.Exec(ctx, `CHECKPOINT`)
			require.NoError(t, err)

			kafka.waits.Store(true)
			for range 60 { // transaction ids that come again
				_, err := pool.Exec(ctx, `SELECT pg_current_xact_id()`)
				require.NoError(t, err)
			}
			// So large that the relay reads nothing more until it is acknowledged.
			_, err = pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', 'phantom', convert_to(repeat(md5('x'), 4000), 'UTF8')`)
			require.NoError(t, err)
			lost := count(ctx, t, pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`)
			eventually(t, 20*time.Second, "it is on its way to Kafka", func() (bool, any) { return kafka.refused.Load() > 0, nil })
			require.NoError(t, cluster.Kill(ctx))
			require.NoError(t, cluster.Restart(ctx))
			pool.Reset()
			require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox WHERE key = 'phantom'`), "the test's own premise: it is lost")
			for i := range 20 {
				_, err := pool.Exec(ctx, insert, fmt.Sprint(i))
				require.NoError(t, err)
			}
			require.Less(t, count(ctx, t, pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`), lost, "the test's own premise: transaction ids come again")
			kafka.waits.Store(false)
			eventually(t, 30*time.Second, "everything that is there is published", func() (bool, any) {
				found := kafka.values(t, topic)
				for i := range 20 {
					if !found[fmt.Sprint(i)] {
						return false, len(found)
					}
				}
				return true, nil
			})
		})
	}
}
