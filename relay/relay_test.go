package relay_test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
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

func newRelay(t *testing.T, pool *pgxpool.Pool, cfg relay.Config) *relay.Relay {
	t.Helper()
	cfg.Lease = cmp.Or(cfg.Lease, time.Minute) // who loses it for a busy machine publishes again
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, cfg)
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

func insert(t *testing.T, pool *pgxpool.Pool, topic, key, payload string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, $2, $3)`, topic, []byte(key), []byte(payload))
	require.NoError(t, err)
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
			testwait.True(t, "it is published", func() bool {
				return one[int](t, pool, `SELECT coalesce(sum(published), 0)::int FROM effectonce.outbox_progress_now`) == 1
			})
			require.Equal(t, []string{"1"}, valuesAt(t, fake, "new"))
			return
		}
		testwait.True(t, "it waits", func() bool { return dead(t, pool) == 1 })
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead`), "AllowAutoTopicCreation")
	})
}

// Property: a row whose transaction commits after later rows were published is published, once. Row
// O2 of guarantees.md.
func TestLateCommitIsNotSkipped(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
		late, err := pool.Begin(ctx)
		require.NoError(t, err)
		defer late.Rollback(context.WithoutCancel(ctx))
		require.NoError(t, outbox.Publish(ctx, late, outbox.Message{Topic: topic, Payload: []byte("late")}))
		insert(t, pool, topic, "k", "early")
		require.EqualValues(t, 1, drain(t, r))
		insert(t, pool, topic, "k", "second")
		require.EqualValues(t, 1, drain(t, r))
		// More of the open transaction, after a tick: found by its transaction id.
		require.NoError(t, outbox.Publish(ctx, late, outbox.Message{Topic: topic, Payload: []byte("later")}))
		require.NoError(t, late.Commit(ctx))
		require.EqualValues(t, 2, drain(t, r))
		require.Zero(t, drain(t, r))
		require.Equal(t, []string{"early", "second", "late", "later"}, values(t, topic))
	})
}

// Property: a row is published whose transaction runs beyond the snapshot's xmax: xmax is one after
// the last id that has ended, so while nothing else ends, an open transaction is neither below it
// nor in xip.
func TestSlowWriterInAnIdleClusterIsNotSkipped(t *testing.T) {
	t.Parallel()
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	_, pool := ownCluster(t, nil)
	r := newRelay(t, pool, relay.Config{Lease: time.Minute, PollMax: 20 * time.Millisecond})
	stop := starts(t, r)
	testwait.True(t, `owner(t, pool) != ""`, func() bool { return owner(t, pool) != "" })
	for i := range 3 {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := outbox.Publish(ctx, tx, outbox.Message{Topic: topic, Payload: fmt.Append(nil, i)}); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `SELECT pg_sleep(0.5)`) // many polls see the sequence, and not the row
			return err
		}))
	}
	testwait.True(t, `len(values(t, topic)) == 3`, func() bool { return len(values(t, topic)) == 3 })
	stop()
}

// Property: one transaction with many more rows than a page, open while others are published, is
// published whole and in order, page by page, also when the relay starts anew between pages.
func TestLargeLateTransactionIsPaged(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		cfg := relay.Config{ExactlyOnce: exactly, PageRowsMax: 7}
		late, err := pool.Begin(ctx)
		require.NoError(t, err)
		defer late.Rollback(context.WithoutCancel(ctx))
		var want []string
		for i := range 100 {
			want = append(want, fmt.Sprint(i))
			require.NoError(t, outbox.Publish(ctx, late, outbox.Message{Topic: topic, Key: []byte("k"), Payload: []byte(want[i])}))
			if i == 50 {
				insert(t, pool, topic, "other", "x")
				require.EqualValues(t, 1, drain(t, newRelay(t, pool, cfg)))
			}
		}
		require.NoError(t, late.Commit(ctx))
		require.EqualValues(t, 100, drain(t, newRelay(t, pool, cfg)))
		require.Equal(t, append([]string{"x"}, want...), values(t, topic))
	})
}

// Property: a row for a topic that does not exist holds only that topic; when the topic is created
// the rows are published by themselves, in order and before later ones. Row O12 of guarantees.md.
func TestUnknownTopicHoldsOnlyItself(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		missing := kafkatest.UnusedTopic(t)
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
		stop := starts(t, r)
		insert(t, pool, missing, "k", "1")
		insert(t, pool, topic, "k", "flows")
		insert(t, pool, missing, "k", "2")
		insert(t, pool, missing, "other", "3")
		testwait.True(t, "one flows, the others wait", func() bool { return len(values(t, topic)) == 1 && dead(t, pool) == 3 })
		var reason, text string
		require.NoError(t, pool.QueryRow(ctx, `SELECT reason, error FROM effectonce.outbox_dead ORDER BY seq LIMIT 1`).Scan(&reason, &text))
		require.Equal(t, "unknown_topic", reason)
		require.Contains(t, text, "create it")

		insert(t, pool, missing, "k", "4")
		kafkatest.CreateTopic(t, missing, 1)
		insert(t, pool, missing, "k", "5")
		testwait.True(t, "they are published", func() bool { return len(values(t, missing)) == 5 })
		require.Equal(t, []string{"1", "2", "4", "5"}, keyed(t, missing, "k"))
		testwait.True(t, "nothing waits", func() bool { return dead(t, pool) == 0 })
		stop()
	})
}

// Property: a row that is too large for its topic is parked with its reason, later rows of its key
// wait behind it in order, every other key flows; after the limit was raised and the row set to
// retry, all are published in order. Rows O10, O11 of guarantees.md.
func TestRowTooLargeHoldsOnlyItsKey(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "5000")
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
		insert(t, pool, topic, "big", "0")
		large := incompressible(6000)
		insert(t, pool, topic, "big", large)
		insert(t, pool, topic, "big", "2")
		insert(t, pool, topic, "small", "s")
		drain(t, r)
		insert(t, pool, topic, "big", "3")
		// Many rows that fit alone must not be refused as one batch that does not.
		for range 20 {
			insert(t, pool, topic, "small", incompressible(4000))
		}
		drain(t, r)
		require.Equal(t, []string{"0"}, keyed(t, topic, "big"))
		require.Len(t, keyed(t, topic, "small"), 21)
		require.Equal(t, 3, dead(t, pool))
		var reason, text string
		require.NoError(t, pool.QueryRow(ctx, `SELECT reason, error FROM effectonce.outbox_dead WHERE state = 'held'`).Scan(&reason, &text))
		require.Equal(t, "too_large", reason)
		require.Contains(t, text, "max.message.bytes")

		// Retried without a fixed cause it stays; the others of its key stay behind it.
		retry := `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE state = 'held'`
		_, err := pool.Exec(ctx, retry)
		require.NoError(t, err)
		drain(t, r)
		require.Equal(t, 3, dead(t, pool))

		kafkatest.Configure(t, topic, "max.message.bytes", "10000")
		_, err = pool.Exec(ctx, retry)
		require.NoError(t, err)
		drain(t, r)
		require.Zero(t, dead(t, pool))
		require.Equal(t, []string{"0", large, "2", "3"}, keyed(t, topic, "big"))
	})
}

// Property: headers that plain SQL wrote in no known form park the row and name the header.
func TestBadHeadersArePlainlyReported(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, headers) VALUES ($1, '{"trace": {"nested": 1}}'), ($1, '{"n": 7, "message-id": "mine"}')`, topic)
		require.NoError(t, err)
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		var text string
		require.NoError(t, pool.QueryRow(ctx, `SELECT error FROM effectonce.outbox_dead WHERE reason = 'bad_headers'`).Scan(&text))
		require.Contains(t, text, `"trace"`)
		records := kafkatest.ReadAll(t, topic)
		require.Len(t, records, 1)
		require.Equal(t, []string{"7"}, header(records[0], "n"))
		require.Len(t, header(records[0], "message-id"), 1, "the relay's own message-id is the only one")
	})
}

// Property: only one replica publishes at a time; one that is stopped hands over at once, and the
// progress of one that lost its lease is refused. Row O13 of guarantees.md.
func TestLeaseMovesAndFences(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		var l leases
		first, second := newRelay(t, pool, relay.Config{ExactlyOnce: exactly, Owner: "first", Hooks: l.hooks()}), newRelay(t, pool, relay.Config{ExactlyOnce: exactly, Owner: "second"})
		stop := starts(t, first)
		testwait.True(t, `owner(t, pool) == "first"`, func() bool { return owner(t, pool) == "first" })
		_, err := second.Drain(ctx)
		require.ErrorIs(t, err, relay.ErrLeaseHeld)

		// Another replica takes over behind its back: the first must notice, and must not store
		// progress.
		_, err = pool.Exec(ctx, strings.Replace(takenSQL, "'another'", "'zombie'", 1))
		require.NoError(t, err)
		insert(t, pool, topic, "k", "1")
		// In flight is in flight; or it found out before it read the row.
		testwait.True(t, "it notices", func() bool { return len(values(t, topic)) > 0 || l.lost.Load() > 0 })
		stop()
		var published int64
		require.NoError(t, pool.QueryRow(ctx, `SELECT published FROM effectonce.outbox_progress_now`).Scan(&published))
		require.Zero(t, published, "progress of an earlier epoch")
		require.Equal(t, "zombie", owner(t, pool), "a lost lease must not be given back")

		_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp()`)
		require.NoError(t, err)
		drain(t, second)
		require.Equal(t, "1", values(t, topic)[0])
		require.Empty(t, owner(t, pool), "Drain gives the lease back")
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
		ctx, topic := t.Context(), kafkatest.Topic(t, 1)
		_, pool := ownCluster(t, nil)
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
		for i := range 5 {
			insert(t, pool, topic, "k", fmt.Sprint(i))
			drain(t, r)
		}
		// What a restore leaves behind: ids and ticks from far ahead, of a cluster with another
		// identity.
		_, err := pool.Exec(ctx, `UPDATE effectonce.outbox SET txid = '900000000000'`)
		require.NoError(t, err)
		insert(t, pool, topic, "k", "5")
		_, err = pool.Exec(ctx, `UPDATE effectonce.outbox SET txid = '900000000001' WHERE payload = '5'`)
		require.NoError(t, err)
		_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_ticks SET snapshot = '900000000001:900000000001:' WHERE tick > 0`)
		require.NoError(t, err)
		_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_progress SET system_identifier = 1`)
		require.NoError(t, err)
		insert(t, pool, topic, "k", "6")
		drain(t, r)
		insert(t, pool, topic, "k", "7")
		drain(t, r)
		require.Equal(t, []string{"0", "1", "2", "3", "4", "5", "6", "7"}, distinctInOrder(values(t, topic)))
		require.LessOrEqual(t, len(values(t, topic)), 8+3, "what is below the floor is not published again")
	})
}

// Property: settings out of bounds are all reported at once, with field, value and bound.
func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := relay.New(nil, nil, relay.Config{Schema: "Bad Schema", Lease: time.Millisecond, PollMin: time.Second, PollMax: time.Millisecond, PageRowsMax: -1, RecordBytesMax: 1, TopicPrefix: "a/"})
	for _, part := range []string{"Bad Schema", "Lease 1ms", "PollMin 1s", "PageRowsMax -1", "RecordBytesMax 1: want 1024 to 90000000", `TopicPrefix "a/"`, "pool is nil"} {
		require.ErrorContains(t, err, part)
	}
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

// Property: a look reads rows by index only, by one plan, whatever the statistics say: there are
// none, they are of a table that was empty, or they are right. Row O21 of guarantees.md.
func TestFetchWalksIndexes(t *testing.T) {
	t.Parallel()
	for _, statistics := range []string{"none", "of the empty table", "right"} {
		for name, sql := range map[string]string{"fetch": relay.FetchSQL, "fetch new": relay.FetchNewSQL, "fetch sized": relay.FetchSizedSQL} {
			t.Run(name+", statistics "+statistics, func(t *testing.T) {
				t.Parallel()
				pool := pgtest.Pool(t)
				if statistics == "of the empty table" {
					must(t, pool, `VACUUM ANALYZE effectonce.outbox`)
				}
				// One transaction with all rows is what misleads the planner about txid.
				must(t, pool, `INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 30000)`)
				if statistics == "right" {
					must(t, pool, `VACUUM ANALYZE effectonce.outbox`)
				}
				for _, after := range []int64{0, 29990} {
					plan := genericPlan(t, pool, sql, after)
					for slot := range 4 {
						require.Regexp(t, fmt.Sprintf(`Index (Only )?Scan using outbox_%d_pkey`, slot), plan)
						if sql != relay.FetchNewSQL {
							require.Regexp(t, fmt.Sprintf(`Index (Only )?Scan using outbox_%d_txid_seq_idx`, slot), plan)
						}
					}
					require.Contains(t, plan, "Merge Append", "the page comes in order from the index")
					// Only a page of late rows is sorted, never the rest of the outbox.
					require.LessOrEqual(t, strings.Count(plan, "Sort ("), 2, plan)
					require.NotRegexp(t, `Rows Removed by Filter: \d{3,}`, plan)
					require.NotRegexp(t, `Seq Scan on outbox_\d`, plan)
				}
			})
		}
	}
}

// Property: a look reads nothing of a transaction that is still open, however many rows it has.
// Row O21 of guarantees.md.
func TestOpenTransactionCostsALookNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	open, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = open.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = open.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 20000)`)
	require.NoError(t, err)
	var since, txid string
	require.NoError(t, open.QueryRow(t.Context(), `SELECT txid || ':' || txid + 1 || ':' || txid, txid::text FROM (SELECT pg_current_xact_id()::text::bigint AS txid) s`).Scan(&since, &txid))
	for _, sql := range []string{relay.FetchSQL, relay.FetchSizedSQL} {
		plan := look(t, pool, sql, 20000, since, txid, "BUFFERS, ")
		hit := regexp.MustCompile(`Buffers: shared hit=(\d+)`).FindStringSubmatch(plan)
		require.NotNil(t, hit, plan)
		pages, err := strconv.Atoi(hit[1])
		require.NoError(t, err)
		require.Less(t, pages, 100, plan)
	}
}

// genericPlan is the plan of a look beside two transactions that had been open.
func genericPlan(t *testing.T, pool *pgxpool.Pool, sql string, after int64) string {
	t.Helper()
	return look(t, pool, sql, after, "5:7:5", "5,6", "")
}

// look executes a fetch as a reader does: prepared, behind the settings. It returns its plan.
func look(t *testing.T, pool *pgxpool.Pool, sql string, after int64, since, open, with string) string {
	t.Helper()
	ctx := t.Context()
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(ctx)) }()
	_, err = tx.Exec(ctx, relay.FetchSettingsSQL)
	require.NoError(t, err)
	types, late := "text, bigint, text, bigint, text, int, int, int", ""
	if sql != relay.FetchNewSQL {
		types, late = types+", text[], bigint", ", '{"+open+"}', 0"
	}
	_, err = tx.Exec(ctx, "PREPARE look ("+types+") AS "+sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	rows, err := tx.Query(ctx, fmt.Sprintf("EXPLAIN (ANALYZE, %sTIMING OFF, COSTS OFF) EXECUTE look (NULL, %d, '%s', 100, NULL, 1, 0, 16384%s)", with, after, since, late), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	_, err = tx.Exec(ctx, "DEALLOCATE look")
	require.NoError(t, err)
	return strings.Join(lines, "\n")
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
