package relay_test

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// between runs something right before each statement with a tag.
type between struct {
	tag string
	do  func(ctx context.Context)
}

func (b *between) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	if len(query.SQL) > len(b.tag) && query.SQL[:len(b.tag)] == b.tag {
		b.do(ctx)
	}
	return ctx
}

func (b *between) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, query := range data.Batch.QueuedQueries {
		if strings.HasPrefix(query.SQL, b.tag) {
			b.do(ctx)
		}
	}
	return ctx
}

func (*between) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*between) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (b *between) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// meddle is what between does: it changes the database behind the relay's back.
func meddle(t *testing.T, pool *pgxpool.Pool, sql string) func(context.Context) {
	t.Helper()
	return func(ctx context.Context) {
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Error(err)
		}
	}
}

// traced is a second pool on a pool's database.
func traced(t *testing.T, pool *pgxpool.Pool, tracer pgx.QueryTracer) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.ConnConfig.Tracer = tracer
	config.ConnConfig.RuntimeParams["application_name"] = "traced"
	return pgtest.PoolOf(t, config)
}

// Property: a row that is committed between the look at a slot and its lock is not lost, also where
// the role's default is a stricter isolation, and one whose transaction is still open then keeps
// the slot. A slot whose time is not up is kept.
func TestRowBetweenTheLookAndTheLockIsKept(t *testing.T) {
	t.Parallel()
	either(t, "committed", "still open", func(t *testing.T, open bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		insert(t, pool, topic, "k", "published")
		drain(t, newRelay(t, pool, relay.Config{}))
		// A writer that read the slot's number before it was turned.
		late, err := pool.Begin(ctx)
		require.NoError(t, err)
		defer late.Rollback(context.WithoutCancel(ctx))
		var once sync.Once
		tidier := newRelay(t, traced(t, pool, &between{"-- relay.lock_slot", func(ctx context.Context) {
			once.Do(func() {
				if _, err := late.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload, slot) VALUES ($1, 'k', 'late', 0)`, topic); err != nil {
					t.Error(err)
				}
				if !open {
					if err := late.Commit(ctx); err != nil {
						t.Error(err)
					}
				}
			})
		}}), relay.Config{Keep: time.Hour})
		left := func() int {
			require.NoError(t, tidier.TidyUp(ctx))
			return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0 WHERE convert_from(payload, 'UTF8') = 'published'`) //nolint:contextcheck // the test's
		}
		_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - interval '59 minutes' WHERE slot = 0; SELECT setval('effectonce.outbox_slot', 1)`)
		require.NoError(t, err)
		require.NoError(t, newRelay(t, pool, relay.Config{Keep: time.Hour}).TidyUp(ctx))
		require.Equal(t, 1, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`), "its time is not up")
		_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - interval '61 minutes' WHERE slot = 0`)
		require.NoError(t, err)
		require.Equal(t, 1, left())
		if open {
			require.NoError(t, late.Commit(ctx))
		}
		require.Equal(t, 1, left(), "it is not published")
		drain(t, newRelay(t, pool, relay.Config{}))
		require.Equal(t, []string{"published", "late"}, values(t, topic))
		require.Zero(t, left())
	})
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

// Property: a replica whose shard another one took, which it can learn only from the epoch, gives
// up long before its own lease would have ended, leaves the other's lease as it is, and counts
// nothing as published that is not stored. Row O13 of guarantees.md.
func TestTakenShardIsGivenUp(t *testing.T) {
	t.Parallel()
	either(t, "without rows", "with rows", func(t *testing.T, rows bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		var l leases
		var published atomic.Int64
		hooks := l.hooks()
		hooks.Published = func(n int64) { published.Add(n) }
		running(t, pool, relay.Config{Lease: 10 * time.Minute, Hooks: hooks})
		testwait.True(t, "the shard is taken", func() bool { return l.held.Load() == 1 })
		insert(t, pool, topic, "k", "first")
		testwait.True(t, "a row is published", func() bool { return published.Load() == 1 })
		_, err := pool.Exec(ctx, takenSQL)
		require.NoError(t, err)
		until := one[time.Time](t, pool, `SELECT lease_until FROM effectonce.outbox_progress_now`)
		if rows {
			insert(t, pool, topic, "k", "second")
		}
		testwait.True(t, "the shard is given up", func() bool { return l.lost.Load() == 1 })
		require.EqualValues(t, 1, published.Load())
		require.True(t, until.Equal(one[time.Time](t, pool, `SELECT lease_until FROM effectonce.outbox_progress_now`)))
	})
}

// stalled is a pool's tracer that lets statements wait.
type stalled struct {
	between
	fetch   atomic.Bool // the next page waits until release is closed: before it is read …
	write   func()      // … or, if this is set, afterwards; this runs before
	reads   atomic.Bool
	waits   chan struct{} // closed when it does
	release chan struct{}
	beats   atomic.Int64
	cut     atomic.Bool // leases cannot be renewed
}

func newStalled(write func()) *stalled {
	s := &stalled{write: write, waits: make(chan struct{}), release: make(chan struct{})}
	s.tag, s.do = "-- relay.beat", func(context.Context) { s.beats.Add(1) }
	return s
}

func (s *stalled) TraceQueryStart(ctx context.Context, conn *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	ctx = s.between.TraceQueryStart(ctx, conn, query)
	if s.cut.Load() && strings.HasPrefix(query.SQL, s.tag) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		cancel()
	}
	return ctx
}

func (s *stalled) stall() {
	close(s.waits)
	<-s.release
}

func (s *stalled) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		if !strings.HasPrefix(q.SQL, "-- relay.fetch\n") || !s.fetch.CompareAndSwap(true, false) {
			continue
		}
		if s.write == nil {
			s.stall()
		} else {
			s.write()
			s.reads.Store(true)
		}
	}
	return ctx
}

func (s *stalled) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (s *stalled) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {
	if s.reads.CompareAndSwap(true, false) {
		s.stall()
	}
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
	tracer, records := newStalled(func() { insert(t, pool, topic, "k", "after") }), &handed{}
	var l leases
	r, err := relay.New(traced(t, pool, tracer), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...), kgo.WithHooks(records)}, relay.Config{Lease: 2 * time.Second, Hooks: l.hooks()})
	require.NoError(t, err)
	stop := starts(t, r)
	insert(t, pool, topic, "k", "before")
	testwait.True(t, "a row is handed over", func() bool { return records.Load() == 1 })
	tracer.fetch.Store(true)
	<-tracer.waits
	tracer.cut.Store(true)
	testwait.True(t, "the lease is over", func() bool {
		return one[bool](t, pool, `SELECT lease_until < clock_timestamp() FROM effectonce.outbox_progress_now`)
	})
	close(tracer.release)
	testwait.True(t, "the shard is given up", func() bool { return l.lost.Load() == 1 })
	require.EqualValues(t, 1, records.Load())
	stop()
}

// Property: a replica that cannot renew its lease gives the shard up when it is over, also while it
// has nothing to do. Row O13 of guarantees.md.
func TestShardIsGivenUpWhenItsLeaseIsOver(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	tracer := newStalled(nil)
	var l leases
	running(t, traced(t, pool, tracer), relay.Config{Lease: time.Second, Hooks: l.hooks()})
	testwait.True(t, "the shard is taken", func() bool { return l.held.Load() == 1 })
	tracer.cut.Store(true)
	testwait.True(t, "the shard is given up", func() bool { return l.lost.Load() == 1 })
}
