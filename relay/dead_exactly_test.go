package relay_test

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

func valuesAt(t *testing.T, fake *kfake.Cluster, topic string) (all []string) {
	t.Helper()
	for _, record := range kafkatest.ReadAllAt(t, fake.ListenAddrs(), topic) {
		all = append(all, string(record.Value))
	}
	return all
}

// mixed writes rows of a topic that is there and of one that is not, with a key and without, in one
// transaction.
const mixedSQL = `INSERT INTO effectonce.outbox (topic, key, payload) VALUES
	('orders', 'k', '1'), ('missing', 'k', '2'), ('missing', NULL, '3'), ('orders', 'l', '4'), ('missing', 'k', '5'), ('orders', NULL, '6')`

// Property: a row that a committed transaction stepped over is not lost where its holder dies
// before it is among the dead: the next one finds it in the progress topic, also where rows around
// it went alone. Rows O12, O30 of guarantees.md.
func TestDeadRowOfACommittedTransactionIsNotLost(t *testing.T) {
	t.Parallel()
	either(t, "together", "alone", func(t *testing.T, alone bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		if alone { // after the first answer
			fake.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
				return refuse(request.(*kmsg.ProduceRequest), kerr.InvalidRecord), nil, true
			})
		}
		must(t, pool, mixedSQL)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, payload, headers) VALUES ('orders', '7', '{"n": {}}')`)
		var dies atomic.Bool
		r := relayAt(t, traced(t, pool, breaking("-- relay.move_to_dead", &dies)), fake, relay.Config{ExactlyOnce: true})
		dies.Store(true)
		for dying := 0; ; dying++ {
			require.Less(t, dying, 5, "it never comes to the dead rows")
			_, err := r.Drain(t.Context())
			if errors.Is(err, context.Canceled) {
				break
			}
			require.NoError(t, err)
		}
		require.Zero(t, dead(t, pool))
		require.NotEmpty(t, valuesAt(t, fake, "orders"), "the test's own premise: the transaction is committed")
		dies.Store(false)
		drain(t, r)
		require.Equal(t, []string{"1", "4", "6"}, valuesAt(t, fake, "orders"))
		require.Equal(t, []string{"2 held", "3 held", "5 behind", "7 held"}, one[[]string](t, pool,
			`SELECT array_agg(convert_from(payload, 'UTF8') || ' ' || state ORDER BY seq) FROM effectonce.outbox_dead WHERE error NOT LIKE '%interrupted%' OR state = 'behind'`))
		require.NoError(t, fake.CreateTopic("missing", 1, nil))
		drain(t, r)
		require.Equal(t, []string{"2", "3", "5"}, valuesAt(t, fake, "missing"))
		require.Equal(t, 1, dead(t, pool))
	})
}

// Property: dead rows of a transaction before the last one outlive a crash of the server, also where its
// commits do not by default: the progress topic names those of the last one only.
func TestDeadRowsOutliveACrash(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, InMemory: true, Parameters: map[string]string{"synchronous_commit": "off", "wal_writer_delay": "10s", "fsync": "off"}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.WithoutCancel(ctx))) })
	pgtest.Migrate(t, server.URL)
	pool := poolAt(t, server.URL)
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('missing', 'a', '1'), ('orders', 'b', '2'), ('missing', 'c', '3'), ('orders', 'd', '4'), ('orders', 'e', '5')`)
	var buried atomic.Int64
	ended := make(chan error, 1)
	ctx, stop := context.WithCancel(ctx)
	cfg := relay.Config{ExactlyOnce: true, PageRowsMax: 2, TransactionMax: time.Millisecond, Hooks: relay.Hooks{Dead: func(string, relay.Reason) {
		if buried.Add(1) == 2 { // in the second transaction
			stop()
			ended <- server.Kill(context.WithoutCancel(ctx))
		}
	}}}
	r := relayAt(t, pool, fake, cfg)
	_, _ = r.Drain(ctx)
	require.NoError(t, <-ended)
	require.NoError(t, server.Restart(t.Context()))
	testwait.True(t, "the database is back", func() bool { return pool.Ping(t.Context()) == nil })
	cfg.Hooks = relay.Hooks{}
	next := relayAt(t, pool, fake, cfg)
	testwait.True(t, "the rest is published", func() bool {
		_, _ = next.Drain(t.Context())
		return len(valuesAt(t, fake, "orders")) == 3
	})
	require.Equal(t, 2, dead(t, pool))
}

// Property: dead rows are not lost where a failover loses that they were stored, and Kafka has progress of later.
func TestDeadRowsThatAFailoverLostAreReadAgain(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('missing', 'a', '1'), ('orders', 'b', '2'), ('orders', 'c', '3')`)
	standby := before("-- relay.move_to_dead", meddle(t, pool, `CREATE TABLE IF NOT EXISTS advances AS TABLE effectonce.outbox_advances`))
	cfg := relay.Config{ExactlyOnce: true, PageRowsMax: 1, TransactionMax: time.Millisecond}
	drain(t, relayAt(t, traced(t, pool, standby), fake, cfg))
	require.Equal(t, 1, dead(t, pool))
	require.Equal(t, []string{"2", "3"}, valuesAt(t, fake, "orders"))
	must(t, pool, `UPDATE effectonce.outbox_progress SET epoch = 0; DELETE FROM effectonce.outbox_dead; DELETE FROM effectonce.outbox_advances; INSERT INTO effectonce.outbox_advances TABLE advances`)
	for range 2 {
		ctx, stop := context.WithCancel(t.Context())
		_, _ = relayAt(t, traced(t, pool, before("-- relay.fetch", func(context.Context) { stop() })), fake, cfg).Drain(ctx)
		require.Len(t, valuesAt(t, fake, "orders"), 2, "the test's own premise: it took over, and published nothing")
	}
	drain(t, relayAt(t, pool, fake, cfg))
	require.NoError(t, fake.CreateTopic("missing", 1, nil))
	drain(t, relayAt(t, pool, fake, cfg))
	require.Equal(t, []string{"1"}, valuesAt(t, fake, "missing"))
	require.Equal(t, []string{"2", "3", "2", "3"}, valuesAt(t, fake, "orders"))
}

// Property: a holder that lost its shard adds nothing to the dead rows: the new holder may have
// published them. Rows O12, O13 of guarantees.md.
func TestFencedHolderBuriesNothing(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		must(t, pool, mixedSQL)
		taken := traced(t, pool, before("-- relay.move_to_dead", meddle(t, pool, takenSQL)))
		_, err := relayAt(t, taken, fake, relay.Config{ExactlyOnce: exactly}).Drain(t.Context())
		require.ErrorContains(t, err, "lease lost")
		require.Equal(t, "another", owner(t, pool), "the test's own premise: it was taken")
		require.Zero(t, dead(t, pool))
	})
}

// Property: rows of a key that were handed back behind one that is held wait, and do not keep
// others waiting.
func TestRowsThatMayNotLeaveHoldNoOther(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	must(t, pool, `SELECT setval('effectonce.outbox_seq_seq', 2001)`)
	must(t, pool, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
		SELECT 'default', i, effectonce.uuid_v7(), $1, CASE WHEN i < 2000 THEN convert_to('k' || i % 5, 'UTF8') ELSE 'l' END, convert_to(i::text, 'UTF8'), '{}', clock_timestamp(), 'refused', '',
			CASE WHEN i <= 5 THEN 'held' ELSE 'retry' END FROM generate_series(1, 2001) AS i`, topic)
	drain(t, newRelay(t, pool, relay.Config{}))
	require.Equal(t, []string{"2000", "2001"}, values(t, topic))
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE seq = 3`)
	drain(t, newRelay(t, pool, relay.Config{}))
	require.Len(t, keyed(t, topic, "k3"), 400)
	require.Len(t, values(t, topic), 402)
	require.Equal(t, "3", keyed(t, topic, "k3")[0])
}

// Property: when Kafka refuses a batch, nothing that the relay handed over later is published before the
// rows of that batch are tried again. After a refusal the client would go on, under a new epoch.
func TestNothingIsPublishedBehindARefusedBatch(t *testing.T) {
	t.Parallel()
	const rows, page, times = 2000, 10, 20
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		var batches, refused atomic.Int64
		onProduce(fake, func(records []byte) error {
			var batch kmsg.RecordBatch
			if err := batch.ReadFrom(records); err == nil && batch.NumRecords > 1 && batches.Add(1)%5 == 0 && refused.Load() < times {
				refused.Add(1)
				return kerr.InvalidRecord
			}
			return nil // also to the rows of a refused batch, which are tried one by one
		})
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', 'k', convert_to(n::text, 'UTF8') FROM generate_series(1, $1::int) n`, rows)
		starts(t, relayAt(t, pool, fake, relay.Config{PageRowsMax: page, ExactlyOnce: exactly}))
		testwait.True(t, "all rows are published", func() bool { return published(t, pool) >= rows })
		require.Positive(t, refused.Load()) // how many depends on how many rows the client puts into a batch
		last := 0
		for _, value := range valuesAt(t, fake, "orders") {
			n, err := strconv.Atoi(value)
			require.NoError(t, err)
			require.LessOrEqual(t, n, last+1)
			last = max(last, n)
		}
		require.Equal(t, rows, last)
	})
}

// Property: with SkipDead a row that is itself wrong holds no other row, in its page, in later ones
// and after a retry that failed, and none of them is lost or doubled. Rows that waited behind one
// follow when it is retried. Rows of a missing topic still wait in their order. Row O10 of guarantees.md.
func TestSkippedDeadRowHoldsNobody(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, topic, missing := pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "5000"), kafkatest.UnusedTopic(t)
		large := incompressible(6000)
		got := func(key string) []string {
			if exactly {
				return keyed(t, topic, key)
			}
			return distinctInOrder(keyed(t, topic, key))
		}
		retry := func(keys string) {
			must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'too_large' AND convert_from(key, 'UTF8') LIKE $1`, keys)
		}
		for _, key := range []string{"k", "retried"} {
			insert(t, pool, topic, key, "0")
			insert(t, pool, topic, key, large)
			insert(t, pool, topic, key, "1")
		}
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		require.Equal(t, []string{"0"}, got("k"), "it holds its key by default")

		reasons := map[relay.Reason]int{}
		skipping := newRelay(t, pool, relay.Config{ExactlyOnce: exactly, SkipDead: true, PageRowsMax: 1, Hooks: relay.Hooks{Dead: func(_ string, reason relay.Reason) { reasons[reason]++ }}})
		retry("retried")
		drain(t, skipping)
		require.Equal(t, []string{"0", "1"}, got("retried"), "rows that waited follow a retry, also one that fails")
		require.Equal(t, []string{"0"}, got("k"), "others wait")
		retry("k")
		drain(t, skipping)
		insert(t, pool, missing, "k", "a")
		insert(t, pool, topic, "k", "2")
		insert(t, pool, missing, "k", "b")
		insert(t, pool, topic, "k", large+"y")
		insert(t, pool, topic, "k", "3")
		drain(t, skipping)
		insert(t, pool, topic, "k", "4")
		retry("%")
		drain(t, skipping)
		require.Equal(t, []string{"0", "1", "2", "3", "4"}, got("k"))
		require.Equal(t, map[relay.Reason]int{relay.ReasonTooLarge: 1, relay.ReasonUnknownTopic: 1, relay.ReasonBehind: 1}, reasons, "only rows of a missing topic wait in their order")
		require.Equal(t, 3, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE reason = 'too_large' AND state = 'held'`))

		kafkatest.Configure(t, topic, "max.message.bytes", "10000")
		retry("%")
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly, SkipDead: true}))
		require.Equal(t, []string{"0", "1", "2", "3", "4", large, large + "y"}, got("k"))
		require.Equal(t, 2, dead(t, pool))
	})
}
