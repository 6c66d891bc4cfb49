package relay_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: between runs of a relay the number of its shards changes, with rows that wait,
// transactions that are open across the change, and dead rows: nothing is lost, and the rows of a
// key stay in order. Row O5 of guarantees.md.
func TestNumberOfShardsChangesBetweenRuns(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(3, "orders"))
		const keys = 12
		want := map[string][]string{}
		write := func(what string) {
			for k := range keys {
				key := fmt.Sprint("k", k)
				insert(t, pool, "orders", key, what+key)
				want[key] = append(want[key], what+key)
				insert(t, pool, "missing", key, what+key)
			}
		}
		var open pgx.Tx
		begin := func(key string) {
			open = opened(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', $1, $1)`, []byte(key))
			want[key] = append(want[key], key)
		}
		published := func() {
			t.Helper()
			_, err := relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly}).Drain(t.Context())
			require.NoError(t, err)
		}
		change := func(from, to int16) {
			t.Helper()
			before, err := relay.SetShards(t.Context(), pool, ana, to)
			require.NoError(t, err)
			require.Equal(t, from, before)
			require.Equal(t, []int16{to, to}, one[[]int16](t, pool, `SELECT ARRAY[count(*)::int2, max(shards)] FROM effectonce.outbox_progress_now`))
		}
		write("first ")
		published()
		begin("open across the first")
		write("waits ")
		change(1, 4)
		require.NoError(t, open.Commit(t.Context()))
		published()
		begin("open across the second")
		write("second ")
		published() // the shards' floors stay behind
		write("third ")
		// Two of the shards get ahead.
		must(t, pool, `UPDATE effectonce.outbox_progress SET owner = 'another', lease_until = 'infinity' WHERE shard > 1`)
		_, err := relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly}).Drain(t.Context())
		require.ErrorIs(t, err, relay.ErrLeaseHeld)
		must(t, pool, `UPDATE effectonce.outbox_progress SET owner = NULL, lease_until = NULL`)
		change(4, 2)
		published()
		require.NoError(t, open.Commit(t.Context()))
		write("last ")
		published()
		for key, values := range want {
			require.Equal(t, values, distinctInOrder(keyedAt(t, fake, "orders", key)), key)
		}
		require.Equal(t, 5*keys, dead(t, pool), "each dead row once")
		createAt(t, fake, "missing")
		testwait.True(t, "dead rows are published", func() bool { published(); return dead(t, pool) == 0 })
		for k := range keys {
			key := fmt.Sprint("k", k)
			require.Equal(t, []string{"first " + key, "waits " + key, "second " + key, "third " + key, "last " + key}, distinctInOrder(keyedAt(t, fake, "missing", key)), key)
		}
		require.Equal(t, "[1,4] [4,2]", one[string](t, pool,
			`SELECT string_agg('[' || (subject->>'before') || ',' || (subject->>'shards') || ']', ' ' ORDER BY seq) FROM (SELECT *, row_number() OVER (ORDER BY "when") AS seq FROM effectonce.operator_actions WHERE what = 'relay.shards') a`))
	})
}

// Property: while a replica runs, or a lease is not over, the number of shards does not change, and
// the error names who runs. Bad arguments are refused.
func TestShardsOfARunningRelayAreRefused(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	stop := running(t, pool, relay.Config{Owner: "first", Shards: 2})
	becomes(t, pool, "the shards are taken", `SELECT count(*) = 2 FROM effectonce.outbox_progress_now WHERE owner IS NOT NULL`)
	_, err := relay.SetShards(ctx, pool, ana, 3)
	require.ErrorIs(t, err, relay.ErrRelayRuns)
	require.ErrorContains(t, err, "stop the relays first (first)")
	stop()
	must(t, pool, `UPDATE effectonce.outbox_progress SET owner = 'killed', lease_until = clock_timestamp() + interval '1 hour' WHERE shard = 1`)
	_, err = relay.SetShards(ctx, pool, ana, 3)
	require.ErrorContains(t, err, "stop the relays first (killed)")
	require.Equal(t, []int{2, 2, 0}, one[[]int](t, pool, `SELECT ARRAY[(SELECT shards FROM effectonce.outbox_relays), (SELECT count(*) FROM effectonce.outbox_progress),
		(SELECT count(*) FROM effectonce.operator_actions)]`))
	must(t, pool, `UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp()`)
	before, err := relay.SetShards(ctx, pool, ana, 3)
	require.NoError(t, err)
	require.EqualValues(t, 2, before)
	before, err = relay.SetShards(ctx, pool, ana, 3)
	require.NoError(t, err)
	require.EqualValues(t, 3, before)
	_, err = relay.SetShards(ctx, pool, relay.Operator{Relay: "never", Who: "ana", Why: "test"}, 1)
	require.ErrorIs(t, err, relay.ErrUnknownRelay)
	_, err = relay.SetShards(ctx, pool, ana, 257)
	require.ErrorContains(t, err, "want 1 to 256")
}

// Property: a replica that was frozen while the number of shards changed, and still counts on its
// lease, stores neither progress nor dead rows, and continues with the new shards. Rows O5, O13 of
// guarantees.md.
func TestHolderOfBeforeTheChangeStoresNothing(t *testing.T) {
	t.Parallel()
	statements := map[string]string{"progress": "-- relay.advance", "dead rows": "-- relay.move_to_dead"}
	eachBoth(t, statements, func(t *testing.T, statement string, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		var once sync.Once
		var epoch atomic.Int64
		change := func(ctx context.Context) {
			once.Do(func() {
				meddle(t, pool, `UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp() - interval '1 second'; UPDATE effectonce.outbox_replicas SET alive_until = clock_timestamp()`)(ctx)
				_, err := relay.SetShards(ctx, pool, ana, 3)
				if err != nil {
					t.Error(err)
				}
				var begun int64
				if err := pool.QueryRow(ctx, `SELECT max(epoch) FROM effectonce.outbox_progress`).Scan(&begun); err != nil {
					t.Error(err)
				}
				epoch.Store(begun)
			})
		}
		for i := range 20 {
			insert(t, pool, "orders", fmt.Sprint("k", i%5), fmt.Sprint(i))
		}
		insert(t, pool, "missing", "k", "dead")
		runAt(t, traced(t, pool, before(statement, change)), fake, relay.Config{ExactlyOnce: exactly, Lease: 30 * time.Second})
		testwait.True(t, "all is published", func() bool {
			return len(distinctInOrder(valuesAt(t, fake, "orders"))) == 20 && dead(t, pool) == 1 &&
				one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_progress_now WHERE owner IS NOT NULL`) == 3
		})
		require.Greater(t, one[int64](t, pool, `SELECT min(epoch) FROM effectonce.outbox_progress_now`), epoch.Load()-1)
		require.Zero(t, one[int](t, pool, fmt.Sprint(`SELECT count(*) FROM effectonce.outbox_advances WHERE epoch BETWEEN 0 AND `, epoch.Load()-1)), "chains of before")
		for k := range 5 {
			require.Equal(t, []string{fmt.Sprint(k), fmt.Sprint(k + 5), fmt.Sprint(k + 10), fmt.Sprint(k + 15)}, distinctInOrder(keyedAt(t, fake, "orders", fmt.Sprint("k", k))))
		}
	})
}

// Property: new shards begin with the lowest floor and without a tick, with a later epoch than any of
// the old ones and with what all of them published. Rows O5, O13, O22 of guarantees.md.
func TestNewShardsBeginAtTheLowestFloor(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	must(t, pool, `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 3);
		INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) OVERRIDING SYSTEM VALUE VALUES (1, '10:20:15', 8), (2, '10:12:10', 7), (3, '12:30:', 9);
		INSERT INTO effectonce.outbox_progress (relay, shard, shards, epoch, system_identifier, timeline) VALUES ('default', 0, 3, 7, 1, 1), ('default', 1, 3, 107, 1, 1), ('default', 2, 3, 7, 1, 1);
		INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published) VALUES
			('default', 0, 3, 7, 1, 3, 8, 5, 100), ('default', 1, 2, 107, 2, 3, 9, 6, 10), ('default', 2, 9, 7, 3, NULL, 0, 4, 1)`)
	change := func(shards int16, want []int64) {
		t.Helper()
		_, err := relay.SetShards(t.Context(), pool, ana, shards)
		require.NoError(t, err)
		require.Equal(t, want, one[[]int64](t, pool, `SELECT ARRAY[tick, coalesce(next_tick, -1), seq, floor, epoch, published] FROM effectonce.outbox_progress_now WHERE shard = 0`))
	}
	change(1, []int64{0, -1, 0, 4, 108, 111})
	change(2, []int64{0, -1, 0, 4, 109, 111})
	require.Equal(t, []int64{0, 4, 109, 0}, one[[]int64](t, pool, `SELECT ARRAY[tick, floor, epoch, published] FROM effectonce.outbox_progress_now WHERE shard = 1`))
	must(t, pool, `DELETE FROM effectonce.outbox_progress WHERE shard = 1`)
	change(3, []int64{0, -1, 0, 0, 110, 111}) // a shard that never began
}

// Property: a shard that is dropped by a change of the number of shards is not taken by a replica
// that acquires it at the same time: that replica would begin the outbox anew. Row O5 of
// guarantees.md.
func TestShardThatGoesAwayIsNotTaken(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	drain(t, newRelay(t, pool, relay.Config{Shards: 3}))
	other := newRelay(t, pool, relay.Config{Owner: "other", Lease: 30 * time.Second})
	taken, asked := make(chan bool, 1), make(chan error, 1)
	changing := traced(t, pool, before("-- relay.drop_shards", func(ctx context.Context) {
		go func() {
			took, err := other.Acquires(context.WithoutCancel(ctx), 2)
			taken <- took
			asked <- err
		}()
		for waits := false; !waits; {
			err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity
				WHERE datname = current_database() AND query LIKE '-- relay.acquire%' AND wait_event_type = 'Lock')`).Scan(&waits)
			if err != nil {
				t.Errorf("the other one does not wait: %v", err)
				return
			}
		}
	}))
	_, err := relay.SetShards(ctx, changing, ana, 1)
	require.NoError(t, err)
	require.NoError(t, testwait.Chan(t, "the other one is refused", asked))
	require.False(t, <-taken)
	require.Equal(t, []int16{0}, one[[]int16](t, pool, `SELECT array_agg(shard) FROM effectonce.outbox_progress_now`))
}

// Property: replicas divide the shards evenly, whichever replicas join and leave. The shards of a
// stopped replica move at once, long before its leases would have expired. Row O5 of guarantees.md.
func TestReplicasShareShards(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 3)
	const lease = 2 * testwait.Bound
	replica := func(owner string) (stop func()) {
		return running(t, pool, relay.Config{Owner: owner, Shards: 4, Lease: lease})
	}
	first := replica("a")
	shares(t, pool, "a 4")
	second, third := replica("b"), replica("c")
	shares(t, pool, "a 2, b 1, c 1")
	first()
	shares(t, pool, "b 2, c 2")
	for i := range 40 {
		insert(t, pool, topic, fmt.Sprint("k", i%8), fmt.Sprint(i))
	}
	testwait.True(t, "all is published", func() bool { return kafkatest.Count(t, topic) >= 40 })
	for _, stop := range []func(){second, third} {
		stop()
	}
	require.Equal(t, 40, kafkatest.Count(t, topic), "nothing twice")
	for k := range 8 {
		for i, v := range keyed(t, topic, fmt.Sprint("k", k)) {
			require.Equal(t, fmt.Sprint(k+8*i), v)
		}
	}
}

// Property: a program that publishes and relays need not wait for the relay's next look.
func TestWakeEndsThePause(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{})
	relay.PollEvery(r, time.Hour)
	r.Wake() // before anybody waits
	insert(t, pool, topic, "k", "first")
	stop := starts(t, r)
	testwait.True(t, `kafkatest.Count(t, topic) == 1`, func() bool { return kafkatest.Count(t, topic) == 1 })
	insert(t, pool, topic, "k", "second")
	testwait.True(t, "the second row is published", func() bool {
		r.Wake()
		return kafkatest.Count(t, topic) == 2
	})
	stop()
}

// Property: a relay that an operator deleted while a replica stood by makes itself known again.
func TestDeletedRelayComesBack(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	running(t, pool, relay.Config{})
	insert(t, pool, topic, "k", "first")
	testwait.True(t, `kafkatest.Count(t, topic) == 1`, func() bool { return kafkatest.Count(t, topic) == 1 })
	must(t, pool, `WITH r AS (DELETE FROM effectonce.outbox_relays), s AS (DELETE FROM effectonce.outbox_replicas) DELETE FROM effectonce.outbox_progress`)
	becomes(t, pool, `one[int](t, pool, 'SELECT count(*) FROM effectonce.outbox_relays') == 1`, `SELECT count(*) = 1 FROM effectonce.outbox_relays`)
	insert(t, pool, topic, "k", "second")
	testwait.True(t, `kafkatest.Count(t, topic) >= 2`, func() bool { return kafkatest.Count(t, topic) >= 2 })
}

// Property: a released lease stays free, also if its renewal was under way: otherwise no replica
// would publish the shard.
func TestLeaseGivenBackIsNotRenewed(t *testing.T) {
	t.Parallel()
	renewed, err := newRelay(t, pgtest.Pool(t), relay.Config{}).RenewsWhatItGaveBack(t.Context())
	require.NoError(t, err)
	require.False(t, renewed)
}

// lockedBuffer is what a relay may write to while a test reads it.
type lockedBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// Property: a relay that is woken while it reads the outbox looks again at once: what it reads may
// have been there before.
func TestWakeDuringALookIsNotLost(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	page := newKeptBack(func() {})
	page.next.Store(true)
	r := newRelay(t, traced(t, pool, page), relay.Config{Lease: 10 * time.Minute})
	relay.PollEvery(r, time.Hour)
	starts(t, r)
	<-page.waits // it has read nothing
	insert(t, pool, topic, "k", "1")
	r.Wake()
	close(page.release)
	testwait.True(t, "the row is published before the pause is over", func() bool { return kafkatest.Count(t, topic) == 1 })
}

// Property: a replica that is stopped at any moment, also while it takes a lease, leaves none behind.
func TestStoppedReplicaHoldsNothing(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	for round := range 40 {
		insert(t, pool, topic, "k", "1")
		stop := starts(t, newRelay(t, pool, relay.Config{Shards: 5, Lease: time.Minute}))
		must(t, pool, `SELECT pg_sleep($1)`, float64(round)/1000)
		stop()
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_progress WHERE lease_until IS NOT NULL`), round)
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_replicas`))
	}
}

// leases is what a relay says about its only shard.
type leases struct{ held, lost atomic.Int64 }

func (l *leases) hooks() relay.Hooks {
	return relay.Hooks{Lease: func(_ int16, held bool) {
		if held {
			l.held.Add(1)
		} else {
			l.lost.Add(1)
		}
	}}
}

// takenSQL is what another replica does that takes the shard: a new epoch, and with it the next row
// of the chain.
const takenSQL = `
WITH taken AS (
  UPDATE effectonce.outbox_progress SET epoch = epoch + 1, owner = 'another', lease_until = clock_timestamp() + interval '1 hour' WHERE shard >= 0 RETURNING relay, shard, epoch)
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published)
SELECT t.relay, t.shard, w.advance + 1, w.progress_epoch, w.tick, w.next_tick, w.seq, w.floor, w.published
FROM taken t JOIN effectonce.outbox_progress_now w USING (relay, shard)`

// Property: only one replica publishes at a time. One whose shard another one took, which it can learn only
// from the epoch, gives up long before its own lease would have ended, leaves the other's lease as it is,
// and stores and counts nothing more. A lease that is over, or given back, is free. Row O13 of guarantees.md.
func TestLeaseMovesAndFences(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		either(t, "without rows", "with rows", func(t *testing.T, rows bool) {
			t.Helper()
			pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
			var l leases
			var counted atomic.Int64
			hooks := l.hooks()
			hooks.Published = func(n int64) { counted.Add(n) }
			stop := running(t, pool, relay.Config{ExactlyOnce: exactly, Lease: 10 * time.Minute, Hooks: hooks})
			testwait.True(t, "the shard is taken", func() bool { return l.held.Load() == 1 })
			second, want := newRelay(t, pool, relay.Config{ExactlyOnce: exactly, Owner: "second"}), []string{"first"}
			_, err := second.Drain(t.Context())
			require.ErrorIs(t, err, relay.ErrLeaseHeld)
			insert(t, pool, topic, "k", "first")
			testwait.True(t, "a row is published", func() bool { return counted.Load() == 1 })

			must(t, pool, takenSQL)
			const untilSQL = `SELECT lease_until FROM effectonce.outbox_progress_now`
			until := one[time.Time](t, pool, untilSQL)
			if rows {
				want = append(want, "second")
				insert(t, pool, topic, "k", "second")
			}
			testwait.True(t, "the shard is given up", func() bool { return l.lost.Load() == 1 })
			stop()
			require.EqualValues(t, 1, counted.Load())
			require.Equal(t, 1, published(t, pool), "progress of an earlier epoch")
			require.True(t, until.Equal(one[time.Time](t, pool, untilSQL)))
			require.Equal(t, "another", owner(t, pool), "a lost lease must not be given back")

			must(t, pool, `UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp()`)
			drain(t, second)
			require.Equal(t, want, distinctInOrder(values(t, topic)))
			require.Empty(t, owner(t, pool), "Drain gives the lease back")
		})
	})
}

// keptBack is a tracer that keeps a page back.
type keptBack struct {
	tracer
	next    atomic.Bool   // the next page is read, and then waits until release is closed
	waits   chan struct{} // closed when it does
	release chan struct{}
	cut     atomic.Bool // leases cannot be renewed
}

// newKeptBack returns one that runs something right before it reads that page.
func newKeptBack(before func()) *keptBack {
	var reads atomic.Bool
	k := &keptBack{waits: make(chan struct{}), release: make(chan struct{})}
	beats := breaking("-- relay.beat", &k.cut)
	k.start = func(ctx context.Context, sql string) context.Context {
		if strings.HasPrefix(sql, "-- relay.fetch\n") && k.next.CompareAndSwap(true, false) {
			before()
			reads.Store(true)
		}
		return beats.start(ctx, sql)
	}
	k.batchEnd = func() {
		if reads.CompareAndSwap(true, false) {
			close(k.waits)
			<-k.release
		}
	}
	return k
}

// handed counts records that the relay gave to its client.
type handed struct{ atomic.Int64 }

func (h *handed) OnProduceRecordBuffered(*kgo.Record) { h.Add(1) }

// Property: a page that arrives when the lease is over, because it could not be renewed, is not
// handed to Kafka, and the shard is given up. Row O13 of guarantees.md.
func TestNothingIsProducedWhenTheLeaseIsOver(t *testing.T) {
	longtest.Only(t, "a lease of real seconds")
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	page, records := newKeptBack(func() { insert(t, pool, topic, "k", "after") }), &handed{}
	var l leases
	starts(t, newRelay(t, traced(t, pool, page), relay.Config{Lease: 2 * time.Second, Hooks: l.hooks()}, kgo.WithHooks(records)))
	insert(t, pool, topic, "k", "before")
	testwait.True(t, "a row is handed over", func() bool { return records.Load() == 1 })
	page.next.Store(true)
	<-page.waits
	page.cut.Store(true)
	becomes(t, pool, "the lease is over", `SELECT lease_until < clock_timestamp() FROM effectonce.outbox_progress_now`)
	close(page.release)
	testwait.True(t, "the shard is given up", func() bool { return l.lost.Load() == 1 })
	require.EqualValues(t, 1, records.Load())
}

// Property: a replica that cannot renew its lease gives the shard up when it is over, also while it
// has nothing to do. Row O13 of guarantees.md.
func TestShardIsGivenUpWhenItsLeaseIsOver(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var cut atomic.Bool
	var l leases
	running(t, traced(t, pool, breaking("-- relay.beat", &cut)), relay.Config{Lease: time.Second, Hooks: l.hooks()})
	testwait.True(t, "the shard is taken", func() bool { return l.held.Load() == 1 })
	cut.Store(true)
	testwait.True(t, "the shard is given up", func() bool { return l.lost.Load() == 1 })
}
