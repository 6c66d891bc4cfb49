package integration_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

const restoredTopic = "orders"

// named is a relay with a Kafka of its own, so that its records are separate from those of other
// relays.
type named struct {
	name    string
	strict  bool // its role's default isolation
	shards  int16
	brokers []string
	pool    *pgxpool.Pool
	relay   *relay.Relay
}

func newNamed(t *testing.T, name string, exactly bool) *named {
	t.Helper()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, restoredTopic))
	return (&named{name: name, brokers: fake.ListenAddrs()}).exactly(exactly)
}

func (n *named) exactly(exactly bool) *named {
	if exactly {
		n.name += "-exactly"
	}
	return n
}

// at connects the relay to a database.
func (n *named) at(t *testing.T, pool *pgxpool.Pool, tracer pgx.QueryTracer) {
	t.Helper()
	config := pool.Config()
	config.ConnConfig.Tracer = tracer
	if n.strict {
		config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "repeatable read"
	}
	var err error
	n.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(n.pool.Close)
	n.relay, err = relay.New(n.pool, []kgo.Opt{kgo.SeedBrokers(n.brokers...)}, relay.Config{
		Name: n.name, Shards: n.shards, ExactlyOnce: strings.HasSuffix(n.name, "-exactly"), PageRowsMax: 20,
	})
	require.NoError(t, err)
}

func (n *named) drain(ctx context.Context) error {
	_, err := n.relay.Drain(ctx)
	return err
}

// first lists the values that were published, in the order of their first occurrences.
func (n *named) first(t *testing.T) (values []string) {
	t.Helper()
	seen := map[string]bool{}
	for _, record := range kafkatest.ReadAllAt(t, n.brokers, restoredTopic) {
		if v := string(record.Value); !seen[v] {
			seen[v] = true
			values = append(values, v)
		}
	}
	return values
}

// older is a cluster with an outbox whose transaction ids a new cluster has not reached.
func older(t *testing.T) *pgxpool.Pool {
	t.Helper()
	cluster := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, cluster.URL)
	pool := open(t, cluster.URL)
	burn(t, pool, 5000)
	return pool
}

func burn(t *testing.T, pool *pgxpool.Pool, ids int) {
	t.Helper()
	_, err := pool.Exec(t.Context(), fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$`, ids))
	require.NoError(t, err)
}

// moved is the database of a pool, dumped and restored into a new cluster.
func moved(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	cluster := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, cluster.URL)
	next := open(t, cluster.URL)
	takeDump(t, pool).restore(t, next)
	require.NotZero(t, count(t.Context(), t, next, `SELECT count(*) FROM effectonce.outbox WHERE txid >= pg_snapshot_xmax(pg_current_snapshot())`), "the test's own premise")
	return next
}

// write inserts rows first to last, one transaction each, and appends their values.
func write(t *testing.T, pool *pgxpool.Pool, values []string, rows int) []string {
	t.Helper()
	for range rows {
		v := fmt.Sprint(len(values))
		_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, $2, $3)`, restoredTopic, keyOf(v), []byte(v))
		require.NoError(t, err)
		values = append(values, v)
	}
	return values
}

func keyOf(value string) []byte { return []byte("k" + value[len(value)-1:]) }

func byKey(values []string) map[string][]string {
	keys := map[string][]string{}
	for _, v := range values {
		keys[string(keyOf(v))] = append(keys[string(keyOf(v))], v)
	}
	return keys
}

// Property: rows that a dump brought into another cluster are published by a relay, or a shard of
// it, that has no progress yet, as by one that has; what is written afterwards, too. Row O22 of
// guarantees.md.
func TestRelayThatBeginsAfterARestoreSkipsNothing(t *testing.T) {
	longtest.Only(t, "restores, several times")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		for _, before := range []string{"no relay ever ran", "only one by another name ran", "one shard was never leased", "progress is set back by hand"} {
			t.Run(before, func(t *testing.T) {
				t.Parallel()
				pool := older(t)
				n := newNamed(t, "default", exactly)
				want := write(t, pool, nil, 10)
				switch before {
				case "only one by another name ran":
					another := newNamed(t, "another", exactly)
					another.at(t, pool, nil)
					require.NoError(t, another.drain(t.Context()))
				case "one shard was never leased":
					n.shards = 2
					n.at(t, pool, nil)
					require.NoError(t, n.drain(t.Context()))
					_, err := pool.Exec(t.Context(), `DELETE FROM effectonce.outbox_progress WHERE shard = 1`)
					require.NoError(t, err)
					n = newNamed(t, "default", exactly) // what it publishes from here on
					n.shards = 2
					want = write(t, pool, want, 10)
				}
				pool = moved(t, pool)
				if before == "progress is set back by hand" {
					n.at(t, pool, nil)
					_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox_progress (relay, shard, shards, floor, system_identifier, timeline)
						SELECT $1, 0, 1, 5, system_identifier, 1 FROM pg_control_system()`, n.name) // as after a recovery
					require.NoError(t, err)
					_, err = pool.Exec(t.Context(), strings.Replace(resetSQL, "'default'", "'"+n.name+"'", 1))
					require.NoError(t, err)
				}
				n.at(t, pool, nil)
				for range 3 {
					require.NoError(t, n.drain(t.Context()))
					want = write(t, pool, want, 1)
				}
				require.NoError(t, n.drain(t.Context()))
				if n.shards != 2 {
					require.Equal(t, want, n.first(t))
					return
				}
				// What shard 0 had published up to its floor is not published again.
				published := n.first(t)
				rows, err := pool.Query(t.Context(), `SELECT convert_from(payload, 'UTF8') FROM effectonce.outbox WHERE shard % 2 = 1 OR seq > 10`)
				require.NoError(t, err)
				needed, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err)
				require.Subset(t, published, needed)
			})
		}
	})
}

// atFetch runs something once, before a relay reads its nth page.
type atFetch struct {
	nth     int64
	do      func()
	fetches atomic.Int64
}

func (*atFetch) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*atFetch) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (a *atFetch) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		if strings.HasPrefix(q.SQL, "-- relay.fetch\n") && a.fetches.Add(1) == a.nth {
			a.do()
		}
	}
	return ctx
}

func (*atFetch) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*atFetch) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// waiting is a database with rows above the floors of two relays, behind a restore or a promotion.
func waiting(t *testing.T, promotion bool, relays ...*named) (pool *pgxpool.Pool, want []string) {
	t.Helper()
	pool = older(t)
	written := write(t, pool, nil, 5)
	for _, n := range relays {
		n.at(t, pool, nil)
		require.NoError(t, n.drain(t.Context()))
	}
	written = write(t, pool, written, 200)
	if !promotion {
		pool = moved(t, pool)
		// Half of the ids are what this cluster has given out, and look as if they were its own.
		burn(t, pool, count(t.Context(), t, pool, `SELECT (max(txid::text::bigint) + min(txid::text::bigint)) / 2 - pg_snapshot_xmax(pg_current_snapshot())::text::bigint FROM effectonce.outbox`))
		require.Equal(t, 2, count(t.Context(), t, pool, `SELECT count(DISTINCT pg_visible_in_snapshot(txid, pg_current_snapshot())) FROM effectonce.outbox WHERE seq > 5`), "the test's own premise")
		return pool, written
	}
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.outbox_progress SET timeline = timeline - 1`)
	require.NoError(t, err)
	return pool, written
}

// Property: two relays on one outbox recover one after the other, the second while the first is
// inside a batch of several pages, and a third begins: each publishes everything, in order. Row O22
// of guarantees.md.
func TestRelaysRecoverBesideEachOther(t *testing.T) {
	longtest.Only(t, "restores and promotions of clusters of its own")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		either(t, "restore", "promotion", func(t *testing.T, promotion bool) {
			t.Helper()
			one, two, begins := newNamed(t, "one", exactly), newNamed(t, "two", exactly), newNamed(t, "begins", exactly)
			two.shards, begins.shards = 3, 2
			pool, want := waiting(t, promotion, one, two)
			two.at(t, pool, nil)
			begins.at(t, pool, nil)
			meddled := false
			one.at(t, pool, &atFetch{nth: 4, do: func() {
				meddled = true
				for _, n := range []*named{two, begins} {
					if err := n.drain(t.Context()); err != nil {
						t.Error(err)
					}
				}
			}})
			require.NoError(t, one.drain(t.Context()))
			require.True(t, meddled, "the test's own premise")
			want = write(t, pool, want, 3)
			for _, n := range []*named{one, two, begins} {
				require.NoError(t, n.drain(t.Context()))
				require.Equal(t, byKey(want), byKey(n.first(t)), n.name)
			}
		})
	})
}

// atCommit runs something before the first transaction with rows that were stamped is committed.
type atCommit struct {
	atFetch
	do      func()
	stamped atomic.Bool
}

func (a *atCommit) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	switch {
	case strings.HasPrefix(query.SQL, "-- relay.rebase"):
		a.stamped.Store(true)
	case query.SQL == "commit" && a.stamped.CompareAndSwap(true, false):
		a.do()
	}
	return ctx
}

// Property: a relay that recovers while another relay does waits for it. It does not touch the rows
// that the other relay gave transaction ids of this cluster, also if that relay has begun to read,
// and if its role's default is a stricter isolation. Row O22 of guarantees.md.
func TestRelaysRecoverAtOnce(t *testing.T) {
	longtest.Only(t, "a restore into a cluster of its own")
	t.Parallel()
	one, two := newNamed(t, "one", false), newNamed(t, "two", false)
	pool, want := waiting(t, false, one, two)
	two.strict = true
	reads, done := make(chan struct{}), make(chan error, 1)
	two.at(t, pool, &atCommit{do: func() {
		select {
		case <-reads:
		case <-time.After(testwait.Bound):
			t.Error("the other relay does not read")
		}
	}})
	one.at(t, pool, &atCommit{
		do: func() {
			go func() { done <- two.drain(t.Context()) }()
			eventually(t, "the second relay waits", func() (bool, any) {
				n := count(t.Context(), t, pool, `SELECT count(*) FROM pg_locks WHERE NOT granted`)
				return n > 0, n
			})
		},
		atFetch: atFetch{nth: 2, do: func() {
			close(reads)
			if err := <-done; err != nil {
				t.Error(err)
			}
		}},
	})
	require.NoError(t, one.drain(t.Context()))
	want = write(t, pool, want, 3)
	for _, n := range []*named{one, two} {
		require.NoError(t, n.drain(t.Context()))
		require.Equal(t, want, n.first(t), n.name)
	}
}
