package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// turnedSQL lets the first slot have been turned away from $1 minutes ago.
const turnedSQL = `WITH turned AS (UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - $1 * interval '1 minute' WHERE slot = 0)
	SELECT setval('effectonce.outbox_slot', 1)`

// left lets a relay tidy up, and returns how many rows the first slot has then.
func left(t *testing.T, pool *pgxpool.Pool, r *relay.Relay) int {
	t.Helper()
	require.NoError(t, r.TidyUp(t.Context()))
	return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`)
}

// Property: published rows leave by TRUNCATE of their slot, without a single deleted or updated
// row, and rows that are inserted during that are published in order. A slot stays while a
// transaction that inserted into it is open. Row O21 of guarantees.md.
func TestSlotsTakeTurns(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	running(t, pool, relay.Config{Keep: 200 * time.Millisecond, Lease: time.Second}) // it tidies up as often as it renews its lease
	late := opened(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'late', 'late')`, topic)
	truncated := `SELECT count(*) FROM effectonce.outbox_slots WHERE truncated_at IS NOT NULL AND slot > 0`
	n := 0
	for ; one[int](t, pool, truncated) < 3; n++ {
		require.Less(t, n, 100_000, "the slots do not take turns")
		insert(t, pool, topic, "k", fmt.Sprint(n))
	}
	require.Equal(t, 0, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_slots WHERE truncated_at IS NOT NULL AND slot = 0`))
	require.NoError(t, late.Commit(ctx))
	becomes(t, pool, "the slot takes its turn, too", `SELECT count(*) = 4 FROM effectonce.outbox_slots WHERE truncated_at IS NOT NULL`)
	becomes(t, pool, "its rows are gone", `SELECT count(*) = 0 FROM effectonce.outbox_0`)
	// First occurrences: a lease that was lost on a busy machine has rows published twice.
	firsts := func(key string) []string { return distinctInOrder(keyed(t, topic, key)) }
	testwait.True(t, "all rows are there", func() bool { return len(firsts("k")) == n && len(firsts("late")) == 1 })
	require.Equal(t, numbered("", n), firsts("k"))
	require.Zero(t, one[int](t, pool, `SELECT coalesce(sum(n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`))
}

// Property: a relay that has not published a slot's rows keeps them, whatever the others did; and
// so does one whose progress belongs to another cluster or that has shards which were never
// published.
func TestSlowestRelayKeepsTheSlot(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	slow, fast := newRelay(t, pool, relay.Config{Name: "slow"}), newRelay(t, pool, relay.Config{Keep: 100 * time.Millisecond})
	drain(t, slow)
	insertNumbered(t, pool, topic, 20, 20)
	drain(t, fast)
	must(t, pool, turnedSQL, 60)
	require.Equal(t, 20, left(t, pool, fast), "slow has published nothing")
	drain(t, slow)
	for undo, change := range map[string]string{
		`UPDATE effectonce.outbox_relays SET shards = 1 WHERE relay = 'slow'`:             `UPDATE effectonce.outbox_relays SET shards = 2 WHERE relay = 'slow'`,
		`UPDATE effectonce.outbox_advances SET tick = -tick WHERE relay = 'slow'`:         `UPDATE effectonce.outbox_advances SET tick = -tick WHERE relay = 'slow'`,
		`UPDATE effectonce.outbox_progress SET system_identifier = system_identifier - 1`: `UPDATE effectonce.outbox_progress SET system_identifier = system_identifier + 1`,
	} {
		must(t, pool, change)
		require.Equal(t, 20, left(t, pool, fast), change)
		must(t, pool, undo)
	}
	require.Zero(t, left(t, pool, fast))
	require.Equal(t, 40, kafkatest.Count(t, topic))
}

// Property: published rows that a restore brought, with transaction ids which the new cluster has
// not reached, do not keep their slot: they are below the floor. Row O22 of guarantees.md.
func TestRowsOfAnotherClusterLeave(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	insertNumbered(t, pool, topic, 1, 20)
	r := newRelay(t, pool, relay.Config{Keep: 100 * time.Millisecond})
	drain(t, r)
	must(t, pool, `UPDATE effectonce.outbox SET txid = '9000000000000'; UPDATE effectonce.outbox_advances SET floor = 19`)
	must(t, pool, turnedSQL, 60)
	require.Equal(t, 20, left(t, pool, r), "the last row is above the floor")
	must(t, pool, `UPDATE effectonce.outbox_advances SET floor = 20`)
	require.Zero(t, left(t, pool, r))
}

// Property: a transaction that reads the outbox for long, as pg_dump does, keeps published rows,
// and nothing else: rows flow, the relay says what it waits for once, and its hook
// for how long; when the transaction ends, the outbox shrinks by
// itself. Row O48 of guarantees.md.
func TestDumpKeepsPublishedRows(t *testing.T) {
	longtest.Only(t, "it counts lines of the log in real time")
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	conn := pgtest.Connect(t, pool.Config().ConnString())
	must(t, conn, `SET application_name = 'pg_dump'; BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;
		LOCK TABLE effectonce.outbox, effectonce.outbox_0, effectonce.outbox_1, effectonce.outbox_2, effectonce.outbox_3 IN ACCESS SHARE MODE`)

	var log lockedBuffer
	var waiting, calls atomic.Int64
	cfg := relay.Config{Keep: 200 * time.Millisecond, Lease: time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	cfg.Hooks.TruncateWaits = func(_ int16, d time.Duration) { waiting.Store(int64(d)); calls.Add(1) }
	running(t, pool, cfg)
	n := 0
	for ; calls.Load() < 10; n++ {
		require.Less(t, n, 100_000, "it does not say that it waits")
		insert(t, pool, topic, "k", fmt.Sprint(n))
	}
	held := one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`)
	require.Equal(t, n, held, "all published rows are kept")
	require.Positive(t, waiting.Load())
	testwait.True(t, "rows flow", func() bool { return len(distinctInOrder(values(t, topic))) == n })
	slots := one[int](t, pool, `SELECT count(DISTINCT slot) FROM effectonce.outbox`)
	require.Contains(t, log.String(), "outbox-relay doctor")
	require.LessOrEqual(t, strings.Count(log.String(), "published rows cannot be removed"), slots, "it is said once for each slot")

	must(t, conn, `COMMIT`)
	becomes(t, pool, "the outbox shrinks", `SELECT count(*) = 0 FROM effectonce.outbox`)
	testwait.True(t, "it waits no more", func() bool { return waiting.Load() == 0 })
	testwait.True(t, "it says so", func() bool { return strings.Contains(log.String(), "no longer wait for a lock") })
	insert(t, pool, topic, "k", "after")
	testwait.True(t, "rows flow", func() bool { return len(distinctInOrder(values(t, topic))) == n+1 })
}

// Property: rows of a transaction that was open when the relay last stored its progress, and that
// has committed since, keep their slot: later transaction ids are published, and these rows are
// not. Row O21 of guarantees.md.
func TestRowsOfAnOpenTransactionKeepTheirSlot(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{Keep: 100 * time.Millisecond})
	late := opened(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'late', 'late')`, topic)
	insert(t, pool, topic, "k", "early")
	drain(t, r)
	require.True(t, one[bool](t, pool, `SELECT bool_and(EXISTS (SELECT FROM pg_snapshot_xip(t.snapshot)))
		FROM effectonce.outbox_progress_now p JOIN effectonce.outbox_ticks t USING (tick)`), "the test's own premise")
	require.NoError(t, late.Commit(ctx))

	must(t, pool, turnedSQL, 60)
	require.Equal(t, 2, left(t, pool, r), "a row that is not published was removed")
	drain(t, r)
	require.Zero(t, left(t, pool, r))
	require.Equal(t, []string{"early", "late"}, values(t, topic))
}

// Property: a row that is committed between the look at a slot and its lock is not lost, also where
// the role's default is a stricter isolation, and one whose transaction is still open then keeps
// the slot. A slot whose time is not up is kept.
func TestRowBetweenTheLookAndTheLockIsKept(t *testing.T) {
	t.Parallel()
	either(t, "committed", "still open", func(t *testing.T, open bool) {
		t.Helper()
		const publishedSQL = `SELECT count(*) FROM effectonce.outbox_0 WHERE convert_from(payload, 'UTF8') = 'published'`
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		insert(t, pool, topic, "k", "published")
		drain(t, newRelay(t, pool, relay.Config{}))
		// A writer that read the slot's number before it was turned.
		late := opened(t, pool, `SELECT`)
		var once sync.Once
		tidier := newRelay(t, traced(t, pool, before("-- relay.lock_slot", func(ctx context.Context) {
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
		})), relay.Config{Keep: time.Hour})
		must(t, pool, turnedSQL, 59)
		require.Equal(t, 1, left(t, pool, newRelay(t, pool, relay.Config{Keep: time.Hour})), "its time is not up")
		must(t, pool, turnedSQL, 61)
		left(t, pool, tidier)
		require.Equal(t, 1, one[int](t, pool, publishedSQL))
		if open {
			require.NoError(t, late.Commit(ctx))
		}
		left(t, pool, tidier)
		require.Equal(t, 1, one[int](t, pool, publishedSQL), "the late row is not published")
		drain(t, newRelay(t, pool, relay.Config{}))
		require.Equal(t, []string{"published", "late"}, values(t, topic))
		require.Zero(t, left(t, pool, tidier))
	})
}
