package relay_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: replicas divide the shards evenly, whichever replicas join and leave. The shards of a
// stopped replica move at once, long before its leases would have expired. Another number of shards
// is adopted while rows are published. Row O5 of guarantees.md.
func TestReplicasShareShards(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 3)
	const lease = 2 * testwait.Bound
	replica := func(owner string) (stop func()) {
		return running(t, pool, relay.Config{Owner: owner, Shards: 4, Lease: lease})
	}
	share := func(want string) {
		t.Helper()
		testwait.True(t, want, func() bool {
			shares := one[string](t, pool, `SELECT coalesce(string_agg(owner || ' ' || n, ', ' ORDER BY owner), '')
				FROM (SELECT owner, count(*) AS n FROM effectonce.outbox_progress_now WHERE owner IS NOT NULL GROUP BY owner) s`)
			return shares == want
		})
	}
	first := replica("a")
	share("a 4")
	second, third := replica("b"), replica("c")
	share("a 2, b 1, c 1")
	first()
	share("b 2, c 2")
	for i := range 40 {
		insert(t, pool, topic, fmt.Sprint("k", i%8), fmt.Sprint(i))
	}
	_, err := relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 6)
	require.NoError(t, err)
	for i := 40; i < 80; i++ {
		insert(t, pool, topic, fmt.Sprint("k", i%8), fmt.Sprint(i))
	}
	share("b 3, c 3")
	testwait.True(t, "all is published", func() bool { return kafkatest.Count(t, topic) >= 80 })
	for _, stop := range []func(){second, third} {
		stop()
	}
	require.Equal(t, 80, kafkatest.Count(t, topic), "nothing twice")
	for k := range 8 {
		for i, v := range keyed(t, topic, fmt.Sprint("k", k)) {
			require.Equal(t, fmt.Sprint(k+8*i), v)
		}
	}
	_, err = relay.SetShards(ctx, pool, relay.Operator{Relay: "never", Who: "ana", Why: "test"}, 1)
	require.ErrorIs(t, err, relay.ErrUnknownRelay)
	_, err = relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 257)
	require.ErrorContains(t, err, "want 1 to 256")
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
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	running(t, pool, relay.Config{})
	insert(t, pool, topic, "k", "first")
	testwait.True(t, `kafkatest.Count(t, topic) == 1`, func() bool { return kafkatest.Count(t, topic) == 1 })
	_, err := pool.Exec(ctx, `WITH r AS (DELETE FROM effectonce.outbox_relays), s AS (DELETE FROM effectonce.outbox_replicas) DELETE FROM effectonce.outbox_progress`)
	require.NoError(t, err)
	testwait.True(t, `one[int](t, pool, 'SELECT count(*) FROM effectonce.outbox_relays') == 1`, func() bool { return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_relays`) == 1 })
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

// Property: a change of the number of shards that an operator takes back, while a shard that has
// read up to the cut still waits for the brokers, leaves no shard behind: all are published
// further.
func TestReshardingTakenBackLeavesNoShardBehind(t *testing.T) {
	longtest.Only(t, "leases of real seconds")
	t.Parallel()
	ctx, pool, fake := t.Context(), pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	var fetches, beats atomic.Int64
	tracer := &counting{prefixes: map[string]*atomic.Int64{"-- relay.fetch\n": &fetches, "-- relay.beat": &beats}}
	var said lockedBuffer
	r, err := relay.New(traced(t, pool, tracer), []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)},
		relay.Config{Shards: 2, Lease: 30 * time.Second, DrainMax: time.Minute, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	require.NoError(t, err)
	starts(t, r)
	testwait.True(t, "both shards are taken", func() bool {
		return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_progress_now WHERE owner IS NOT NULL`) == 2
	})
	held, release := make(chan struct{}), make(chan struct{})
	fake.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.DropControl()
		close(held)
		fake.SleepControl(func() { <-release })
		return nil, nil, false
	})
	insert(t, pool, "orders", "k", "1")
	<-held
	_, err = relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 3)
	require.NoError(t, err)
	testwait.True(t, "the cut is taken", func() bool { return strings.Contains(said.String(), "up to one tick") })
	// Nobody reads on: both have come to the cut.
	for last := int64(-1); last != fetches.Load(); {
		last = fetches.Load()
		seen := beats.Load()
		testwait.True(t, "the relay looks", func() bool { return beats.Load() > seen+3 })
	}
	_, err = relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 2)
	require.NoError(t, err)
	seen := beats.Load()
	testwait.True(t, "it takes note", func() bool { return beats.Load() > seen+1 })
	close(release)
	for i := range 10 {
		insert(t, pool, "orders", fmt.Sprint("k", i), fmt.Sprint("after", i))
	}
	testwait.True(t, "all is published", func() bool { return len(distinctInOrder(valuesAt(t, fake, "orders"))) == 11 })
}

// counting counts statements, also those in batches, by how they begin.
type counting struct{ prefixes map[string]*atomic.Int64 }

func (c *counting) count(sql string) {
	for prefix, n := range c.prefixes {
		if strings.HasPrefix(sql, prefix) {
			n.Add(1)
		}
	}
}

func (c *counting) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	c.count(query.SQL)
	return ctx
}

func (*counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *counting) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		c.count(q.SQL)
	}
	return ctx
}

func (*counting) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*counting) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

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

// slowClose is a client that, while it is slow, ends when it may.
type slowClose struct {
	atomic.Int64

	slow atomic.Bool
	may  chan struct{}
}

func (s *slowClose) OnClientClosed(*kgo.Client) {
	if s.slow.Load() {
		<-s.may
	}
	s.Add(1)
}

// Property: the end of a shard's work that comes late, when the number of shards has changed
// already, says nothing about the work on the new shard of that number.
func TestLateEndOfAnOldShardEndsNoNewOne(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	closing := &slowClose{may: make(chan struct{})}
	mayClose := sync.OnceFunc(func() { close(closing.may) })
	var l leases
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...), kgo.WithHooks(closing)}, relay.Config{Lease: 30 * time.Second, Hooks: l.hooks()})
	require.NoError(t, err)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(running) }()
	defer func() { mayClose(); stop(); require.NoError(t, <-done) }()
	testwait.True(t, "the shard is taken", func() bool { return l.held.Load() == 1 })
	before := closing.Load()
	closing.slow.Store(true)
	_, err = relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 2)
	require.NoError(t, err)
	testwait.True(t, "the new shards are taken", func() bool { return l.held.Load() == 3 })
	mayClose()
	testwait.True(t, "the old one's client has ended", func() bool { return closing.Load() > before })
	for i := range 10 {
		insert(t, pool, topic, fmt.Sprint("k", i), fmt.Sprint(i))
	}
	testwait.True(t, "both are published", func() bool { return kafkatest.Count(t, topic) >= 10 })
	require.Zero(t, l.lost.Load())
}

// Property: a relay that cannot continue logs that and ends, also if it listens for wake-ups.
func TestListeningRelayEndsWithItsError(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	drain(t, newRelay(t, pool, relay.Config{}))
	must(t, pool, `UPDATE effectonce.outbox_progress SET timeline = timeline + 1, lease_until = NULL`)
	r, ended := newRelay(t, pool, relay.Config{WakeOnNotify: true}), make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	require.ErrorIs(t, testwait.Chan(t, "the relay refuses", ended), relay.ErrOldPrimary)
}
