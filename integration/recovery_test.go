package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
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

// running is a relay in this process, until the test ends or calls stop.
func running(t *testing.T, pool *pgxpool.Pool, brokers []string, cfg relay.Config) (stop func()) {
	t.Helper()
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, cfg)
	require.NoError(t, err)
	return runs(t, r)
}

func runs(t *testing.T, r *relay.Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			select {
			case err := <-done:
				require.NoError(t, err)
			case <-time.After(testwait.Bound):
				require.FailNow(t, "the relay does not stop")
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

// Property: a relay that runs on through a crash of the server which loses commits that it has read
// (writers use synchronous_commit=off), and whose transaction ids are given out again, skips
// nothing that is there afterwards: what it learned before the crash is not stored, however late
// Kafka acknowledges. Row O24 of guarantees.md.
func TestCrashThatLosesCommitsSkipsNothing(t *testing.T) {
	longtest.Only(t, "crashes of clusters of its own")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx := t.Context()
		cluster := pgtest.Cluster(t, map[string]string{"synchronous_commit": "off", "bgwriter_lru_maxpages": "0", "autovacuum": "off"})
		pgtest.Migrate(t, cluster.URL)
		pool := open(t, cluster.URL)
		const topic, insert = "orders", `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', 'k', $1::text::bytea)`
		kafka := newHeld(t, topic)
		running(t, pool, kafka.brokers, relay.Config{ExactlyOnce: exactly, InFlightBytesMax: 64 << 10})
		_, err := pool.Exec(ctx, insert, "first")
		require.NoError(t, err)
		eventually(t, "the first row is stored as published", func() (bool, any) {
			n := count(ctx, t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress_now`)
			return n == 1, n
		})
		_, err = pool.Exec(ctx, `CHECKPOINT`)
		require.NoError(t, err)
		stopWriter(t, pool)

		kafka.waits.Store(true)
		for range 60 { // transaction ids that are assigned again
			_, err := pool.Exec(ctx, `SELECT pg_current_xact_id()`)
			require.NoError(t, err)
		}
		// So large that the relay reads nothing more until it is acknowledged.
		_, err = pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', 'phantom', convert_to(repeat(md5('x'), 4000), 'UTF8')`)
		require.NoError(t, err)
		lost := count(ctx, t, pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`)
		eventually(t, "it is on its way to Kafka", func() (bool, any) { return kafka.refused.Load() > 0, nil })
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
		eventually(t, "everything that is there is published", func() (bool, any) {
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

// stopWriter freezes the process that writes to the disk what was committed with
// synchronous_commit=off, until the server ends, which kills it.
func stopWriter(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var pid int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`).Scan(&pid))
	_, err := pool.Exec(t.Context(), fmt.Sprintf(`COPY (SELECT) TO PROGRAM 'cat > /dev/null && kill -STOP %d'`, pid))
	require.NoError(t, err)
}

// below lists the rows of a topic up to a floor.
func below(t *testing.T, pool *pgxpool.Pool, topic string, floor int) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT id::text FROM effectonce.outbox WHERE topic = $1 AND seq <= $2`, topic, floor)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, ids)
	return ids
}

// occurrences counts how often each ID is in a topic.
func occurrences(t *testing.T, topic string) map[string]int {
	t.Helper()
	ids := map[string]int{}
	for _, record := range kafkatest.ReadAll(t, topic) {
		for _, h := range record.Headers {
			if h.Key == outbox.HeaderMessageID {
				ids[string(h.Value)]++
			}
		}
	}
	return ids
}

// requireNotPublishedAgain compares with what was there before the restore: on a slow machine the
// first relay may have lost its lease, and published rows twice where that is allowed.
func requireNotPublishedAgain(t *testing.T, topic string, published []string, before map[string]int, exactly bool) {
	t.Helper()
	after := occurrences(t, topic)
	for _, id := range published {
		require.NotZero(t, before[id], "a row below the floor")
		require.Equal(t, before[id], after[id], "a row below the floor")
		if exactly {
			require.Equal(t, 1, after[id], "a row below the floor")
		}
	}
}

// Property: leases that are deleted by hand, while the relay runs, change nothing.
func TestLeasesDeletedByHand(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		if exactly {
			longtest.Only(t, "twice processes; the other is enough")
		}
		c := child{Role: "relay", URL: pgtest.Database(t), Brokers: kafkatest.Brokers(t), Shards: 3, ExactlyOnce: exactly, Lease: time.Second}
		pool, topic := openWorkload(t, c.URL), kafkatest.Topic(t, 2)
		r := start(t, c)
		w := writers{goroutines: 4, transactions: 80, keys: 6, topic: topic, seed: 9}
		w.run(t.Context(), t, pool)
		requirePublished(t, pool, topic)
		_, err := pool.Exec(t.Context(), `DELETE FROM effectonce.outbox_progress`)
		require.NoError(t, err)
		w.seed = 10
		w.run(t.Context(), t, pool)
		s := requirePublished(t, pool, topic)
		require.NoError(t, r.terminate())
		if exactly {
			require.Zero(t, s.duplicates)
		}
	})
}
