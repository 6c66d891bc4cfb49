package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

func one[T any](t *testing.T, pool *pgxpool.Pool, sql string) (v T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql).Scan(&v))
	return v
}

// Property: published rows leave by TRUNCATE of their slot, without a single deleted or updated
// row, and rows that are inserted during that are published in order. A slot stays while a
// transaction that inserted into it is open. Row O21 of guarantees.md.
func TestSlotsTakeTurns(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	running(t, pool, relay.Config{Keep: 200 * time.Millisecond, Lease: time.Second}) // it tidies up as often as it renews its lease
	late, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = late.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'late', 'late')`, topic)
	require.NoError(t, err)
	truncated := `SELECT count(*) FROM effectonce.outbox_slots WHERE truncated_at IS NOT NULL AND slot > 0`
	n := 0
	for ; one[int](t, pool, truncated) < 3; n++ {
		require.Less(t, n, 100_000, "the slots do not take turns")
		insert(t, pool, topic, "k", fmt.Sprint(n))
	}
	require.Equal(t, 0, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_slots WHERE truncated_at IS NOT NULL AND slot = 0`))
	require.NoError(t, late.Commit(ctx))
	testwait.True(t, "the slot takes its turn, too", func() bool {
		return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_slots WHERE truncated_at IS NOT NULL`) == 4 && one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`) == 0
	})
	var first []string // occurrences: a lease that was lost on a busy machine has rows published twice
	testwait.True(t, "all rows are there", func() bool {
		first = nil
		seen := map[string]bool{}
		for _, v := range values(t, topic) {
			if !seen[v] {
				first = append(first, v)
			}
			seen[v] = true
		}
		return len(first) == n+1
	})
	i := 0
	for _, v := range first {
		if v != "late" {
			require.Equal(t, fmt.Sprint(i), v)
			i++
		}
	}
	require.Zero(t, one[int](t, pool, `SELECT coalesce(sum(n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`))
}

// Property: a relay that has not published a slot's rows keeps them, whatever the others did; and
// so does one whose progress belongs to another cluster or that has shards which were never
// published.
func TestSlowestRelayKeepsTheSlot(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	slow := newRelay(t, pool, relay.Config{Name: "slow"})
	drain(t, slow)
	for i := range 20 {
		insert(t, pool, topic, fmt.Sprint("k", i), "v")
	}
	fast := newRelay(t, pool, relay.Config{Keep: 100 * time.Millisecond})
	drain(t, fast)
	_, err := pool.Exec(ctx, `UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - interval '1 hour'; SELECT setval('effectonce.outbox_slot', 1)`)
	require.NoError(t, err)
	left := func() int {
		require.NoError(t, fast.TidyUp(ctx))
		return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`) //nolint:contextcheck // the test's
	}
	require.Equal(t, 20, left(), "slow has published nothing")
	drain(t, slow)
	for undo, change := range map[string]string{
		`UPDATE effectonce.outbox_relays SET shards = 1 WHERE relay = 'slow'`:             `UPDATE effectonce.outbox_relays SET shards = 2 WHERE relay = 'slow'`,
		`UPDATE effectonce.outbox_advances SET tick = -tick WHERE relay = 'slow'`:         `UPDATE effectonce.outbox_advances SET tick = -tick WHERE relay = 'slow'`,
		`UPDATE effectonce.outbox_progress SET system_identifier = system_identifier - 1`: `UPDATE effectonce.outbox_progress SET system_identifier = system_identifier + 1`,
	} {
		_, err := pool.Exec(ctx, change)
		require.NoError(t, err)
		require.Equal(t, 20, left(), change)
		_, err = pool.Exec(ctx, undo)
		require.NoError(t, err)
	}
	require.Zero(t, left())
	require.Equal(t, 40, kafkatest.Count(t, topic))
}

// Property: published rows that a restore brought, with transaction ids which the new cluster has
// not reached, do not keep their slot: they are below the floor. Row O22 of guarantees.md.
func TestRowsOfAnotherClusterLeave(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	for range 20 {
		insert(t, pool, topic, "k", "v")
	}
	r := newRelay(t, pool, relay.Config{Keep: 100 * time.Millisecond})
	drain(t, r)
	_, err := pool.Exec(ctx, `UPDATE effectonce.outbox SET txid = '9000000000000'; UPDATE effectonce.outbox_advances SET floor = 19;
		UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - interval '1 hour'; SELECT setval('effectonce.outbox_slot', 1)`)
	require.NoError(t, err)
	require.NoError(t, r.TidyUp(ctx))
	require.Equal(t, 20, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`), "the last row is above the floor")
	_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_advances SET floor = 20`)
	require.NoError(t, err)
	require.NoError(t, r.TidyUp(ctx))
	require.Zero(t, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`))
}

// Property: a transaction that reads the outbox for long, as pg_dump does, keeps published rows,
// and nothing else: rows flow, the relay says what it waits for once, and its hook
// for how long; when the transaction ends, the outbox shrinks by
// itself. Row O48 of guarantees.md.
func TestDumpKeepsPublishedRows(t *testing.T) {
	longtest.Only(t, "it counts lines of the log in real time")
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	conn, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig.Copy())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(ctx)) })
	_, err = conn.Exec(ctx, `SET application_name = 'pg_dump'; BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;
		LOCK TABLE effectonce.outbox, effectonce.outbox_0, effectonce.outbox_1, effectonce.outbox_2, effectonce.outbox_3 IN ACCESS SHARE MODE`)
	require.NoError(t, err)

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

	_, err = conn.Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	testwait.True(t, "the outbox shrinks", func() bool { return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`) == 0 })
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
	late, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = late.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'late', 'late')`, topic)
	require.NoError(t, err)
	insert(t, pool, topic, "k", "early")
	drain(t, r)
	require.True(t, one[bool](t, pool, `SELECT bool_and(EXISTS (SELECT FROM pg_snapshot_xip(t.snapshot)))
		FROM effectonce.outbox_progress_now p JOIN effectonce.outbox_ticks t USING (tick)`), "the test's own premise")
	require.NoError(t, late.Commit(ctx))

	must(t, pool, `UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - interval '1 hour'; SELECT setval('effectonce.outbox_slot', 1)`)
	require.NoError(t, r.TidyUp(ctx))
	require.Equal(t, 2, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`), "a row that is not published was removed")
	drain(t, r)
	require.NoError(t, r.TidyUp(ctx))
	require.Zero(t, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_0`))
	require.Equal(t, []string{"early", "late"}, values(t, topic))
}
