package relay_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

func newRelay(t *testing.T, pool *pgxpool.Pool, cfg relay.Config, opts ...kgo.Opt) *relay.Relay {
	t.Helper()
	cfg.Lease = cmp.Or(cfg.Lease, time.Minute) // who loses it for a busy machine publishes again
	r, err := relay.New(pool, append(opts, kgo.SeedBrokers(kafkatest.Brokers(t)...)), cfg)
	require.NoError(t, err)
	return r
}

// starts runs a relay until the test ends, or calls stop.
func starts(t *testing.T, r *relay.Relay) (stop func()) {
	t.Helper()
	running, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(running) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			require.NoError(t, testwait.Chan(t, "the relay stops", done))
		})
	}
	t.Cleanup(stop)
	return stop
}

// poolAt opens a pool until the test ends.
func poolAt(t *testing.T, address string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	return pgtest.PoolOf(t, config)
}

// ownCluster is a cluster where no other test's transaction begins or ends, with the schema.
func ownCluster(t *testing.T, parameters map[string]string) (*servers.Postgres, *pgxpool.Pool) {
	t.Helper()
	cluster := pgtest.Cluster(t, parameters)
	pgtest.Migrate(t, cluster.URL)
	return cluster, poolAt(t, cluster.URL)
}

// running starts a relay that does not lose its lease on a slow machine.
func running(t *testing.T, pool *pgxpool.Pool, cfg relay.Config) (stop func()) {
	t.Helper()
	cfg.Lease = cmp.Or(cfg.Lease, 30*time.Second)
	return starts(t, newRelay(t, pool, cfg))
}

func drain(t *testing.T, r *relay.Relay) int64 {
	t.Helper()
	n, err := r.Drain(t.Context())
	require.NoError(t, err)
	return n
}

func insert(t *testing.T, db database, topic, key, payload string) {
	t.Helper()
	must(t, db, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, $2, $3)`, topic, []byte(key), []byte(payload))
}

// values returns the values of a topic's records in order.
func values(t *testing.T, topic string) []string {
	t.Helper()
	found := []string{}
	for _, record := range kafkatest.ReadAll(t, topic) {
		found = append(found, string(record.Value))
	}
	return found
}

func header(record *kgo.Record, name string) []string {
	var found []string
	for _, h := range record.Headers {
		if h.Key == name {
			found = append(found, string(h.Value))
		}
	}
	return found
}

// Property: the record carries the row's ID, the publishing time as its timestamp and the row's time as a
// header. Row O35 of guarantees.md.
func TestRecordIsTheRow(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	id := outboxID(t, pool)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Publish(ctx, tx, outbox.Message{ID: id, Topic: topic}) }))
	// A row that waited for long must not be deleted by the topic's retention when it is published.
	must(t, pool, `UPDATE effectonce.outbox SET created_at = '2020-01-02 03:04:05.678901+00'`)
	require.EqualValues(t, 1, drain(t, newRelay(t, pool, relay.Config{})))
	records := kafkatest.ReadAll(t, topic)
	require.Len(t, records, 1)
	assert.Equal(t, []string{id.String()}, header(records[0], "message-id"))
	assert.Equal(t, []string{"2020-01-02T03:04:05.678901Z"}, header(records[0], "occurred-at"))
	assert.WithinDuration(t, time.Now(), records[0].Timestamp, time.Hour)
}

// Property: an embedded relay says what it does, and that its pool is too small for its shards.
func TestStatusSaysWhatTheReplicaDoes(t *testing.T) {
	t.Parallel()
	var said lockedBuffer
	r := newRelay(t, pgtest.Pool(t), relay.Config{Owner: "a", Shards: 100, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	require.Equal(t, relay.Status{Owner: "a", State: "starting"}, r.Status())
	stop := starts(t, r)
	testwait.True(t, "it publishes", func() bool { return r.Status().State == "publishing" && len(r.Status().Shards) == 100 })
	stop()
	require.Equal(t, "stopped", r.Status().State)
	require.Contains(t, said.String(), "raise pool_max_conns")
}

// Property: a topic that is not there is created by brokers that may do so if the options say so; else the
// row says why it waits.
func TestTopicsAreCreatedOnlyWhereTheOptionsSaySo(t *testing.T) {
	t.Parallel()
	either(t, "not", "created", func(t *testing.T, created bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.AllowAutoTopicCreation())
		opts := []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}
		if created {
			opts = append(opts, kgo.AllowAutoTopicCreation())
		}
		r, err := relay.New(pool, opts, relay.Config{})
		require.NoError(t, err)
		starts(t, r)
		insert(t, pool, "new", "k", "1")
		if created {
			testwait.True(t, "it is published", func() bool { return published(t, pool) == 1 })
			require.Equal(t, []string{"1"}, valuesAt(t, fake, "new"))
			return
		}
		testwait.True(t, "it waits", func() bool { return dead(t, pool) == 1 })
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead`), "AllowAutoTopicCreation")
	})
}

// Property: the rows of a transaction that commits after later ones were published are published once, all
// of them, in order and page by page, also those inserted after a tick, and when the relay starts anew
// between pages. Row O2 of guarantees.md.
func TestLateCommitIsNotSkipped(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		relays := func() *relay.Relay { return newRelay(t, pool, relay.Config{ExactlyOnce: exactly, PageRowsMax: 7}) }
		want := []string{"early", "second"}
		late := opened(t, pool, `SELECT`)
		for i := range 100 {
			payload := fmt.Sprint(i)
			want = append(want, payload)
			require.NoError(t, outbox.Publish(ctx, late, outbox.Message{Topic: topic, Key: []byte("k"), Payload: []byte(payload)}))
			if before, tick := map[int]string{30: "early", 50: "second"}[i]; tick {
				insert(t, pool, topic, "other", before)
				require.EqualValues(t, 1, drain(t, relays()))
			}
		}
		require.NoError(t, late.Commit(ctx))
		require.EqualValues(t, 100, drain(t, relays()))
		require.Zero(t, drain(t, relays()))
		require.Equal(t, want, values(t, topic))
	})
}

// Property: a row is published whose transaction runs beyond the snapshot's xmax: xmax is one after
// the last id that has ended, so while nothing else ends, an open transaction is neither below it
// nor in xip.
func TestSlowWriterInAnIdleClusterIsNotSkipped(t *testing.T) {
	t.Parallel()
	topic := kafkatest.Topic(t, 1)
	_, pool := ownCluster(t, nil)
	running(t, pool, relay.Config{PollMax: 20 * time.Millisecond})
	testwait.True(t, `owner(t, pool) != ""`, func() bool { return owner(t, pool) != "" })
	for range 3 {
		tx := opened(t, pool, `INSERT INTO effectonce.outbox (topic) VALUES ($1)`, topic)
		must(t, tx, `SELECT pg_sleep(0.5)`) // many polls see the sequence, and not the row
		require.NoError(t, tx.Commit(t.Context()))
	}
	testwait.True(t, `len(values(t, topic)) == 3`, func() bool { return len(values(t, topic)) == 3 })
}

// Property: a row for a topic that does not exist holds only that topic; when the topic is created
// the rows are published by themselves, in order and before later ones. Row O12 of guarantees.md.
func TestUnknownTopicHoldsOnlyItself(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, topic, missing := pgtest.Pool(t), kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
		starts(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		insert(t, pool, missing, "k", "1")
		insert(t, pool, topic, "k", "flows")
		insert(t, pool, missing, "k", "2")
		insert(t, pool, missing, "other", "3")
		testwait.True(t, "one flows, the others wait", func() bool { return len(values(t, topic)) == 1 && dead(t, pool) == 3 })
		require.Equal(t, []string{"unknown_topic", "behind", "unknown_topic"}, deadReasons(t, pool))
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead ORDER BY seq`), "create it")

		insert(t, pool, missing, "k", "4")
		kafkatest.CreateTopic(t, missing, 1)
		insert(t, pool, missing, "k", "5")
		testwait.True(t, "they are published", func() bool { return len(values(t, missing)) == 5 })
		require.Equal(t, []string{"1", "2", "4", "5"}, keyed(t, missing, "k"))
		testwait.True(t, "nothing waits", func() bool { return dead(t, pool) == 0 })
	})
}

// Property: a row above RecordBytesMax, or one that Kafka refuses because its topic takes less, is parked with
// its reason; later rows of its key wait behind it in order, and everything else flows, before and after it,
// in batches that are small enough. After the limit was raised and the row set to retry, all are published in
// order. Rows O10, O11 of guarantees.md.
func TestRowTooLargeHoldsOnlyItsKey(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "1500000")
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly, RecordBytesMax: 4_000_000})
		large, fits := incompressible(3_000_000), incompressible(1_300_000)
		for _, row := range [][2]string{{"big", "0"}, {"big", large}, {"big", "2"}, {"small", fits}, {"huge", incompressible(5_000_000)}} {
			insert(t, pool, topic, row[0], row[1])
		}
		drain(t, r)
		insert(t, pool, topic, "big", "3")
		// Many rows that fit alone must not be refused as one batch that does not.
		for range 30 {
			insert(t, pool, topic, "small", incompressible(100_000))
		}
		drain(t, r)
		require.Equal(t, []string{"0"}, keyed(t, topic, "big"))
		small := keyed(t, topic, "small")
		require.Len(t, small, 31)
		require.Equal(t, fits, small[0])
		require.Equal(t, []string{"too_large", "behind", "too_large", "behind"}, deadReasons(t, pool))
		errs := all[string](t, pool, `SELECT error FROM effectonce.outbox_dead WHERE state = 'held' ORDER BY seq`)
		require.Contains(t, errs[0], "MESSAGE_TOO_LARGE")
		require.Contains(t, errs[0], "max.message.bytes")
		require.Contains(t, errs[1], "RecordBytesMax of the relay (--record-bytes-max) is 4000000")

		// Retried without a fixed cause they stay; the others of their key stay behind them.
		retry := `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE state = 'held'`
		must(t, pool, retry)
		drain(t, r)
		require.Equal(t, 4, dead(t, pool))

		kafkatest.Configure(t, topic, "max.message.bytes", "10000000")
		must(t, pool, retry)
		drain(t, r)
		require.Equal(t, []string{"too_large"}, deadReasons(t, pool))
		require.Equal(t, []string{"0", large, "2", "3"}, keyed(t, topic, "big"))
	})
}

// Property: headers that plain SQL wrote in no known form park the row and name the header.
func TestBadHeadersArePlainlyReported(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, headers) VALUES ($1, '{"trace": {"nested": 1}}'), ($1, '{"n": 7, "message-id": "mine"}')`, topic)
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead WHERE reason = 'bad_headers'`), `"trace"`)
		records := kafkatest.ReadAll(t, topic)
		require.Len(t, records, 1)
		require.Equal(t, []string{"7"}, header(records[0], "n"))
		require.Len(t, header(records[0], "message-id"), 1, "the relay's own message-id is the only one")
	})
}

// Property: an outbox that was restored into another cluster, where its transaction ids mean
// nothing, is published on from the floor: everything above it again, nothing lost, and new rows
// flow. Row O22 of guarantees.md.
func TestAnotherClusterLosesNothing(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		// Other tests' transactions in the same cluster would hold the floor back.
		_, pool := ownCluster(t, nil)
		topic, r := kafkatest.Topic(t, 1), newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
		for i := range 5 {
			insert(t, pool, topic, "k", fmt.Sprint(i))
			drain(t, r)
		}
		// What a restore leaves behind: ids and ticks from far ahead, of a cluster with another
		// identity.
		must(t, pool, `UPDATE effectonce.outbox SET txid = '900000000000'`)
		insert(t, pool, topic, "k", "5")
		must(t, pool, `UPDATE effectonce.outbox SET txid = '900000000001' WHERE payload = '5';
			UPDATE effectonce.outbox_ticks SET snapshot = '900000000001:900000000001:' WHERE tick > 0;
			UPDATE effectonce.outbox_progress SET system_identifier = 1`)
		insert(t, pool, topic, "k", "6")
		drain(t, r)
		insert(t, pool, topic, "k", "7")
		drain(t, r)
		require.Equal(t, []string{"0", "1", "2", "3", "4", "5", "6", "7"}, distinctInOrder(values(t, topic)))
		require.LessOrEqual(t, len(values(t, topic)), 8+3, "what is below the floor is not published again")
	})
}

// Property: settings out of bounds, or that contradict each other, are all reported at once, with field, value
// and bound.
func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := relay.New(nil, nil, relay.Config{Schema: "Bad Schema", Lease: time.Millisecond, PollMin: time.Second, PollMax: time.Millisecond, PageRowsMax: -1, RecordBytesMax: 1, TopicPrefix: "a/"})
	for _, part := range []string{"Bad Schema", "Lease 1ms", "PollMin 1s", "PageRowsMax -1", "RecordBytesMax 1: want 1024 to 90000000", `TopicPrefix "a/"`, "pool is nil"} {
		require.ErrorContains(t, err, part)
	}
	_, err = relay.New(pgtest.Pool(t), []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, relay.Config{Sink: &receiver{}, ExactlyOnce: true})
	require.ErrorContains(t, err, "ExactlyOnce with a Sink")
	require.ErrorContains(t, err, "kafka options with a Sink")
	for name, option := range map[string]kgo.Opt{"DisableIdempotentWrite": kgo.DisableIdempotentWrite(), "ManualFlushing": kgo.ManualFlushing(), "UnknownTopicRetries": kgo.UnknownTopicRetries(-1), "BrokerMaxWriteBytes": kgo.BrokerMaxWriteBytes(1 << 20)} {
		_, err = relay.New(pgtest.Pool(t), []kgo.Opt{option}, relay.Config{})
		require.ErrorContains(t, err, name)
	}
}

// Property: a pool whose protocol cannot work, or may execute another session's statement behind a
// pooler, is refused at start, and the error names the one that works. Row O15 of guarantees.md.
func TestProtocolOfThePoolIsChecked(t *testing.T) {
	t.Parallel()
	database := pgtest.Pool(t).Config()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec, pgx.QueryExecModeDescribeExec} {
		config := database.Copy()
		config.ConnConfig.DefaultQueryExecMode = mode
		_, err := relay.New(pgtest.PoolOf(t, config), nil, relay.Config{})
		require.ErrorContains(t, err, "cache_describe")
	}
}

// Property: a pool whose connections may lead to a standby is refused at start. Row O25 of
// guarantees.md.
func TestPoolOfSeveralHostsIsChecked(t *testing.T) {
	t.Parallel()
	config := pgtest.Pool(t).Config()
	config.ConnConfig.Fallbacks = []*pgconn.FallbackConfig{{Host: config.ConnConfig.Host, Port: config.ConnConfig.Port}}
	for _, several := range []bool{false, true} {
		if several {
			config.ConnConfig.Fallbacks = append(config.ConnConfig.Fallbacks, &pgconn.FallbackConfig{Host: "127.0.0.2", Port: config.ConnConfig.Port})
		}
		for _, validate := range []pgconn.ValidateConnectFunc{nil, pgconn.ValidateConnectTargetSessionAttrsReadWrite} {
			config := config.Copy()
			config.ConnConfig.ValidateConnect = validate
			if _, err := relay.New(pgtest.PoolOf(t, config), nil, relay.Config{}); several && validate == nil {
				require.ErrorContains(t, err, "target_session_attrs=read-write")
			} else {
				require.NoError(t, err)
			}
		}
	}
}

func dead(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE state <> 'discarded'`)
}

func owner(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return one[string](t, pool, `SELECT coalesce(max(owner), '') FROM effectonce.outbox_progress_now`)
}

func keyed(t *testing.T, topic, key string) []string {
	t.Helper()
	var found []string
	for _, record := range kafkatest.ReadAll(t, topic) {
		if string(record.Key) == key {
			found = append(found, string(record.Value))
		}
	}
	return found
}

func outboxID(t *testing.T, pool *pgxpool.Pool) (id uuid.UUID) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT effectonce.uuid_v7()`).Scan((*[16]byte)(&id)))
	return id
}
