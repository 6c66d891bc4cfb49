package relay_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: progress of a transaction that was never committed is no progress: its rows are published, and
// those that Kafka cannot take when it can, once. Until the commit these are not among the dead, where an
// operator could decide about what is read again. Rows O12, O30 of guarantees.md.
func TestProgressOfAnAbortedTransactionDoesNotCount(t *testing.T) {
	t.Parallel()
	either(t, "aborted", "open, as behind a relay that was killed", func(t *testing.T, open bool) {
		t.Helper()
		ctx, pool, fake := t.Context(), pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		var early atomic.Int64
		var repaired atomic.Bool
		fake.ControlKey(int16(kmsg.EndTxn), func(request kmsg.Request) (kmsg.Response, error, bool) {
			if repaired.Load() {
				return nil, nil, false
			}
			if open {
				fake.KeepControl()
			}
			var n int64
			if err := pool.QueryRow(ctx, `SELECT count(*) FROM effectonce.outbox_dead`).Scan(&n); err != nil {
				t.Error(err)
			}
			early.Add(n)
			response := request.ResponseKind().(*kmsg.EndTxnResponse)
			response.ErrorCode = kerr.ProducerFenced.Code
			return response, nil, true
		})
		must(t, pool, mixedSQL)
		r := relayAt(t, pool, fake, relay.Config{ExactlyOnce: true})
		_, err := r.Drain(ctx)
		require.ErrorIs(t, err, kerr.ProducerFenced)
		repaired.Store(true)
		require.NoError(t, fake.CreateTopic("missing", 1, nil))
		drain(t, r)
		drain(t, r)
		require.Equal(t, []string{"1", "4", "6"}, valuesAt(t, fake, "orders"))
		require.Equal(t, []string{"2", "3", "5"}, valuesAt(t, fake, "missing"))
		require.Zero(t, dead(t, pool))
		require.Zero(t, early.Load(), "dead rows before the commit")
	})
}

// read says that a client was handed what it asked to read.
type read chan struct{}

func (r read) OnBrokerRead(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if key != int16(kmsg.Fetch) || err != nil {
		return
	}
	select {
	case r <- struct{}{}:
	default:
	}
}

// Property: a relay that takes over reads progress to its end: where a transaction of another shard
// is open in front of it, it waits for that, and publishes nothing again. Row O30 of guarantees.md.
func TestProgressBehindAnOpenTransactionIsWaitedFor(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	cfg := relay.Config{ExactlyOnce: true, ProgressTopic: kafkatest.UnusedTopic(t), Lease: time.Minute} // who loses it would wait, too
	first := newRelay(t, pool, cfg)
	stop := starts(t, first)
	published := func(n int) {
		t.Helper()
		testwait.True(t, "rows are published", func() bool { return published(t, pool) == n })
	}
	insert(t, pool, topic, "k", "1")
	published(1)
	must(t, pool, `CREATE TABLE before AS SELECT * FROM effectonce.outbox_progress_now`)

	other := kafkatest.Client(t, kgo.TransactionalID(topic))
	require.NoError(t, other.BeginTransaction())
	require.NoError(t, other.ProduceSync(ctx, &kgo.Record{Topic: cfg.ProgressTopic, Key: []byte("another shard"), Value: []byte("{}")}).FirstErr())
	insert(t, pool, topic, "k", "2")
	published(2)
	stop()
	// As behind a kill right after the commit: the copy in the database is behind.
	must(t, pool, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published, journal_offset)
		SELECT b.relay, b.shard, w.advance + 1, b.progress_epoch, b.tick, b.next_tick, b.seq, b.floor, b.published, b.journal_offset FROM before b, effectonce.outbox_progress_now w`)

	reads, ended := make(read, 1), make(chan error, 1)
	second := newRelay(t, pool, cfg, kgo.WithHooks(reads))
	go func() {
		_, err := second.Drain(ctx)
		ended <- err
	}()
	select {
	case <-reads:
		require.NoError(t, other.EndTransaction(ctx, kgo.TryCommit))
		require.NoError(t, <-ended)
	case err := <-ended:
		require.NoError(t, err)
		require.NoError(t, other.EndTransaction(ctx, kgo.TryCommit))
	}
	require.Equal(t, []string{"1", "2"}, values(t, topic), "INVARIANT: nothing twice")
	require.Equal(t, 2, one[int](t, pool, `SELECT published FROM effectonce.outbox_progress_now`))
}

// Property: a relay that was led back to an old primary publishes nothing, and ends with that error: where this
// process has worked on a later timeline, where the database knows one, and with exactly once where any process
// has worked on one. Row O26 of guarantees.md.
func TestOldPrimaryIsKnownFromElsewhere(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	cfg := relay.Config{ExactlyOnce: true, ProgressTopic: kafkatest.UnusedTopic(t)}
	r := newRelay(t, pool, cfg)
	insert(t, pool, topic, "k", "1")
	drain(t, r)
	insert(t, pool, topic, "k", "2")
	require.NoError(t, r.HasSeen(ctx, 1))
	_, err := r.Drain(ctx)
	require.ErrorIs(t, err, relay.ErrOldPrimary)

	entries := kafkatest.ReadAll(t, cfg.ProgressTopic)
	last := entries[len(entries)-1]
	timeline := one[int](t, pool, `SELECT timeline FROM effectonce.outbox_progress`)
	later := strings.Replace(string(last.Value), fmt.Sprintf(`"timeline":%d,`, timeline), fmt.Sprintf(`"timeline":%d,`, timeline+1), 1)
	require.NotEqual(t, string(last.Value), later, "the test's own premise")
	require.NoError(t, kafkatest.Client(t).ProduceSync(ctx, &kgo.Record{Topic: cfg.ProgressTopic, Key: last.Key, Value: []byte(later)}).FirstErr())
	limited, cancel := context.WithTimeout(ctx, testwait.Bound)
	defer cancel()
	require.ErrorIs(t, newRelay(t, pool, cfg).Run(limited), relay.ErrOldPrimary)
	must(t, pool, `UPDATE effectonce.outbox_progress SET timeline = timeline + 1`)
	require.ErrorIs(t, newRelay(t, pool, relay.Config{}).Run(limited), relay.ErrOldPrimary)
	require.Equal(t, []string{"1"}, values(t, topic))
}

// Property: behind a promotion that lost nothing, nothing is published again, however old the oldest
// open transaction is and whatever created_at says, and what an operator discarded stays so. Row O23 of
// guarantees.md.
func TestPromotionThatLosesNothingRepeatsNothing(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic, missing := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
		bystander := pgtest.Connect(t, pool.Config().ConnString())
		pgtest.Exec(t, bystander, `BEGIN; SELECT pg_current_xact_id()`)
		cfg := relay.Config{ExactlyOnce: exactly, ProgressTopic: kafkatest.UnusedTopic(t)}
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, created_at) SELECT $1, 'k', 'v', clock_timestamp() + CASE n WHEN 10 THEN interval '1 day' ELSE '0' END FROM generate_series(1, 500) n`, topic)
		insert(t, pool, missing, "k", "discarded")
		drain(t, newRelay(t, pool, cfg))
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'discard' WHERE state = 'held'`)
		must(t, pool, `UPDATE effectonce.outbox_progress SET timeline = timeline - 1`)
		insert(t, pool, topic, "k", "last")
		_, err := newRelay(t, pool, cfg).Drain(ctx)
		require.NoError(t, err)
		require.Len(t, values(t, topic), 501)
		require.Zero(t, dead(t, pool))
		require.NotZero(t, one[int](t, pool, `SELECT timeline FROM effectonce.outbox_progress`), "the present one")
	})
}

// Property: progress in Kafka counts only where the database has its ticks, by their tokens: a server
// that lost them may have given their numbers, with equal snapshots, to others over other rows. Row O23
// of guarantees.md.
func TestTicksOfLostProgressAreNotTakenForOthers(t *testing.T) {
	t.Parallel()
	either(t, "not copied", "lost", func(t *testing.T, lost bool) {
		t.Helper()
		pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
		r := newRelay(t, pool, relay.Config{ExactlyOnce: true, ProgressTopic: kafkatest.UnusedTopic(t)})
		insert(t, pool, topic, "k", "1")
		drain(t, r)
		must(t, pool, `CREATE TABLE before AS SELECT max(n) AS n, max(tick) AS tick FROM effectonce.outbox_advances`)
		insert(t, pool, topic, "k", "2")
		drain(t, r)
		must(t, pool, `DELETE FROM effectonce.outbox_advances a USING before b WHERE a.n > b.n`)
		want := []string{"1", "2"}
		if lost {
			must(t, pool, `UPDATE effectonce.outbox_ticks t SET token = gen_random_uuid() FROM before b WHERE t.tick > b.tick`)
			want = append(want, "2")
		}
		drain(t, r)
		require.Equal(t, want, values(t, topic))
	})
}

// Property: what a connection to another server shows is not published, and no progress is made by
// it. Rows O24, O25 of guarantees.md.
func TestWhatAnotherServerShowsIsNotRead(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{})
	drain(t, r)
	insert(t, pool, topic, "k", "1")
	require.ErrorIs(t, r.FetchesElsewhere(t.Context()), relay.ErrAnotherRun)
	require.ErrorIs(t, r.StoresElsewhere(t.Context()), relay.ErrAnotherRun)
	require.EqualValues(t, 1, drain(t, r))
}

// Property: a broker that has the progress record of a transaction and does not answer does not
// keep a relay from stopping.
func TestStopWhileProgressIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders", "progress"))
	hanging, _ := silent(t, fake, "progress")
	r := relayAt(t, pool, fake, relay.Config{ExactlyOnce: true, ProgressTopic: "progress", DrainMax: time.Second})
	stop := starts(t, r)
	insert(t, pool, "orders", "k", "1")
	<-hanging
	stop() // without the broker's answer
}

// Property: a write of progress that commits after a page's snapshot, and before the page arrives,
// says nothing about that snapshot: a row whose transaction runs beyond the snapshot's xmax, with a
// number that the write knows, is still published. Row O2 of guarantees.md.
func TestProgressOfLaterThanTheSnapshotDoesNotCount(t *testing.T) {
	t.Parallel()
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	_, pool := ownCluster(t, nil)

	const rows = 20 // more than those after which a poll begins with a probe of the snapshot
	stored, arrived, read, changed := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	write, release := sync.OnceFunc(func() { close(stored) }), sync.OnceFunc(func() { close(arrived) })
	defer write()
	defer release()
	const (
		idle int32 = iota
		armed
		first  // the page that shows the rows, with a number of the sequence above them
		second // the page after it
		done
	)
	var step atomic.Int32
	var open pgx.Tx
	var failed error
	overtaken := &tracer{start: func(ctx context.Context, sql string) context.Context {
		switch fetches := strings.HasPrefix(sql, "-- relay.fetch\n"); {
		case fetches && step.CompareAndSwap(armed, first):
			<-changed // what ended later would be in the page's snapshot
			meddle(t, pool, fmt.Sprintf(`INSERT INTO effectonce.outbox (topic, payload) SELECT '%s', 'early' FROM generate_series(1, %d)`, topic, rows))(ctx)
			if open, failed = pool.Begin(context.WithoutCancel(ctx)); failed == nil {
				_, failed = open.Exec(ctx, `INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, 'late')`, topic)
			}
		case fetches:
			step.CompareAndSwap(first, second)
		case step.Load() >= first && (strings.HasPrefix(sql, "-- relay.store_tick\n") || strings.HasPrefix(sql, "-- relay.advance\n")):
			<-stored
		}
		return ctx
	}, batchEnd: func() {
		if step.CompareAndSwap(second, done) {
			close(read)
			<-arrived
		}
	}}
	var published atomic.Int64
	r := newRelay(t, traced(t, pool, overtaken), relay.Config{
		Lease: 10 * time.Minute, PollMax: 20 * time.Millisecond, // no renewal ends meanwhile
		Hooks: relay.Hooks{Published: func(n int64) { published.Add(n) }},
	})
	stop := starts(t, r)
	testwait.True(t, "the relay runs", func() bool { return owner(t, pool) != "" })
	insert(t, pool, topic, "k", "first")
	testwait.True(t, "a row is published", func() bool { return published.Load() == 1 })

	step.Store(armed)
	must(t, pool, `SELECT pg_current_xact_id()`) // something new for the probe of the snapshot
	close(changed)
	testwait.Chan(t, "a page is read", read)
	require.NoError(t, failed)
	defer func() { _ = open.Rollback(context.WithoutCancel(ctx)) }()
	beyond := one[bool](t, open, `SELECT pg_snapshot_xmax(pg_current_snapshot()) = pg_current_xact_id()`)
	require.True(t, beyond, "the premise: nothing ended after the transaction began, so that the page's snapshot does not know it")
	write()
	testwait.True(t, "progress is stored", func() bool { return published.Load() == 1+rows })
	require.NoError(t, open.Commit(ctx)) // before the next page's snapshot, which would list it as open
	release()
	insert(t, pool, topic, "k", "last")
	testwait.True(t, "the last row is published", func() bool {
		all := values(t, topic)
		return len(all) > 0 && all[len(all)-1] == "last"
	})
	require.Contains(t, values(t, topic), "late")
	stop()
}

// Property: the tick to which a relay's progress refers is kept, however old it is: a relay that
// comes back after a long time publishes what was inserted meanwhile, and nothing else.
func TestTickOfProgressIsKept(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	must(t, pool, `INSERT INTO effectonce.outbox_ticks (snapshot, seq_last) VALUES ('10:10:', 0)`)
	insert(t, pool, topic, "k", "1")
	away := newRelay(t, pool, relay.Config{Name: "away"})
	require.EqualValues(t, 1, drain(t, away))
	require.EqualValues(t, 1, drain(t, newRelay(t, pool, relay.Config{})))
	must(t, pool, `UPDATE effectonce.outbox_ticks SET created_at = clock_timestamp() - interval '1 day'`)

	running(t, pool, relay.Config{Lease: 30 * time.Second})
	becomes(t, pool, "older ticks are removed", `SELECT count(*) = 0 FROM effectonce.outbox_ticks WHERE snapshot::text = '10:10:'`)
	require.Equal(t, 1, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_progress_now JOIN effectonce.outbox_ticks USING (tick) WHERE relay = 'away'`))
	insert(t, pool, topic, "k", "2")
	require.EqualValues(t, 1, drain(t, away))
}

// Property: a tick is durable before progress refers to it, whatever synchronous_commit the role or
// the database has: after a crash, transaction ids that the tick has seen could be assigned again.
func TestTicksAreDurable(t *testing.T) {
	t.Parallel()
	for setting, want := range map[string]string{"off": "on", "local": "local", "remote_apply": "remote_apply"} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			owner, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
			must(t, owner, `CREATE TABLE saw (setting text);
				CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO saw VALUES (current_setting('synchronous_commit')); RETURN NULL; END$$;
				CREATE TRIGGER look AFTER INSERT ON effectonce.outbox_ticks FOR EACH ROW EXECUTE FUNCTION look()`)
			config := owner.Config()
			config.ConnConfig.RuntimeParams["synchronous_commit"] = setting
			r := newRelay(t, pgtest.PoolOf(t, config), relay.Config{})
			for range 3 {
				insert(t, owner, topic, "k", "v")
				require.EqualValues(t, 1, drain(t, r))
			}
			require.Positive(t, one[int](t, owner, `SELECT count(*) FROM saw`))
			require.Zero(t, one[int](t, owner, `SELECT count(*) FROM saw WHERE setting <> '`+want+`'`))
		})
	}
}
