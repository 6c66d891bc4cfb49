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

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// overtaken lets a write of progress commit between the snapshot of a page and the return of its
// statement.
type overtaken struct {
	between // write, before the first page
	step    atomic.Int32
	read    chan struct{} // closed when the second page was read
	write   chan struct{} // closed by the test: progress may be stored
	arrive  chan struct{} // closed by the test: the page returns
}

// Steps of overtaken.
const (
	overtakenIdle int32 = iota
	overtakenArmed
	overtakenFirst  // the page that shows the rows, with a number of the sequence above them
	overtakenSecond // the page after it
	overtakenDone
)

func (o *overtaken) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		switch {
		case !strings.HasPrefix(q.SQL, "-- relay.fetch\n"):
		case o.step.CompareAndSwap(overtakenArmed, overtakenFirst):
			o.do(ctx)
		default:
			o.step.CompareAndSwap(overtakenFirst, overtakenSecond)
		}
	}
	return ctx
}

func (o *overtaken) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {
	if o.step.CompareAndSwap(overtakenSecond, overtakenDone) {
		close(o.read)
		<-o.arrive
	}
}

func (o *overtaken) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	stores := strings.HasPrefix(query.SQL, "-- relay.store_tick\n") || strings.HasPrefix(query.SQL, "-- relay.advance\n")
	if o.step.Load() >= overtakenFirst && stores {
		<-o.write
	}
	return ctx
}

// Property: a write of progress that commits after a page's snapshot, and before the page arrives,
// says nothing about that snapshot: a row whose transaction runs beyond the snapshot's xmax, with a
// number that the write knows, is still published. Row O2 of guarantees.md.
func TestProgressOfLaterThanTheSnapshotDoesNotCount(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Cluster(t, nil) // where no other test's transaction ends
	pgtest.Migrate(t, cluster.URL)
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	pool, err := pgxpool.New(ctx, cluster.URL)
	require.NoError(t, err)
	defer pool.Close()

	const rows = 20 // more than those after which a poll begins with a probe of the snapshot
	tracer := &overtaken{read: make(chan struct{}), write: make(chan struct{}), arrive: make(chan struct{})}
	write, release := sync.OnceFunc(func() { close(tracer.write) }), sync.OnceFunc(func() { close(tracer.arrive) })
	defer write()
	defer release()
	var open pgx.Tx
	var failed error
	tracer.do = func(ctx context.Context) {
		if _, failed = pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, payload) SELECT $1, 'early' FROM generate_series(1, $2)`, topic, rows); failed != nil {
			return
		}
		if open, failed = pool.Begin(context.WithoutCancel(ctx)); failed != nil {
			return
		}
		_, failed = open.Exec(ctx, `INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, 'late')`, topic)
	}
	var published atomic.Int64
	r := newRelay(t, traced(t, pool, tracer), relay.Config{
		Lease: 10 * time.Minute, PollMax: 20 * time.Millisecond, // no renewal ends meanwhile
		Hooks: relay.Hooks{Published: func(n int64) { published.Add(n) }},
	})
	stop := starts(t, r)
	testwait.True(t, "the relay runs", func() bool { return owner(t, pool) != "" })
	insert(t, pool, topic, "k", "first")
	testwait.True(t, "a row is published", func() bool { return published.Load() == 1 })

	tracer.step.Store(overtakenArmed)
	must(t, pool, `SELECT pg_current_xact_id()`) // something new for the probe of the snapshot
	testwait.Chan(t, "a page is read", tracer.read)
	require.NoError(t, failed)
	defer func() { _ = open.Rollback(context.WithoutCancel(ctx)) }()
	var beyond bool
	require.NoError(t, open.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot()) = pg_current_xact_id()`).Scan(&beyond))
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
