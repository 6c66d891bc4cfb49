package relay_test

import (
	"fmt"
	"slices"
	"strings"
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
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: each row goes where Config.Topic sends it, with the prefix. A row that it does not
// publish holds nothing up. A name that Kafka does not take makes the row dead.
func TestRowsGoWhereTopicSendsThem(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "eu.orders", "eu.vip"))
		cfg := relay.Config{
			ExactlyOnce: exactly, TopicPrefix: "eu.",
			Topic: func(row relay.Message) (string, bool) {
				switch tier := tierOf(row); {
				case row.Topic == "noise":
					return "", false
				case string(row.Key) == "bad":
					return "no name", true
				case tier == "gold":
					return "vip", true
				}
				return row.Topic, true
			},
		}
		for _, row := range [][3]string{
			{"orders", "k", `{}`},
			{"orders", "k", `{"tier": "gold"}`},
			{"noise", "k", `{}`},
			{"orders", "k", `{"tier": "tin"}`},
			{"noise", "k", `{}`},
			{"orders", "bad", `{}`},
			{"orders", "l", `{"tier": {}}`},
		} {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ($1, convert_to($2, 'UTF8'), convert_to($3, 'UTF8'), $3::jsonb)`, row[0], row[1], row[2])
		}
		r := relayAt(t, pool, fake, cfg)
		require.EqualValues(t, 3, drain(t, r))
		require.Zero(t, drain(t, r), "progress is behind all of them")
		require.Equal(t, []string{"refused", "bad_headers"}, deadReasons(t, pool))
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead WHERE key = 'bad'`), `Config.Topic returned "eu.no name"`)
		require.Equal(t, []string{"{}", `{"tier": "tin"}`}, valuesAt(t, fake, "eu.orders"))
		require.Equal(t, []string{`{"tier": "gold"}`}, valuesAt(t, fake, "eu.vip"))
	})
}

func tierOf(row relay.Message) string {
	for _, h := range row.Headers {
		if h.Name == "tier" {
			return string(h.Value)
		}
	}
	return ""
}

// Property: a panic of Config.Topic ends Run, with an error that names the row. No row is lost or
// passed: a relay without the panic publishes all of them in their order.
func TestPanicOfTopicEndsRun(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		for n := range 3 {
			insert(t, pool, "orders", "k", fmt.Sprint(n))
		}
		cfg := relay.Config{ExactlyOnce: exactly, PageRowsMax: 1, Topic: func(row relay.Message) (string, bool) {
			if string(row.Payload) == "1" {
				panic("no tenant")
			}
			return row.Topic, true
		}}
		err := relayAt(t, pool, fake, cfg).Run(t.Context())
		require.ErrorContains(t, err, `Config.Topic panicked on the row with seq 2`)
		require.ErrorContains(t, err, "no tenant")
		require.Zero(t, dead(t, pool))
		cfg.Topic = nil
		drain(t, relayAt(t, pool, fake, cfg))
		require.Equal(t, []string{"0", "1", "2"}, slices.Compact(valuesAt(t, fake, "orders")))
	})
}

// Property: names that people use are those of the outbox, with dead rows and what waits for a
// topic in Kafka; a row that waits goes where Config.Topic sends it then, also to nowhere, and what
// is behind it follows. Rows that waited before a restart are found again.
func TestRowsWaitForTheirChosenTopic(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "eu.orders"))
		cfg := relay.Config{ExactlyOnce: exactly, TopicPrefix: "eu.", Topic: func(row relay.Message) (string, bool) {
			if tier := tierOf(row); tier != "none" {
				return tier, true
			}
			return row.Topic, true
		}}
		put := func(key, value, tier string) {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', convert_to($1, 'UTF8'), convert_to($2, 'UTF8'), jsonb_build_object('tier', $3::text))`, key, value, tier)
		}
		put("a", "a1", "vip")
		put("b", "b1", "lead")
		put("c", "c1", "none")
		put("a", "a2", "none")
		put("d", "d1", "late")
		stop := starts(t, relayAt(t, pool, fake, cfg))
		testwait.True(t, "one flows, the others wait", func() bool { return len(valuesAt(t, fake, "eu.orders")) == 1 && dead(t, pool) == 4 })
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead WHERE convert_from(payload, 'UTF8') = 'a1'`), `"eu.vip" does not exist`)
		createAt(t, fake, "eu.vip")
		testwait.True(t, "what waits for that topic follows, with what is behind", func() bool { return dead(t, pool) == 2 && len(valuesAt(t, fake, "eu.orders")) == 2 })
		require.Equal(t, []string{"a1"}, valuesAt(t, fake, "eu.vip"))
		require.Equal(t, []string{"c1", "a2"}, valuesAt(t, fake, "eu.orders"))
		stop()
		stop = starts(t, relayAt(t, pool, fake, cfg))
		createAt(t, fake, "eu.late")
		testwait.True(t, "what waited before a restart follows", func() bool { return dead(t, pool) == 1 && len(valuesAt(t, fake, "eu.late")) == 1 })
		stop()

		put("b", "b2", "none")
		choose := cfg.Topic
		cfg.Topic = func(row relay.Message) (string, bool) {
			topic, _ := choose(row)
			return topic, topic != "lead"
		}
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry'`)
		drain(t, relayAt(t, pool, fake, cfg))
		require.Zero(t, dead(t, pool))
		require.Equal(t, []string{"c1", "a2", "b2"}, valuesAt(t, fake, "eu.orders"))
	})
}

func createAt(t *testing.T, fake *kfake.Cluster, topic string) {
	t.Helper()
	_, err := kafkaAdmin(t, fake).CreateTopic(t.Context(), 1, 1, nil, topic)
	require.NoError(t, err)
}

// Property: a row that asks for a partition which was just added is published, by a relay that knew
// the topic before.
func TestAddedPartitionIsSeen(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "orders"))
		buried := atomic.Int64{}
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly, Hooks: relay.Hooks{Dead: func(string, relay.Reason) { buried.Add(1) }}})
		insert(t, pool, "orders", "k", "1")
		testwait.True(t, "it knows the topic", func() bool { return len(valuesAt(t, fake, "orders")) == 1 })
		_, err := kafkaAdmin(t, fake).CreatePartitions(t.Context(), 3, "orders")
		require.NoError(t, err)
		// Time for another question, which nothing shows: the relay does not ask more often.
		require.True(t, pause.For(t.Context(), 200*time.Millisecond))
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', 'l', '2', '{"effectonce-partition": "4"}')`)
		testwait.True(t, "it is published", func() bool { return slices.Contains(valuesAt(t, fake, "orders"), "2") })
		require.Zero(t, buried.Load())
	})
}

// Property: a row that asks for a partition gets it, by Go and by plain SQL, without the header in
// its record; one that asks for what the topic does not have, or for no number, is dead of it; all
// others go where they would have gone.
func TestRowsChooseTheirPartition(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(4, "orders"))
		three := int32(3)
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			return outbox.Publish(t.Context(), tx,
				outbox.Message{Topic: "orders", Key: []byte("go"), Payload: []byte("3"), Partition: &three, Headers: []outbox.Header{{Name: "a", Value: []byte("b")}}},
				outbox.Message{Topic: "orders", Key: []byte("plain"), Payload: []byte("k")})
		}))
		for i := range 12 {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', 'one key', convert_to($1, 'UTF8'), jsonb_build_object('effectonce-partition', $2::int))`, fmt.Sprint(i%4), i%4)
		}
		for key, headers := range map[string]string{
			"over": `{"effectonce-partition": 4}`, "text": `{"effectonce-partition": "two"}`, "twice": `{"effectonce-partition": [1, 2]}`, "negative": `{"effectonce-partition": -1}`,
		} {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', convert_to($1, 'UTF8'), 'bad', $2::jsonb)`, key, headers)
		}
		r := relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly})
		require.EqualValues(t, 14, drain(t, r))
		require.Equal(t, []string{"bad_partition", "bad_partition", "bad_partition", "bad_partition"}, deadReasons(t, pool))
		records := kafkatest.ReadAllAt(t, fake.ListenAddrs(), "orders")
		require.Len(t, records, 14)
		for _, record := range records {
			if value := string(record.Value); value != "k" {
				require.Equal(t, value, fmt.Sprint(record.Partition))
			}
			require.Empty(t, header(record, outbox.HeaderPartition))
		}
		require.True(t, slices.ContainsFunc(records, func(r *kgo.Record) bool {
			return string(r.Key) == "go" && slices.Equal(header(r, "a"), []string{"b"})
		}), "other headers stay")

		insert(t, pool, "orders", "over", "behind")
		drain(t, r)
		require.Equal(t, 5, dead(t, pool), "it holds its key")
		_, err := kafkaAdmin(t, fake).CreatePartitions(t.Context(), 1, "orders")
		require.NoError(t, err)
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE key = 'over' AND state = 'held'`)
		testwait.True(t, "added partitions are seen, by the client, too", func() bool {
			_, _ = r.Drain(t.Context())
			return dead(t, pool) == 3
		})
		require.Equal(t, []string{"behind", "bad"}, keyedAt(t, fake, "orders", "over"), "of different partitions")
	})
}

// silent lets brokers not answer to what is produced to a topic, until the test ends or calls release.
func silent(t *testing.T, fake *kfake.Cluster, name string) (hanging <-chan struct{}, release func()) {
	t.Helper()
	hangs, answer := make(chan struct{}), make(chan struct{})
	hang, release := sync.OnceFunc(func() { close(hangs) }), sync.OnceFunc(func() { close(answer) })
	t.Cleanup(release)
	id := fake.TopicInfo(name).TopicID
	fake.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		for _, topic := range request.(*kmsg.ProduceRequest).Topics {
			if topic.Topic == name || topic.TopicID == id {
				hang()
				fake.SleepControl(func() { <-answer })
			}
		}
		return nil, nil, false
	})
	return hangs, release
}

// Property: a topic whose brokers are slow holds up no row of another relay, which is how the
// documents separate such a topic; its own rows come in order once the brokers answer. Row O34 of
// guarantees.md.
func TestSlowTopicHasARelayOfItsOwn(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "slow", "fast"))
	hanging, release := silent(t, fake, "slow")
	runAt(t, pool, fake, relay.Config{Name: "bulk", Topic: func(row relay.Message) (string, bool) { return row.Topic, row.Topic == "slow" }})
	runAt(t, pool, fake, relay.Config{Topic: func(row relay.Message) (string, bool) { return row.Topic, row.Topic != "slow" }})
	insert(t, pool, "slow", "k", "0")
	testwait.Chan(t, "a broker takes its time", hanging)
	var want []string
	for n := range 100 {
		insert(t, pool, "slow", "k", fmt.Sprint(n+1))
		insert(t, pool, "fast", "k", fmt.Sprint(n))
		want = append(want, fmt.Sprint(n))
	}
	testwait.True(t, "the other topic's rows", func() bool { return len(valuesAt(t, fake, "fast")) == len(want) })
	require.Equal(t, want, valuesAt(t, fake, "fast"))
	require.Empty(t, valuesAt(t, fake, "slow"), "the test's own premise")
	release()
	testwait.True(t, "the slow topic's rows", func() bool { return len(valuesAt(t, fake, "slow")) == len(want)+1 })
	require.Equal(t, append(want, "100"), valuesAt(t, fake, "slow"))
}

var ana = relay.Operator{Who: "ana", Why: "test"}

// pauses pauses a topic, and waits as long for the relays to confirm it.
func pauses(t *testing.T, pool *pgxpool.Pool, topic string, wait time.Duration) {
	t.Helper()
	changed, err := relay.Pause(t.Context(), pool, ana, wait, topic)
	require.NoError(t, err)
	require.Equal(t, []string{topic}, changed)
}

func resumes(t *testing.T, pool *pgxpool.Pool, topics ...string) {
	t.Helper()
	changed, err := relay.Resume(t.Context(), pool, ana, topics...)
	require.NoError(t, err)
	require.Equal(t, topics[:1], changed)
}

// keepsWriting runs a statement again and again, with the number of the time, until end, which a test calls
// before it returns.
func keepsWriting(t *testing.T, pool *pgxpool.Pool, sql, topic string) (end func() (times int)) {
	t.Helper()
	var stop atomic.Bool
	ended, times := make(chan struct{}), 0
	go func() {
		defer close(ended)
		for ; !stop.Load(); times++ {
			if _, err := pool.Exec(t.Context(), sql, topic, fmt.Append(nil, times)); err != nil {
				t.Errorf("write: %v", err)
				return
			}
		}
	}()
	return func() int {
		stop.Store(true)
		<-ended
		return times
	}
}

// Property: a pause is confirmed only after every row that was read before it is acknowledged:
// while a broker keeps its answer back, the wait names the replica; afterwards no row of the topic
// comes, and other topics flow.
func TestPauseIsConfirmedBehindWhatIsInFlight(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders", "other"))
	produced, release := silent(t, fake, "orders")
	starts(t, relayAt(t, pool, fake, relay.Config{Lease: time.Minute, Owner: "the replica"}))
	insert(t, pool, "orders", "k", "before")
	<-produced
	pauses(t, pool, "orders", 0)
	becomes(t, pool, "the relay looked, and could confirm", `SELECT bool_or(obeys = '{}') FROM effectonce.outbox_replicas`)
	var unconfirmed *relay.UnconfirmedError
	_, err := relay.Pause(ctx, pool, ana, 4*time.Second, "orders") // longer than from one look to the next
	require.ErrorAs(t, err, &unconfirmed)
	require.Equal(t, []string{"the replica"}, unconfirmed.Owners)

	release()
	_, err = relay.Pause(ctx, pool, ana, testwait.Bound, "orders")
	require.NoError(t, err)
	count := func(topic string) int { return len(kafkatest.ReadAllAt(t, fake.ListenAddrs(), topic)) }
	require.Equal(t, 1, count("orders"))
	insert(t, pool, "orders", "k", "after")
	insert(t, pool, "other", "k", "flows")
	testwait.True(t, "the other topic flows", func() bool { return count("other") == 1 && dead(t, pool) == 1 })
	require.Equal(t, 1, count("orders"))
	resumes(t, pool, "orders")
	testwait.True(t, "it is resumed", func() bool { return count("orders") == 2 })
}

// Property: when a wait says that the pause holds, no row of the topic comes any more, however many
// are being written, and whichever replicas share the shards.
func TestPauseHoldsWhenItIsConfirmed(t *testing.T) {
	longtest.Only(t, "nine looks of three replicas in real time")
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	for _, owner := range []string{"a", "b", "stands by"} {
		running(t, pool, relay.Config{Owner: owner, Shards: 2, PageRowsMax: 20, Lease: 30 * time.Second})
	}
	defer keepsWriting(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT $1, k::text::bytea, $2 FROM generate_series(1, 20) k`, topic)()
	for range 3 {
		before := kafkatest.Count(t, topic)
		testwait.True(t, "rows flow", func() bool { return kafkatest.Count(t, topic) > before })
		pauses(t, pool, topic, testwait.Bound)
		held, waiting := kafkatest.Count(t, topic), dead(t, pool)
		testwait.True(t, "rows wait", func() bool { return dead(t, pool) > waiting+100 })
		require.Equal(t, held, kafkatest.Count(t, topic), "rows came after the pause was confirmed")
		resumes(t, pool, topic)
		becomes(t, pool, "it is resumed", `SELECT count(*) = 0 FROM effectonce.outbox_dead WHERE reason = 'paused'`)
	}
}

// Property: without a replica that runs a pause is not confirmed, nor by one that does not say what
// it obeys, or obeys an earlier pause of the topic; a replica whose time is over is not asked.
func TestPauseIsConfirmedByAllThatRun(t *testing.T) {
	longtest.Only(t, "waits of real seconds")
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	// Some looks, also on a busy machine.
	wait := func() error {
		_, err := relay.Pause(ctx, pool, ana, 5*time.Second, "orders")
		return err
	}
	require.ErrorContains(t, wait(), "no replica of the relay runs")
	must(t, pool, `INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until) VALUES ('default', 'gone', clock_timestamp() - interval '1 second'), ('default', 'old', 'infinity'), ('another', 'x', 'infinity')`)
	require.ErrorContains(t, wait(), "not confirmed by old: it may still publish")
	must(t, pool, `UPDATE effectonce.outbox_replicas SET obeys = ARRAY(SELECT id FROM effectonce.outbox_paused) WHERE owner = 'old'`)
	require.NoError(t, wait())
	resumes(t, pool, "orders")
	require.ErrorContains(t, wait(), "not confirmed by old: it may still publish")
	must(t, pool, `DELETE FROM effectonce.outbox_replicas`)
	must(t, pool, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch) VALUES ('default', 0, 'frozen', 'infinity', 1)`)
	require.ErrorContains(t, wait(), "not confirmed by frozen (holds a lease, and is not alive)")
}

// Property: rows that wait for a topic are tried again when it is there, or when the relay publishes
// them elsewhere now, and not before.
func TestWaitingRowsAreTriedWhenTheyMayLeave(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "b.orders"))
	looks := func(attempts int, r func() *relay.Relay) {
		t.Helper()
		for range 3 {
			drain(t, r())
		}
		require.Equal(t, attempts, one[int](t, pool, `SELECT coalesce(max(attempts), 0) FROM effectonce.outbox_dead`))
	}
	as := func(prefix string) func() *relay.Relay {
		return func() *relay.Relay { return relayAt(t, pool, fake, relay.Config{TopicPrefix: prefix}) }
	}
	insert(t, pool, "orders", "k", "1")
	looks(1, as("a."))
	looks(2, as("c."))
	looks(0, as("b."))
	require.Equal(t, []string{"1"}, valuesAt(t, fake, "b.orders"))
	pauses(t, pool, "orders", 0)
	insert(t, pool, "orders", "k", "2")
	looks(1, as("b."))
	resumes(t, pool, "orders")
	looks(0, as("b."))
	insert(t, pool, "missing", "k", "3")
	looks(1, as("b."))
	looks(0, func() *relay.Relay {
		return relayAt(t, pool, fake, relay.Config{Topic: func(relay.Message) (string, bool) { return "b.orders", true }})
	})
	insert(t, pool, "missing", "k", "4")
	looks(1, as(""))
	looks(0, func() *relay.Relay { return newSinkRelay(t, pool, &receiver{}, relay.Config{}) })
}

// Property: the topics that rows wait for are asked for less often while nothing changes, and at once after
// rows became dead; rows that an operator released are found by each poll. Row O42 of guarantees.md.
func TestTopicsOfDeadRowsAreAskedForLessOften(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pauses(t, pool, "orders", 0)
	insert(t, pool, "orders", "k", "1")
	var released, topics int
	sink := newSinkRelay(t, traced(t, pool, pgtest.Statements(func(sql string) {
		released += strings.Count(sql, "-- relay.released")
		topics += strings.Count(sql, "-- relay.waiting_topics")
	})), &receiver{}, relay.Config{})
	drain(t, sink)
	require.Equal(t, 1, dead(t, pool))
	released, topics = 0, 0
	require.NoError(t, sink.LooksAtDeadRows(t.Context(), 20, func() {
		require.Equal(t, []int{20, 8}, []int{released, topics}) // rounds 1 to 5, 10, 15 and 20
		released, topics = 0, 0
	}))
}
