package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
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

// Property: connections that break and brokers that answer "not enough replicas" or "timed out" for
// a third of the produce requests cost time, and nothing else: no row is lost, parked or published
// out of order. Row O28 of guarantees.md.
func TestFlakyBrokerLosesNothing(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool := pgtest.Pool(t)
		fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "orders"))
		random := rand.New(rand.NewPCG(1, 2))
		onProduce(fake, func([]byte) error {
			return map[int]error{0: errors.New("connection cut"), 1: kerr.NotEnoughReplicas, 2: kerr.RequestTimedOut}[random.IntN(9)]
		})
		for i := range 300 {
			insert(t, pool, "orders", fmt.Sprint("k", i%7), fmt.Sprint(i))
		}
		r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...), kgo.ProducerBatchMaxBytes(2000), kgo.RetryBackoffFn(func(int) time.Duration { return time.Millisecond })},
			relay.Config{ExactlyOnce: exactly, PageRowsMax: 10, DrainMax: testwait.Bound})
		require.NoError(t, err)
		require.EqualValues(t, 300, drain(t, r))
		require.Zero(t, dead(t, pool))
		last := map[string]int{}
		records := kafkatest.ReadAllAt(t, fake.ListenAddrs(), "orders")
		require.Len(t, records, 300, "idempotent production: retries are no duplicates")
		for _, record := range records {
			var n int
			_, err := fmt.Sscan(string(record.Value), &n)
			require.NoError(t, err)
			require.Greater(t, n, last[string(record.Key)]-1, "key %s", record.Key)
			last[string(record.Key)] = n
		}
	})
}

// Property: what brokers refuse of several keys in a row, or because of the relay's timestamp, is an
// outage: no row is dead for it, none is lost, and all are published in order when the brokers are well,
// with and without keys, also where the outage ends in the middle of a page, and rows that waited for
// their topic. Row O31 of guarantees.md.
func TestRefusalsOfSeveralKeysAreAnOutage(t *testing.T) {
	t.Parallel()
	type outage struct {
		why      *kerr.Error
		last     int // of the rows, which begin with 10
		left     int // refusals
		released bool
	}
	eachBoth(t, map[string]outage{
		"timestamp": {why: kerr.InvalidTimestamp, last: 10, left: 4},
		"unknown":   {why: kerr.UnknownServerError, last: 11, left: 4}, // which says nothing about a record
		"version":   {why: kerr.UnsupportedVersion, last: 11, left: 4},
		"abortable": {why: kerr.TransactionAbortable, last: 11, left: 4},
		"policy":    {why: kerr.PolicyViolation, last: 30, left: 15}, // the rows are tried in a turn and a half
		"released":  {why: kerr.InvalidRecord, last: 30, left: 15, released: true},
	}, func(t *testing.T, c outage, exactly bool) {
		t.Helper()
		pool, fake, c := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1)), c
		if exactly {
			c.left = 4
		}
		onProduce(fake, func([]byte) error {
			if c.left--; c.left >= 0 {
				return c.why
			}
			return nil
		})
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
			SELECT 'orders', CASE WHEN n % 3 > 0 THEN convert_to('k' || n % 3, 'UTF8') END, convert_to(n::text, 'UTF8') FROM generate_series(10, $1::int) n`, c.last)
		if !c.released {
			createAt(t, fake, "orders")
		}
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly, SkipDead: true})
		if c.released {
			testwait.True(t, "they wait", func() bool { return dead(t, pool) == c.last-9 })
			createAt(t, fake, "orders")
		}
		refused := func() int {
			return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE reason = 'refused'`)
		}
		testwait.True(t, "all is published", func() bool {
			return len(distinctInOrder(valuesAt(t, fake, "orders"))) == c.last-9 && dead(t, pool) == 0 || refused() > 0
		})
		require.Zero(t, refused())
		for _, key := range []string{"k1", "k2"} {
			require.True(t, slices.IsSorted(distinctInOrder(keyedAt(t, fake, "orders", key))), key)
		}
		if exactly {
			require.Len(t, valuesAt(t, fake, "orders"), c.last-9)
		}
	})
}

// Property: where brokers refuse compressed batches the relay sends uncompressed and says once what to
// set; no row dies. Row O31 of guarantees.md.
func TestRefusedCompressionIsLeftOut(t *testing.T) {
	t.Parallel()
	for why, codec := range map[*kerr.Error]string{kerr.UnsupportedForMessageFormat: "", kerr.UnsupportedCompressionType: "gzip"} {
		t.Run(why.Message, func(t *testing.T) {
			t.Parallel()
			pool, fake, said := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders")), &lockedBuffer{}
			var codecs atomic.Int64 // a bit for each
			onProduce(fake, func(records []byte) error {
				var batch kmsg.RecordBatch
				if err := batch.ReadFrom(records); err == nil && batch.Attributes&7 != 0 {
					codecs.Or(1 << (batch.Attributes & 7))
					return why
				}
				return nil
			})
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', convert_to('k' || n, 'UTF8'), convert_to(repeat('x', 1000), 'UTF8') FROM generate_series(1, 20) n`)
			r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, relay.Config{Compression: codec, ExactlyOnce: codec != "", Logger: slog.New(slog.NewTextHandler(said, nil))})
			require.NoError(t, err)
			starts(t, r)
			testwait.True(t, "all is published", func() bool { return len(valuesAt(t, fake, "orders")) >= 20 || dead(t, pool) > 0 })
			require.Zero(t, dead(t, pool))
			require.Equal(t, 1, strings.Count(said.String(), "--kafka-compression"))
			require.EqualValues(t, map[string]int{"": 1 << 2, "gzip": 1 << 1}[codec], codecs.Load(), "the codec that was asked for")
		})
	}
}

// Property: one refused row in a large backlog, and many refused ones in a row, are found by a share of the
// requests that trying each row with each other would cost; no innocent row is dead, and exactly once none is
// published twice. Row O10 of guarantees.md.
func TestRefusedRowsAreFoundSoon(t *testing.T) {
	t.Parallel()
	type refused struct{ first, last, rows, requests int }
	eachBoth(t, map[string]refused{"one": {12345, 12345, 20_000, 1000}, "many": {1, 60, 70, 230}}, func(t *testing.T, c refused, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		var requests atomic.Int64
		onProduce(fake, func([]byte) error {
			requests.Add(1)
			return nil
		})
		poisoned(fake)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, payload) SELECT 'orders', CASE WHEN n BETWEEN $1 AND $2 THEN 'poison' ELSE convert_to(n::text, 'UTF8') END
			FROM generate_series(1, $3::int) n`, c.first, c.last, c.rows)
		stop := starts(t, relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly}))
		innocent := c.rows - (c.last - c.first + 1)
		testwait.True(t, "all is published or dead", func() bool { return dead(t, pool) == c.rows-innocent && published(t, pool) == innocent })
		stop()
		require.Len(t, distinctInOrder(valuesAt(t, fake, "orders")), innocent)
		require.Less(t, requests.Load(), int64(c.requests))
		if exactly {
			require.Len(t, valuesAt(t, fake, "orders"), innocent)
		}
	})
}

// Property: a topic that takes less than a batch, or than one row of many, costs a few restarts, and other
// topics flow. Row O11 of guarantees.md.
func TestRefusedSizesComeToAnEnd(t *testing.T) {
	t.Parallel()
	// Below the smallest batch there is no larger row, which would be tried alone at once.
	type topic struct {
		limit       string
		rows, large int
	}
	eachBoth(t, map[string]topic{"a larger row": {"3000", 150, 1}, "none": {"500", 40, 0}}, func(t *testing.T, c topic, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		small := kafkatest.TopicAt(t, fake.ListenAddrs(), 1, "max.message.bytes", c.limit)
		for i := range c.rows {
			insert(t, pool, small, fmt.Sprint("k", i%5), incompressible(100))
		}
		for range c.large {
			insert(t, pool, small, "big", incompressible(5000))
		}
		insert(t, pool, "orders", "k", "1")
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly})
		testwait.True(t, "the other topic flows", func() bool { return len(valuesAt(t, fake, "orders")) >= 1 && dead(t, pool) == c.large })
		testwait.True(t, "so do the small rows", func() bool { return len(distinctInOrder(valuesAt(t, fake, small))) == c.rows })
		require.Less(t, one[int](t, pool, `SELECT max(epoch)::int FROM effectonce.outbox_progress`), 60)
	})
}

// Property: a row that goes alone while the relay is stopped, and whose transaction cannot be ended in
// time, is not committed without its progress. Row O30 of guarantees.md.
func TestStopWhileARowGoesAlone(t *testing.T) {
	longtest.Only(t, "a broker that is slow for seconds")
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	poisoned(fake)
	slow, answer := make(chan struct{}), make(chan struct{})
	var once sync.Once
	onProduce(fake, func(records []byte) error {
		if bytes.Contains(records, []byte("slow")) && !bytes.Contains(records, []byte("poison")) {
			once.Do(func() {
				close(slow)
				fake.SleepControl(func() { <-answer })
			})
		}
		return nil
	})
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', 'a', 'slow'), ('orders', 'b', 'poison'), ('orders', 'c', '3')`)
	stop := starts(t, relayAt(t, pool, fake, relay.Config{ExactlyOnce: true}))
	<-slow
	time.AfterFunc(4*time.Second, func() { close(answer) })
	stop()
	runAt(t, pool, fake, relay.Config{ExactlyOnce: true})
	testwait.True(t, "it is judged", func() bool { return dead(t, pool) == 1 && slices.Contains(valuesAt(t, fake, "orders"), "3") })
	require.Equal(t, []string{"slow", "3"}, valuesAt(t, fake, "orders"))
}

// Property: rows behind discarded ones that are released in an outage are published after it. Row O31 of
// guarantees.md.
func TestFreedRowsOutliveAnOutage(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake, said := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders")), &lockedBuffer{}
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) SELECT 'orders', convert_to('k' || n % 4, 'UTF8'), convert_to(n::text, 'UTF8'),
			CASE WHEN n < 4 THEN '{"n": {}}' ELSE '{}' END::jsonb FROM generate_series(0, 7) n`)
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly, Logger: slog.New(slog.NewTextHandler(said, nil))})
		testwait.True(t, "all wait", func() bool { return dead(t, pool) == 8 })
		outage := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "orders", Err: kerr.PolicyViolation, Count: -1})
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'discard' WHERE state = 'held'`)
		testwait.True(t, "they are refused", func() bool { return strings.Contains(said.String(), "refuse rows that were released") })
		outage.Remove()
		testwait.True(t, "they are published", func() bool { return dead(t, pool) == 0 })
		require.ElementsMatch(t, []string{"4", "5", "6", "7"}, distinctInOrder(valuesAt(t, fake, "orders")))
	})
}

// Property: rows that waited for their topic, and are refused when it exists, wait there and stop no others.
// Row O31 of guarantees.md.
func TestRefusedRowsOfANewTopicStopNoOthers(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake, said := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders")), &lockedBuffer{}
		poisoned(fake)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, payload) SELECT 'new', 'poison' FROM generate_series(1, 4)`)
		var interrupted atomic.Int64
		starts(t, relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly, Logger: slog.New(slog.NewTextHandler(said, nil)), Hooks: relay.Hooks{Interrupted: func(error) { interrupted.Add(1) }}}))
		testwait.True(t, "they wait", func() bool { return dead(t, pool) == 4 })
		createAt(t, fake, "new")
		testwait.True(t, "they are refused", func() bool { return strings.Contains(said.String(), "refuse rows that were released") })
		insert(t, pool, "orders", "k", "1")
		testwait.True(t, "others are published", func() bool { return len(valuesAt(t, fake, "orders")) > 0 }) // twice, if it is the row that proves
		require.Equal(t, 4, dead(t, pool))
		require.Zero(t, interrupted.Load())
		insert(t, pool, "new", "k", "1")
		testwait.True(t, "others of the topic, too", func() bool { return len(valuesAt(t, fake, "new")) > 0 })
	})
}

// Property: rows of several keys that are refused again after the brokers took another row are dead, and
// rows of fewer keys are dead at once: nothing behind them waits for good, in their batch or later ones.
// Row O10 of guarantees.md.
func TestRefusalsAroundATakenRowAreTheRows(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		poisoned(fake)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', 'k', '1'), ('orders', 'a', 'poison'), ('orders', 'k', '2'),
			('orders', 'b', 'poison'), ('orders', 'c', 'poison')`)
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly})
		testwait.True(t, "three are dead: a success ends the streak", func() bool { return dead(t, pool) == 3 })
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
			SELECT 'orders', convert_to('d' || n, 'UTF8'), CASE n WHEN 1 THEN '3' ELSE 'poison' END::bytea FROM generate_series(1, 4) n`)
		testwait.True(t, "three others are an outage, and what was taken before them is behind progress", func() bool {
			return strings.Contains(problem(t, pool), "several keys") &&
				one[int](t, pool, `SELECT published FROM effectonce.outbox_progress_now`) >= 3
		})
		require.Equal(t, 3, dead(t, pool))
		insert(t, pool, "orders", "k", "4")
		testwait.True(t, "a row behind them proves that it was none", func() bool { return dead(t, pool) == 6 })
		require.Equal(t, []string{"1", "2", "3", "4"}, distinctInOrder(valuesAt(t, fake, "orders")))
	})
}

// Property: an outage that begins with the last rows of a page kills none of them.
func TestOutageAtTheEndOfAPageKillsNoRow(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		poisoned(fake)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
			SELECT 'orders', convert_to('k' || n, 'UTF8'), CASE WHEN n > 14 THEN 'poison' ELSE 'good' END::bytea FROM generate_series(1, 18) n`) // pages have 16
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly})
		testwait.True(t, "an outage", func() bool {
			return strings.Contains(problem(t, pool), "several keys") || dead(t, pool) > 0
		})
		require.Zero(t, dead(t, pool))
		require.GreaterOrEqual(t, len(valuesAt(t, fake, "orders")), 14)
	})
}

// onProduce lets a function see the records of each produce request, and decide on the answer: an error of
// Kafka's, another one breaks the connection, and nil leaves it to the brokers.
func onProduce(fake *kfake.Cluster, answer func(records []byte) error) {
	fake.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		produce := request.(*kmsg.ProduceRequest)
		var records []byte
		for _, topic := range produce.Topics {
			for _, partition := range topic.Partitions {
				records = append(records, partition.Records...)
			}
		}
		err := answer(records)
		if why := (*kerr.Error)(nil); errors.As(err, &why) {
			return refuse(produce, why), nil, true
		}
		return nil, err, err != nil
	})
}

func refuse(request *kmsg.ProduceRequest, why *kerr.Error) kmsg.Response {
	response := request.ResponseKind().(*kmsg.ProduceResponse)
	for _, topic := range request.Topics {
		answer := kmsg.NewProduceResponseTopic()
		answer.Topic, answer.TopicID = topic.Topic, topic.TopicID
		for _, partition := range topic.Partitions {
			p := kmsg.NewProduceResponseTopicPartition()
			p.Partition, p.ErrorCode = partition.Partition, why.Code
			answer.Partitions = append(answer.Partitions, p)
		}
		response.Topics = append(response.Topics, answer)
	}
	return response
}

// Property: Kafka is away. Programs commit their rows meanwhile and see
// how many rows wait, and for how long; the relay buries none, and publishes all in order when Kafka is
// back. Row O31 of guarantees.md.
func TestKafkaAwayForLong(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool := t.Context(), pgtest.Pool(t)
		fake, network := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders")), &cut{}
		r := behindCut(t, pool, fake, network, relay.Config{Owner: "a", ExactlyOnce: exactly, Lease: time.Second, InFlightBytesMax: 64 << 10})
		insert(t, pool, "orders", "k", "0")
		testwait.True(t, "the first is published", func() bool { return len(valuesAt(t, fake, "orders")) == 1 })
		network.away.Store(true)
		const rows = 5000
		for from := 1; from < rows; from += 500 {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, created_at) SELECT 'orders', 'k', convert_to(n::text, 'UTF8'), clock_timestamp() - interval '3 hours'
				FROM generate_series($1::int, least($1::int + 499, $2::int - 1)) n`, from, rows)
		}
		testwait.True(t, "it says so", func() bool { return describe(t, pool) == "a kafka_away" && r.Status().State == "kafka_away" })
		require.Contains(t, r.Status().Problem, "broker is away")
		require.Zero(t, dead(t, pool))
		require.Len(t, valuesAt(t, fake, "orders"), 1)
		backlog, err := outbox.ReadBacklog(ctx, pool)
		require.NoError(t, err)
		require.Greater(t, backlog.Rows, int64(rows/2)) // an estimate
		require.Greater(t, backlog.Oldest, 2*time.Hour)
		network.away.Store(false)
		testwait.True(t, "all is published", func() bool { return len(distinctInOrder(valuesAt(t, fake, "orders"))) == rows })
		require.Zero(t, dead(t, pool))
		require.Equal(t, numbered("", rows), distinctInOrder(valuesAt(t, fake, "orders")))
	})
}

// cutConn breaks as soon as the flag is set.
type cutConn struct {
	net.Conn
	cut *atomic.Bool
}

func (c *cutConn) Write(p []byte) (int, error) {
	if c.cut.Load() {
		_ = c.Close()
		return 0, errors.New("broker is away")
	}
	return c.Conn.Write(p)
}

// Property: a connection that is lost while the relay starts, by a pooler that ends or a server
// that restarts, is no reason to give up.
func TestConnectionLostAtTheStart(t *testing.T) {
	t.Parallel()
	config := pgtest.Pool(t).Config()
	var losses atomic.Int64
	losses.Store(3)
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return &losingConn{conn, &losses}, err
	}
	pool, topic := pgtest.PoolOf(t, config), kafkatest.Topic(t, 1)
	insert(t, pool, topic, "k", "0")
	starts(t, newRelay(t, pool, relay.Config{}))
	testwait.True(t, "the row is published", func() bool { return len(values(t, topic)) == 1 })
	require.Negative(t, losses.Load())
}

// losingConn breaks when the schema is queried, a given number of times.
type losingConn struct {
	net.Conn
	losses *atomic.Int64
}

func (c *losingConn) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("schema_version")) && c.losses.Add(-1) >= 0 {
		_ = c.Close() // the answer will not come
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// Property: the relay refuses a standby, where the order of visibility is not the primary's. Row
// O25 of guarantees.md.
func TestStandbyIsRefused(t *testing.T) {
	t.Parallel()
	cluster, pool := ownCluster(t, nil)
	// A server that finds this file starts in recovery, and stays there without a primary to
	// follow.
	must(t, pool, `CHECKPOINT`)
	must(t, pool, `COPY (SELECT 1) TO PROGRAM 'cat > standby.signal'`)
	require.NoError(t, cluster.Kill(t.Context()))
	require.NoError(t, cluster.Restart(t.Context()))
	pool.Reset()
	r := newRelay(t, pool, relay.Config{})
	require.ErrorIs(t, r.Run(t.Context()), relay.ErrNotPrimary)
	_, err := r.Drain(t.Context())
	require.ErrorIs(t, err, relay.ErrNotPrimary, "a standby hides nothing")
}

// Property: a relay works with a database that does not show its WAL position because the state of the
// server does not allow it, as some hosted ones do, and logs what it will not notice. Row O25 of
// guarantees.md.
func TestHiddenWALPosition(t *testing.T) {
	t.Parallel()
	pool, topic, said := pgtest.Pool(t), kafkatest.Topic(t, 1), &lockedBuffer{}
	must(t, pool, `SET allow_system_table_mods = on; ALTER FUNCTION pg_catalog.pg_current_wal_lsn() RENAME TO was_current_wal_lsn;
		CREATE FUNCTION pg_catalog.pg_current_wal_lsn() RETURNS pg_lsn LANGUAGE plpgsql AS 'BEGIN RAISE SQLSTATE ''55000''; END'; RESET allow_system_table_mods`)
	insert(t, pool, topic, "k", "1")
	drain(t, newRelay(t, pool, relay.Config{Logger: slog.New(slog.NewTextHandler(said, nil))}))
	require.Equal(t, []string{"1"}, values(t, topic))
	require.Contains(t, said.String(), "the server's run is hidden")
}

// Property: a database that stops and comes back costs time, and nothing else.
func TestDatabaseAwayIsWaitedOut(t *testing.T) {
	t.Parallel()
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	cluster, pool := ownCluster(t, nil)
	r := newRelay(t, pool, relay.Config{Lease: time.Second})
	stop := starts(t, r)
	for round := range 3 {
		for i := range 20 {
			insert(t, pool, topic, "k", fmt.Sprint(20*round+i))
		}
		require.NoError(t, cluster.Kill(ctx))
		require.NoError(t, cluster.Restart(ctx))
		pool.Reset()
	}
	testwait.True(t, "all is published", func() bool { return len(distinctInOrder(values(t, topic))) == 60 })
	stop()
}

// distinctInOrder are the first occurrences.
func distinctInOrder(list []string) (found []string) {
	seen := map[string]bool{}
	for _, v := range list {
		if !seen[v] {
			seen[v] = true
			found = append(found, v)
		}
	}
	return found
}
