package relay_test

import (
	"context"
	"strings"
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

// tracer is called right before each statement, also those of a batch, and when a batch was answered. It may
// change the context of a statement that comes alone.
type tracer struct {
	start    func(ctx context.Context, sql string) context.Context
	batchEnd func()
}

func (f *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	return f.start(ctx, query.SQL)
}

func (*tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (f *tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, query := range data.Batch.QueuedQueries {
		f.start(ctx, query.SQL)
	}
	return ctx
}

func (*tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (f *tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {
	if f.batchEnd != nil {
		f.batchEnd()
	}
}

// before runs something right before each statement with a tag.
func before(tag string, do func(ctx context.Context)) *tracer {
	return &tracer{start: func(ctx context.Context, sql string) context.Context {
		if strings.HasPrefix(sql, tag) {
			do(ctx)
		}
		return ctx
	}}
}

// breaking lets statements with a tag fail while on.
func breaking(tag string, on *atomic.Bool) *tracer {
	return &tracer{start: func(ctx context.Context, sql string) context.Context {
		if on.Load() && strings.HasPrefix(sql, tag) {
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			cancel()
		}
		return ctx
	}}
}

// meddle changes the database behind the relay's back.
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
