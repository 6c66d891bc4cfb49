package relay_test

import (
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: a topic with a rate is published no faster, in the order of each key and without a
// loss; other topics are not held up by what waits, and progress is behind rows of all topics.
func TestRatedTopicHoldsUpNoOther(t *testing.T) {
	longtest.Only(t, "a rate in real time")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		const rows, rate = 60, 15
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "slow", "fast"))
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
			SELECT 'slow', CASE WHEN i % 3 > 0 THEN convert_to('k' || i % 3, 'UTF8') END, convert_to(i::text, 'UTF8') FROM generate_series(1, $1::int) AS i`, rows)
		insert(t, pool, "fast", "k", "flows")
		var first, last atomic.Int64 // of the slow ones, in ns
		var done, before atomic.Int64
		before.Store(-1)
		cfg := relay.Config{ExactlyOnce: exactly, Rates: map[string]float64{"slow": rate}}
		cfg.Hooks.Delivered = func(topic string, created []time.Time) {
			if topic == "fast" {
				before.Store(done.Load())
				return
			}
			done.Add(int64(len(created)))
			first.CompareAndSwap(0, time.Now().UnixNano())
			last.Store(time.Now().UnixNano())
		}
		runAt(t, pool, fake, cfg)
		testwait.True(t, "the other topic flows", func() bool { return before.Load() >= 0 })
		require.Less(t, before.Load(), int64(rows/2), "it did not wait for the slow ones")
		testwait.True(t, "all is out", func() bool { return dead(t, pool) == 0 && len(valuesAt(t, fake, "slow")) >= rows })
		took := time.Duration(last.Load() - first.Load())
		require.GreaterOrEqual(t, took, time.Duration(float64(rows-1.5*rate-rate)/rate*float64(time.Second)), "no faster than the rate, but for what it may gather")
		newest := map[string]int{}
		for _, record := range kafkatest.ReadAllAt(t, fake.ListenAddrs(), "slow") {
			n, err := strconv.Atoi(string(record.Value))
			require.NoError(t, err)
			if record.Key != nil && n > newest[string(record.Key)] {
				require.LessOrEqual(t, n, newest[string(record.Key)]+3, "no row of the key is passed")
				newest[string(record.Key)] = n
			}
		}
		require.Equal(t, map[string]int{"k1": rows - 2, "k2": rows - 1}, newest)
	})
}

// Property: a rate that is taken away, and a pause beside a rate, do what they say.
func TestRateAndPause(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "slow"))
	must(t, pool, `INSERT INTO effectonce.outbox (topic, payload) SELECT 'slow', convert_to(i::text, 'UTF8') FROM generate_series(1, 200) AS i`)
	drain(t, relayAt(t, pool, fake, relay.Config{Rates: map[string]float64{"slow": 0.001}}))
	require.Equal(t, 199, dead(t, pool))
	require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead LIMIT 1`), "rate of 0.001 rows per second")
	runAt(t, pool, fake, relay.Config{})
	testwait.True(t, "all is out", func() bool { return dead(t, pool) == 0 && len(valuesAt(t, fake, "slow")) == 200 })
}
