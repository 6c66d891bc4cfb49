package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: a dead row that an operator discards while it is being published costs the relay
// nothing: it keeps its lease, and gives it back.
func TestDeadRowDiscardedWhileItIsPublished(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
		must(t, pool, `INSERT INTO effectonce.outbox (topic, headers) VALUES ($1, '{"n": {}}')`, topic)
		drain(t, r)
		must(t, pool, `UPDATE effectonce.outbox_dead SET headers = '{}', state = 'retry'`)
		operator := opened(t, pool, `UPDATE effectonce.outbox_dead SET state = 'discard'`)
		done := drains(t, r)
		testwait.True(t, `len(values(t, topic)) == 1`, func() bool { return len(values(t, topic)) == 1 })
		require.NoError(t, operator.Commit(ctx))
		require.NoError(t, <-done)
		require.Empty(t, owner(t, pool), "the lease is given back")
	})
}

// Property: Drain publishes everything that waits, also where progress was stored inside a batch of
// which nothing is left.
func TestDrainGoesOnBehindAFinishedBatch(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	cfg := relay.Config{PageRowsMax: 2}
	batch := func(payloads ...string) {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for _, payload := range payloads {
				if _, err := tx.Exec(ctx, `INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, convert_to($2, 'UTF8'))`, topic, payload); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	batch("1", "2")
	stop, end := context.WithCancel(ctx)
	cut := cfg
	cut.Hooks.Published = func(int64) { end() } // stops behind a full page, which may have been the last of its batch
	_, _ = newRelay(t, pool, cut).Drain(stop)
	batch("3", "4")
	for range 3 {
		drain(t, newRelay(t, pool, cfg))
	}
	require.Equal(t, []string{"1", "2", "3", "4"}, values(t, topic))
}

// Property: rows of a paused topic wait in their order and hold back no other rows; when the topic
// is resumed they are published before later rows.
func TestPausedTopicWaits(t *testing.T) {
	t.Parallel()
	pool, topic, other := pgtest.Pool(t), kafkatest.Topic(t, 1), kafkatest.Topic(t, 1)
	var beats atomic.Int64
	running(t, traced(t, pool, before("-- relay.beat", func(context.Context) { beats.Add(1) })), relay.Config{ExactlyOnce: true})
	insert(t, pool, topic, "k", "0")
	testwait.True(t, `len(values(t, topic)) == 1`, func() bool { return len(values(t, topic)) == 1 })
	pauses(t, pool, topic, 0)
	// The relay takes note with its next look; it has done so when it begins another one.
	before := beats.Load()
	testwait.True(t, "the relay looks", func() bool { return beats.Load() >= before+2 })
	for i := range 5 {
		insert(t, pool, topic, fmt.Sprint("k", i%2), fmt.Sprint(i+1))
		insert(t, pool, other, "k", "flows")
	}
	testwait.True(t, `len(values(t, other)) == 5 && dead(t, pool) == 5`, func() bool { return len(values(t, other)) == 5 && dead(t, pool) == 5 })
	require.Equal(t, []string{"0"}, values(t, topic))
	resumes(t, pool, topic, "never-paused")
	insert(t, pool, topic, "k0", "6")
	testwait.True(t, `len(values(t, topic)) == 7 && dead(t, pool) == 0`, func() bool { return len(values(t, topic)) == 7 && dead(t, pool) == 0 })
	require.Equal(t, []string{"1", "3", "5", "6"}, keyed(t, topic, "k0"))
	require.Equal(t, []string{"2", "4"}, keyed(t, topic, "k1"))
	require.Equal(t, []string{"topic.pause", "topic.resume"}, one[[]string](t, pool, `SELECT array_agg(what ORDER BY id) FROM effectonce.operator_actions`))
}

// Property: the rows of a key are published in their order, whenever in their midst its topic is
// paused and resumed.
func TestOrderAcrossPauses(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		if exactly {
			longtest.Only(t, "pauses in real time; the order is the same code")
		}
		pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
		running(t, pool, relay.Config{ExactlyOnce: exactly, Lease: time.Second}) // it takes note of a pause as often as it renews its lease
		end := keepsWriting(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', $2), ($1, 'l', $2)`, topic)
		defer end()
		for range 3 {
			pauses(t, pool, topic, 0)
			testwait.True(t, "rows wait", func() bool { return dead(t, pool) > 10 })
			resumes(t, pool, topic)
			// Rows that are inserted now wait behind them.
			becomes(t, pool, "they are released", `SELECT count(*) = 0 FROM effectonce.outbox_dead WHERE reason = 'paused'`)
		}
		written := end()
		testwait.True(t, "all is published", func() bool { return len(values(t, topic)) >= 2*written && dead(t, pool) == 0 })
		for _, key := range []string{"k", "l"} {
			next := 0
			for _, v := range keyed(t, topic, key) {
				if n, err := strconv.Atoi(v); err != nil || n >= next || exactly { // otherwise it may be published again
					require.Equal(t, fmt.Sprint(next), v)
					next++
				}
			}
			require.Equal(t, written, next)
		}
	})
}

// Property: rows of a key wait behind a dead one however often the relay has looked at it in vain,
// and also from the moment at which it is handed back to that at which it is published: then they
// follow in their order.
func TestRowsBehindADeadOneWait(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	var looks atomic.Int64
	running(t, traced(t, pool, before("-- relay.released", func(context.Context) { looks.Add(1) })), relay.Config{Lease: 30 * time.Second})
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ($1, 'k', '1', '{"n": {}}')`, topic)
	testwait.True(t, "the row is dead", func() bool { return dead(t, pool) == 1 })
	for i := 2; i <= 3; i++ {
		before := looks.Load()
		testwait.True(t, "the relay looks", func() bool { return looks.Load() > before+1 })
		insert(t, pool, topic, "k", fmt.Sprint(i))
		testwait.True(t, "the next row waits", func() bool { return dead(t, pool) == i || len(values(t, topic)) > 0 })
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE effectonce.outbox_dead SET state = 'retry', headers = '{}' WHERE payload = '1'`)
		if err == nil {
			_, err = tx.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', '4')`, topic)
		}
		return err
	}))
	// Not by offsets: the marker of a transaction has one, too.
	testwait.True(t, "all is published", func() bool { return len(values(t, topic)) >= 4 && dead(t, pool) == 0 })
	require.Equal(t, []string{"1", "2", "3", "4"}, values(t, topic))
}

// Property: what becomes of dead rows is decided by who holds the shard: one that lost it while it
// published them, or found that they still cannot be, leaves them as they are. Row O13 of
// guarantees.md.
func TestDeadRowsBelongToTheHolder(t *testing.T) {
	t.Parallel()
	either(t, "before it", "during it", func(t *testing.T, duringIt bool) {
		t.Helper()
		for tag, headers := range map[string]string{"-- relay.remove_dead": `{}`, "-- relay.hold_again": `{"n": {}}`} {
			ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
			insert(t, pool, topic, "k", "1")
			must(t, pool, `UPDATE effectonce.outbox SET headers = '{"n": {}}'`)
			drain(t, newRelay(t, pool, relay.Config{}))
			must(t, pool, `UPDATE effectonce.outbox_dead SET headers = $1, state = 'retry'`, headers)
			row := func() string { return one[string](t, pool, `SELECT d::text FROM effectonce.outbox_dead d`) }
			was, meddles := row(), meddle(t, pool, takenSQL)
			var meddling sync.WaitGroup
			if duringIt { // while it waits for a lock that an operator has
				operator := opened(t, pool, `SELECT FROM effectonce.outbox_dead FOR UPDATE`)
				takes := meddles
				meddles = func(context.Context) {
					meddling.Go(func() {
						for blocked := false; !blocked && pause.For(ctx, time.Millisecond); {
							if err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'traced' AND wait_event_type = 'Lock')`).Scan(&blocked); err != nil {
								t.Error(err)
							}
						}
						takes(ctx)
						if err := operator.Rollback(ctx); err != nil {
							t.Error(err)
						}
					})
				}
			}
			_, _ = newRelay(t, traced(t, pool, before(tag, meddles)), relay.Config{}).Drain(ctx) // it may not have found out
			meddling.Wait()
			require.Equal(t, was, row())
			require.Equal(t, "another", owner(t, pool), "the test's own premise: it was taken")
		}
	})
}

// Property: a discarded row that is handed back after the relay read it is published, in its order.
func TestRowHandedBackAfterItsDiscard(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.UnusedTopic(t)
	for i := range 3 {
		insert(t, pool, topic, "k", fmt.Sprint(i))
	}
	drain(t, newRelay(t, pool, relay.Config{}))
	kafkatest.CreateTopic(t, topic, 1)
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'discard' WHERE state = 'held'`)
	var once sync.Once
	undo := meddle(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE state = 'discard'`)
	drain(t, newRelay(t, traced(t, pool, before("-- relay.remove_dead", func(ctx context.Context) { once.Do(func() { undo(ctx) }) })), relay.Config{}))
	drain(t, newRelay(t, pool, relay.Config{}))
	require.Equal(t, []string{"0", "1", "2"}, values(t, topic))
	require.Zero(t, dead(t, pool))
}

// poisoned lets Kafka refuse records with "poison" in them, and everything that is produced
// together with one.
func poisoned(fake *kfake.Cluster) {
	onProduce(fake, func(records []byte) error {
		if bytes.Contains(records, []byte("poison")) {
			return kerr.InvalidRecord
		}
		return nil
	})
}

// Property: several consecutive records that Kafka refuses only when they are produced hold no
// other rows, when they are read first and when an operator retries them: each is found, and keeps
// the reason.
func TestRefusedSideBySide(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		poisoned(fake)
		starts(t, relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly}))
		flows := func(value string) {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, payload) VALUES ('orders', convert_to($1, 'UTF8'))`, value)
			testwait.True(t, "what is innocent flows", func() bool { return slices.Contains(valuesAt(t, fake, "orders"), value) })
		}
		must(t, pool, `INSERT INTO effectonce.outbox (topic, payload) SELECT 'orders', 'poison' FROM generate_series(1, 4)`)
		flows("1")
		const heldSQL = `SELECT count(*) FROM effectonce.outbox_dead WHERE state = 'held' AND reason = 'refused' AND error LIKE '%INVALID_RECORD%' AND attempts = $1`
		held := func(attempts int) bool {
			return pgtest.Count(t, pool, strings.ReplaceAll(heldSQL, "$1", fmt.Sprint(attempts))) == 4
		}
		becomes(t, pool, "they are held", `SELECT count(*) = 4 FROM effectonce.outbox_dead WHERE state = 'held'`)
		attempts := one[int](t, pool, `SELECT max(attempts) FROM effectonce.outbox_dead`)
		require.True(t, held(attempts))
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry'`)
		testwait.True(t, "they are held again", func() bool { return held(attempts + 1) })
		flows("2")
	})
}

// Property: while dead rows cannot be polled, the relay logs that, and other rows flow without an
// interruption; afterwards dead rows leave as before.
func TestFailedPollOfDeadRowsStopsNothing(t *testing.T) {
	t.Parallel()
	pool, topic, missing, said := pgtest.Pool(t), kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t), &lockedBuffer{}
	insert(t, pool, missing, "k", "dead")
	drain(t, newRelay(t, pool, relay.Config{}))
	var interrupted atomic.Int64
	starts(t, newRelay(t, pool, relay.Config{Logger: slog.New(slog.NewTextHandler(said, nil)), Hooks: relay.Hooks{Interrupted: func(error) { interrupted.Add(1) }}}))
	insert(t, pool, topic, "k", "1")
	testwait.True(t, "it runs", func() bool { return len(values(t, topic)) == 1 })
	must(t, pool, `ALTER TABLE effectonce.outbox_dead RENAME TO gone`)
	testwait.True(t, "a poll fails", func() bool { return strings.Contains(said.String(), "could not be polled") })
	insert(t, pool, topic, "k", "2")
	testwait.True(t, "other rows flow", func() bool { return len(values(t, topic)) == 2 })
	require.Zero(t, interrupted.Load())
	must(t, pool, `ALTER TABLE effectonce.gone RENAME TO outbox_dead`)
	kafkatest.CreateTopic(t, missing, 1)
	testwait.True(t, "it leaves", func() bool { return dead(t, pool) == 0 })
}

// Property: a dead row holds only later rows of its key, also where it is known to be dead before an
// earlier row of its page is answered, because another row of the page was refused.
func TestDeadRowHoldsNoEarlierRow(t *testing.T) {
	t.Parallel()
	test := func(t *testing.T, pool *pgxpool.Pool, r *relay.Relay) {
		t.Helper()
		insert(t, pool, "orders", "other", "poison")
		insert(t, pool, "orders", "k", "before")
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', 'k', 'wrong', '{"effectonce-partition": "two"}')`)
		insert(t, pool, "orders", "k", "behind")
		starts(t, r)
		becomes(t, pool, "the page is handled", `SELECT count(*) = 2 FROM effectonce.outbox_dead WHERE reason IN ('refused', 'bad_partition')`)
		require.Equal(t, "poison refused, wrong bad_partition, behind behind",
			one[string](t, pool, `SELECT string_agg(convert_from(payload, 'UTF8') || ' ' || reason, ', ' ORDER BY seq) FROM effectonce.outbox_dead`))
	}
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		poisoned(fake)
		test(t, pool, relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly}))
	})
	t.Run("sink", func(t *testing.T) {
		t.Parallel()
		pool, sink := pgtest.Pool(t), &receiver{answer: rowByRow(func(payload string) error {
			if payload == "poison" {
				return relay.Refuse(errors.New("poison"))
			}
			return nil
		})}
		test(t, pool, newSinkRelay(t, pool, sink, relay.Config{}))
	})
}

// Property: every row that is published is counted, also where its page has a dead row and progress
// is stored all the time.
func TestRowsBesideDeadOnesAreCounted(t *testing.T) {
	t.Parallel()
	pool, topic, missing := pgtest.Pool(t), kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
	must(t, pool, `INSERT INTO effectonce.outbox (topic) SELECT CASE WHEN i % 3 = 1 THEN $1 ELSE $2 END FROM generate_series(1, 300) AS i`, missing, topic)
	require.EqualValues(t, 200, drain(t, newRelay(t, pool, relay.Config{PageRowsMax: 3, ProgressEvery: time.Millisecond})))
	require.Equal(t, 200, one[int](t, pool, `SELECT published FROM effectonce.outbox_progress_now`))
}

// Property: rows that are refused again, however many, do not keep those behind them waiting.
func TestRowsRefusedAgainHoldNobodyUp(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	first := true
	sink := &receiver{answer: rowByRow(func(payload string) error {
		if first || payload == "bad" {
			return relay.Refuse(errors.New("no"))
		}
		return nil
	})}
	must(t, pool, `INSERT INTO effectonce.outbox (topic, payload) VALUES ('a', 'bad'), ('a', 'bad'), ('a', 'bad'), ('a', 'good')`)
	cfg := relay.Config{PageRowsMax: 1}
	drain(t, newSinkRelay(t, pool, sink, cfg))
	require.Equal(t, 4, dead(t, pool))
	first = false
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry'`)
	drain(t, newSinkRelay(t, pool, sink, cfg))
	require.Equal(t, []string{"good"}, sink.all())
	require.Equal(t, 3, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE state = 'held'`))
}

// Property: rows of a topic that was resumed, however many wait, do not stop other topics until
// they are published. Later rows of the same keys are published behind them, and all of it ends.
func TestResumedTopicDoesNotStopOthers(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		const waiting = 1500
		pool, topic, other := pgtest.Pool(t), kafkatest.Topic(t, 1), kafkatest.Topic(t, 1)
		many := func(first, last int) {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
				SELECT $1, convert_to('k' || i % 10, 'UTF8'), convert_to(i::text, 'UTF8') FROM generate_series($2::int, $3::int) AS i`, topic, first, last)
		}
		// Rounds of few rows make the backlog last.
		var late atomic.Bool
		var behind atomic.Int64 // when the other topic's row was delivered
		behind.Store(-1)
		tracer := before("-- relay.releasable", func(ctx context.Context) {
			meddle(t, pool, `SELECT pg_sleep(0.05)`)(context.WithoutCancel(ctx)) // a slow database: the rounds take their time
			if late.CompareAndSwap(false, true) {
				meddle(t, pool, fmt.Sprintf(`INSERT INTO effectonce.outbox (topic, payload) VALUES ('%s', 'now')`, other))(context.WithoutCancel(ctx))
			}
		})
		cfg := relay.Config{ExactlyOnce: exactly, PageRowsMax: 100}
		cfg.Hooks.Delivered = func(of string, _ []time.Time) {
			var left int64
			if of != other {
				return
			}
			if err := pool.QueryRow(context.WithoutCancel(t.Context()), `SELECT count(*) FROM effectonce.outbox_dead`).Scan(&left); err != nil {
				t.Error(err)
			}
			behind.Store(left)
		}
		r := newRelay(t, pool, cfg)
		drain(t, r)
		pauses(t, pool, topic, 0)
		many(1, waiting)
		drain(t, r)
		require.Equal(t, waiting, dead(t, pool))
		resumes(t, pool, topic)
		many(waiting+1, waiting+300)
		running(t, traced(t, pool, tracer), cfg)
		testwait.True(t, "the other topic goes on", func() bool { return behind.Load() >= 0 })
		require.Positive(t, behind.Load(), "it came when all others were out")
		testwait.True(t, "all is out", func() bool { return dead(t, pool) == 0 && kafkatest.Count(t, topic) >= waiting+300 })
		last := map[string]int{}
		for _, record := range kafkatest.ReadAll(t, topic) {
			n, err := strconv.Atoi(string(record.Value))
			require.NoError(t, err)
			require.Greater(t, n, last[string(record.Key)])
			last[string(record.Key)] = n
		}
	})
}

// Property: a replica that freezes while it moves rows to outbox_dead blocks its shard, and the
// shards of others, for no longer than its lease. Row O13 of guarantees.md.
func TestFrozenBurialLocksNobodyOut(t *testing.T) {
	t.Parallel()
	pool, topic, missing := pgtest.Pool(t), kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
	// It freezes right before the COMMIT of a burial: from then on it sends nothing.
	var buries, froze atomic.Bool
	frozen, thawed := make(chan struct{}), make(chan struct{})
	freezing := &tracer{start: func(ctx context.Context, sql string) context.Context {
		switch {
		case strings.HasPrefix(sql, "-- relay.move_to_dead"):
			buries.Store(true)
		case froze.Load():
			<-thawed
		case strings.EqualFold(sql, "commit") && buries.Load() && froze.CompareAndSwap(false, true):
			close(frozen)
			<-thawed
		}
		return ctx
	}}
	thaw := sync.OnceFunc(func() { close(thawed) })
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', '1')`, missing)
	const lease = 8 * time.Second
	first := newRelay(t, traced(t, pool, freezing), relay.Config{Lease: lease})
	t.Cleanup(thaw)
	done := drains(t, first)
	select {
	case <-frozen:
	case err := <-done:
		require.Fail(t, "it does not come to the burial", "%v", err)
	}
	must(t, pool, `UPDATE effectonce.outbox_replicas SET alive_until = clock_timestamp()`)
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'l', '2')`, topic)
	running(t, pool, relay.Config{Lease: lease})
	testwait.True(t, "another replica publishes", func() bool { return kafkatest.Count(t, topic) >= 1 && dead(t, pool) == 1 })
	thaw()
	require.Error(t, <-done)
	require.Equal(t, 1, dead(t, pool))
}

// Property: a row that an operator discarded is not published when progress goes back behind it: in
// another cluster, and where the number of shards changes. It is remembered for as long as the outbox has
// it. Row O22 of guarantees.md.
func TestDiscardedRowIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	goesBack := map[string]func(*testing.T, *pgxpool.Pool){
		"another cluster": func(t *testing.T, pool *pgxpool.Pool) {
			t.Helper()
			must(t, pool, `UPDATE effectonce.outbox_progress SET system_identifier = system_identifier - 1`)
		},
		"other shards": func(t *testing.T, pool *pgxpool.Pool) {
			t.Helper()
			_, err := relay.SetShards(t.Context(), pool, ana, 3)
			require.NoError(t, err)
		},
	}
	each(t, goesBack, func(t *testing.T, back func(*testing.T, *pgxpool.Pool)) {
		t.Helper()
		pool, topic := pgtest.Pool(t), kafkatest.UnusedTopic(t)
		bystander := pgtest.Connect(t, pool.Config().ConnString())
		pgtest.Exec(t, bystander, `BEGIN; SELECT pg_current_xact_id()`) // keeps the floor down
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', 'discarded'), ($1, NULL, 'discarded'), ($1, NULL, 'waits'), ($1, 'l', 'waits'), ($1, 'k', 'behind')`, topic)
		drain(t, newRelay(t, pool, relay.Config{}))
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'discard' WHERE payload = 'discarded'`)
		drain(t, newRelay(t, pool, relay.Config{}))
		require.Equal(t, []int{3, 5}, one[[]int](t, pool, `SELECT ARRAY[count(*) FILTER (WHERE state <> 'discarded'), count(*)] FROM effectonce.outbox_dead`))
		back(t, pool)
		kafkatest.CreateTopic(t, topic, 1)
		drain(t, newRelay(t, pool, relay.Config{}))
		require.Subset(t, []string{"waits", "behind"}, values(t, topic)) // more than once: they left before progress came by
		require.Zero(t, dead(t, pool))
		pgtest.Exec(t, bystander, `COMMIT`)
		starts(t, newRelay(t, pool, relay.Config{Keep: 100 * time.Millisecond}))
		becomes(t, pool, "it is forgotten", `SELECT NOT EXISTS (SELECT FROM effectonce.outbox) AND NOT EXISTS (SELECT FROM effectonce.outbox_dead)`)
	})
}
