package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// held is a Kafka that does not take records for a while.
type held struct {
	brokers []string
	waits   atomic.Bool
	refused atomic.Int64
}

func newHeld(t *testing.T, topic string) *held {
	t.Helper()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, topic))
	h := &held{brokers: fake.ListenAddrs()}
	fake.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		if !h.waits.Load() {
			return nil, nil, false
		}
		h.refused.Add(1)
		return nil, errors.New("connection cut"), true
	})
	return h
}

// values of a topic, each once.
func (h *held) values(t *testing.T, topic string) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for _, record := range kafkatest.ReadAllAt(t, h.brokers, topic) {
		found[string(record.Value)] = true
	}
	return found
}

// running is a relay in this process, until the test ends or calls stop.
func running(t *testing.T, pool *pgxpool.Pool, brokers []string, cfg relay.Config) (stop func()) {
	t.Helper()
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, cfg)
	require.NoError(t, err)
	return runs(t, r)
}

func runs(t *testing.T, r *relay.Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			select {
			case err := <-done:
				require.NoError(t, err)
			case <-time.After(testwait.Bound):
				require.FailNow(t, "the relay does not stop")
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

// Property: a relay that runs on through a crash of the server which loses commits that it has read
// (writers use synchronous_commit=off), and whose transaction ids are given out again, skips
// nothing that is there afterwards: what it learned before the crash is not stored, however late
// Kafka acknowledges. Row O24 of guarantees.md.
func TestCrashThatLosesCommitsSkipsNothing(t *testing.T) {
	longtest.Only(t, "crashes of clusters of its own")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx := t.Context()
		cluster := pgtest.Cluster(t, map[string]string{"synchronous_commit": "off", "bgwriter_lru_maxpages": "0", "autovacuum": "off"})
		pgtest.Migrate(t, cluster.URL)
		pool := open(t, cluster.URL)
		const topic, insert = "orders", `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', 'k', $1::text::bytea)`
		kafka := newHeld(t, topic)
		running(t, pool, kafka.brokers, relay.Config{ExactlyOnce: exactly, InFlightBytesMax: 64 << 10})
		_, err := pool.Exec(ctx, insert, "first")
		require.NoError(t, err)
		eventually(t, "the first row is stored as published", func() (bool, any) {
			n := count(ctx, t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress_now`)
			return n == 1, n
		})
		_, err = pool.Exec(ctx, `CHECKPOINT`)
		require.NoError(t, err)
		stopWriter(t, pool)

		kafka.waits.Store(true)
		for range 60 { // transaction ids that are assigned again
			_, err := pool.Exec(ctx, `SELECT pg_current_xact_id()`)
			require.NoError(t, err)
		}
		// So large that the relay reads nothing more until it is acknowledged.
		_, err = pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', 'phantom', convert_to(repeat(md5('x'), 4000), 'UTF8')`)
		require.NoError(t, err)
		lost := count(ctx, t, pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`)
		eventually(t, "it is on its way to Kafka", func() (bool, any) { return kafka.refused.Load() > 0, nil })
		require.NoError(t, cluster.Kill(ctx))
		require.NoError(t, cluster.Restart(ctx))
		pool.Reset()
		require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox WHERE key = 'phantom'`), "the test's own premise: it is lost")
		for i := range 20 {
			_, err := pool.Exec(ctx, insert, fmt.Sprint(i))
			require.NoError(t, err)
		}
		require.Less(t, count(ctx, t, pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`), lost, "the test's own premise: transaction ids come again")
		kafka.waits.Store(false)
		eventually(t, "everything that is there is published", func() (bool, any) {
			found := kafka.values(t, topic)
			for i := range 20 {
				if !found[fmt.Sprint(i)] {
					return false, len(found)
				}
			}
			return true, nil
		})
	})
}

// stopWriter freezes the process that writes to the disk what was committed with
// synchronous_commit=off, until the server ends, which kills it.
func stopWriter(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var pid int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`).Scan(&pid))
	_, err := pool.Exec(t.Context(), fmt.Sprintf(`COPY (SELECT) TO PROGRAM 'cat > /dev/null && kill -STOP %d'`, pid))
	require.NoError(t, err)
}

// dump is a database as pg_dump writes it: rows of one snapshot, and where sequences are, which is
// later. PostgreSQL's own program has to be as new as the server, and comes neither with the
// embedded one nor on many machines: see TestDumpOfPostgreSQLsOwn.
type dump struct {
	tables    map[string][]byte
	sequences map[string][2]any
}

const dumpedColumns = `SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
	WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''`

func takeDump(t *testing.T, pool *pgxpool.Pool) *dump {
	t.Helper()
	ctx := t.Context()
	d := &dump{tables: map[string][]byte{}, sequences: map[string][2]any{}}
	err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		for _, table := range relations(ctx, t, tx, `'r'`) {
			var columns string
			require.NoError(t, tx.QueryRow(ctx, dumpedColumns, table).Scan(&columns))
			var out bytes.Buffer
			_, err := tx.Conn().PgConn().CopyTo(ctx, &out, fmt.Sprintf(`COPY %s (%s) TO STDOUT`, table, columns))
			require.NoError(t, err)
			d.tables[table] = out.Bytes()
		}
		for _, sequence := range relations(ctx, t, tx, `'S'`) {
			var last int64
			var called bool
			require.NoError(t, tx.QueryRow(ctx, `SELECT last_value, is_called FROM `+sequence).Scan(&last, &called))
			d.sequences[sequence] = [2]any{last, called}
		}
		return nil
	})
	require.NoError(t, err)
	return d
}

// relations of a kind, of the tests and of the product.
func relations(ctx context.Context, t *testing.T, tx pgx.Tx, kind string) []string {
	t.Helper()
	rows, err := tx.Query(ctx, `SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname IN ('public', 'effectonce') AND c.relkind = `+kind+` ORDER BY c.oid`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

// restore puts the dump into a database that has the schema: over what is there.
func (d *dump) restore(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	ctx := t.Context()
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica`) // no triggers, no foreign keys, as pg_restore does
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `TRUNCATE `+strings.Join(slices.Collect(maps.Keys(d.tables)), ", "))
		require.NoError(t, err)
		for table, rows := range d.tables {
			var columns string
			require.NoError(t, tx.QueryRow(ctx, dumpedColumns, table).Scan(&columns))
			_, err := tx.Conn().PgConn().CopyFrom(ctx, bytes.NewReader(rows), fmt.Sprintf(`COPY %s (%s) FROM STDIN`, table, columns))
			require.NoError(t, err, table)
		}
		for sequence, at := range d.sequences {
			_, err := tx.Exec(ctx, `SELECT setval($1::regclass, $2, $3)`, sequence, at[0], at[1])
			require.NoError(t, err)
		}
		return nil
	})
	require.NoError(t, err)
}

// restored is what the dump tests vary.
type restored struct {
	child
	inPlace bool // over the dumped database, which continued after the dump
}

// Property: after a dump, taken while transactions are open and rows wait, is restored, into a new
// cluster or over the database itself, the relay skips nothing: neither what waited nor what is
// written afterwards, before it starts or later, whose transaction ids and row numbers were in use
// before; what is below the floor is not published again, the order of first occurrences is kept,
// and claims hold. Row O22 of guarantees.md.
func TestRestoredDumpSkipsNothing(t *testing.T) {
	longtest.Only(t, "restores, several times")
	t.Parallel()
	counts := []int16{1, 3}
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		for _, shards := range counts {
			t.Run(fmt.Sprintf("%d shards", shards), func(t *testing.T) {
				t.Parallel()
				either(t, "another cluster", "in place", func(t *testing.T, inPlace bool) {
					t.Helper()
					restoreDump(t, restored{child{ExactlyOnce: exactly, Shards: shards}, inPlace})
				})
			})
		}
	})
}

func restoreDump(t *testing.T, c restored) {
	t.Helper()
	ctx := t.Context()
	cluster := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, cluster.URL)
	pool := openWorkload(t, cluster.URL)
	topic := kafkatest.Topic(t, 2)
	c.Role, c.URL, c.Brokers, c.Lease = "relay", cluster.URL, kafkatest.Brokers(t), time.Second
	w := writers{goroutines: 4, transactions: 200, keys: 6, topic: topic, seed: 5, pauses: true}
	w.run(ctx, t, pool)
	r := start(t, c.child) // not before: the floor of a shard to which no key falls stays where its lease was taken
	requirePublished(t, pool, topic)
	eventually(t, "the floor moves", func() (bool, any) {
		n := count(ctx, t, pool, `SELECT min(floor) FROM effectonce.outbox_progress_now`)
		return n > 100, n
	})
	require.NoError(t, r.terminate())
	floors, before := count(ctx, t, pool, `SELECT min(floor) FROM effectonce.outbox_progress_now`), occurrences(t, topic)

	// Unpublished rows, a dead one, a claim, and an open transaction whose row is not in the dump.
	w.transactions, w.seed = 80, 6
	w.run(ctx, t, pool)
	behind, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer behind.Rollback(context.WithoutCancel(ctx))
	_, err = behind.Exec(ctx, `INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, '{"key":"open","version":1}')`, topic)
	require.NoError(t, err)
	claimed := uuid.Must(uuid.NewV7())
	require.True(t, claim(ctx, t, pool, claimed))
	_, err = pool.Exec(ctx, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, payload, headers, created_at, reason, error, waits_for, state)
		SELECT 'default', seq, id, 'missing', payload, headers, created_at, 'unknown_topic', '', 'missing', 'held' FROM effectonce.outbox ORDER BY seq LIMIT 1`)
	require.NoError(t, err)
	d := takeDump(t, pool)
	require.NoError(t, behind.Rollback(ctx))

	// The old database continues, and publishes: all of that is undone.
	if c.inPlace {
		lost := start(t, c.child)
		for i := range 60 {
			_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'lost', $2)`, topic, fmt.Appendf(nil, `{"key":"lost","version":%d}`, i+1))
			require.NoError(t, err)
		}
		eventually(t, "what will be undone is published", func() (bool, any) {
			for _, record := range kafkatest.ReadAll(t, topic) {
				if string(record.Value) == `{"key":"lost","version":60}` {
					return true, nil
				}
			}
			return false, nil
		})
		require.NoError(t, lost.terminate())
	} else {
		next := pgtest.Cluster(t, nil)
		pgtest.Migrate(t, next.URL)
		pool = openWorkload(t, next.URL)
		c.URL = next.URL
	}
	d.restore(t, pool)
	require.False(t, claim(ctx, t, pool, claimed), "claims hold")
	w.transactions, w.seed = 80, 7
	w.run(ctx, t, pool)
	r = start(t, c.child)
	w.seed = 8
	w.run(ctx, t, pool)
	requireKept(t, pool, topic)
	require.NoError(t, r.terminate())
	require.Equal(t, 1, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE state = 'held'`))

	requireNotPublishedAgain(t, topic, below(t, pool, topic, floors), before, c.ExactlyOnce)
}

// below lists the rows of a topic up to a floor.
func below(t *testing.T, pool *pgxpool.Pool, topic string, floor int) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT id::text FROM effectonce.outbox WHERE topic = $1 AND seq <= $2`, topic, floor)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, ids)
	return ids
}

// occurrences counts how often each ID is in a topic.
func occurrences(t *testing.T, topic string) map[string]int {
	t.Helper()
	ids := map[string]int{}
	for _, record := range kafkatest.ReadAll(t, topic) {
		for _, h := range record.Headers {
			if h.Key == outbox.HeaderMessageID {
				ids[string(h.Value)]++
			}
		}
	}
	return ids
}

// requireNotPublishedAgain compares with what was there before the restore: on a slow machine the
// first relay may have lost its lease, and published rows twice where that is allowed.
func requireNotPublishedAgain(t *testing.T, topic string, published []string, before map[string]int, exactly bool) {
	t.Helper()
	after := occurrences(t, topic)
	for _, id := range published {
		require.NotZero(t, before[id], "a row below the floor")
		require.Equal(t, before[id], after[id], "a row below the floor")
		if exactly {
			require.Equal(t, 1, after[id], "a row below the floor")
		}
	}
}

func claim(ctx context.Context, t *testing.T, pool *pgxpool.Pool, id uuid.UUID) (fresh bool) {
	t.Helper()
	claims, err := dedup.New(dedup.Config{})
	require.NoError(t, err)
	consumer, err := claims.Register(ctx, pool, dedup.Registration{Name: "billing/payments", Group: "billing", Topics: []string{"payments"}})
	require.NoError(t, err)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { fresh, err = claims.Claim(ctx, tx, consumer, id, 0); return err })
	require.NoError(t, err)
	return fresh
}

// Property: leases that are deleted by hand, while the relay runs, change nothing.
func TestLeasesDeletedByHand(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		if exactly {
			longtest.Only(t, "twice processes; the other is enough")
		}
		c := child{Role: "relay", URL: pgtest.Database(t), Brokers: kafkatest.Brokers(t), Shards: 3, ExactlyOnce: exactly, Lease: time.Second}
		pool, topic := openWorkload(t, c.URL), kafkatest.Topic(t, 2)
		r := start(t, c)
		w := writers{goroutines: 4, transactions: 80, keys: 6, topic: topic, seed: 9}
		w.run(t.Context(), t, pool)
		requirePublished(t, pool, topic)
		_, err := pool.Exec(t.Context(), `DELETE FROM effectonce.outbox_progress`)
		require.NoError(t, err)
		w.seed = 10
		w.run(t.Context(), t, pool)
		s := requirePublished(t, pool, topic)
		require.NoError(t, r.terminate())
		if exactly {
			require.Zero(t, s.duplicates)
		}
	})
}
