package relay_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: a writer, with no more rights than to publish, sees how old and how many the rows are
// that are not published: none where none waits, also while rolled back rows left gaps; rows that
// commit late; the slowest relay's; all where no relay ever ran.
func TestWriterSeesTheBacklog(t *testing.T) {
	t.Parallel()
	const tolerance = 20 * time.Minute // the rows differ by an hour
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	address := pool.Config().ConnString()
	prefix := pgtest.RolePrefix(t, address)
	roles, err := migrations.Roles(migrations.Options{}, prefix)
	require.NoError(t, err)
	must(t, pool, roles)
	writer, err := pgx.Connect(ctx, pgtest.Login(t, address, prefix, "publisher"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = writer.Close(context.WithoutCancel(ctx)) })
	backlog := func() outbox.Backlog {
		b, err := outbox.ReadBacklog(ctx, writer)
		require.NoError(t, err)
		return b
	}
	require.Zero(t, backlog().Rows)
	require.Zero(t, one[float64](t, pool, "SELECT max(oldest_seconds) FROM effectonce.outbox_backlog"), "for those who read the view")
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, created_at) SELECT $1, n::text::bytea, clock_timestamp() - interval '1 hour' FROM generate_series(1, 20) n`, topic)
	b := backlog()
	require.EqualValues(t, 20, b.Rows, "no relay ever ran")
	require.InDelta(t, time.Hour, b.Oldest, float64(tolerance))
	require.Positive(t, b.Bytes)

	r, slow := newRelay(t, pool, relay.Config{}), newRelay(t, pool, relay.Config{Name: "slow", Shards: 3})
	drain(t, r)
	b = backlog()
	require.Zero(t, b.Rows)
	require.Zero(t, b.Oldest)

	late, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer late.Rollback(context.WithoutCancel(ctx))
	_, err = late.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, created_at) VALUES ($1, 'k', clock_timestamp() - interval '2 hours')`, topic)
	require.NoError(t, err)
	_, err = pool.Exec(ctx, `DO $$ BEGIN INSERT INTO effectonce.outbox (topic) VALUES ('gone'); RAISE EXCEPTION 'rolled back'; END $$`)
	require.Error(t, err)
	insert(t, pool, topic, "k", "v")
	drain(t, r)
	require.Zero(t, backlog().Oldest, "what is not committed does not wait")
	require.NoError(t, late.Commit(ctx))
	b = backlog()
	require.InDelta(t, 2*time.Hour, b.Oldest, float64(tolerance), "it was open at the last tick")
	require.Positive(t, b.Rows)
	drain(t, r)
	require.Zero(t, backlog().Oldest)
	must(t, pool, `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('slow', 3)`)
	require.InDelta(t, time.Hour, backlog().Oldest, float64(tolerance), "the slow relay has published nothing, and begins with the first row")
	drain(t, slow)
	require.Zero(t, backlog().Oldest)

	for _, table := range []string{"outbox", "outbox_progress", "outbox_ticks"} {
		_, err := writer.Exec(ctx, `SELECT FROM effectonce.`+table)
		require.ErrorContains(t, err, "permission denied")
	}
}

// Property: the backlog inside a batch of several pages begins where the last page ended.
func TestBacklogWithinABatch(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	must(t, pool, `INSERT INTO effectonce.outbox (topic, payload, created_at) SELECT 't', CASE WHEN n > 50 THEN 'first' ELSE 'v' END::bytea, clock_timestamp() - n * interval '1 minute' FROM generate_series(60, 1, -1) n`)
	cfg := relay.Config{PageRowsMax: 10, ProgressEvery: time.Millisecond}
	cfg.Sink = &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		if string(messages[0].Payload) == "first" {
			return len(messages), nil
		}
		const inside = `SELECT EXISTS (SELECT FROM effectonce.outbox_progress_now WHERE next_tick IS NOT NULL AND seq = 10)`
		testwait.True(t, "progress is inside the batch", func() bool { return one[bool](t, pool, inside) }) //nolint:contextcheck // the test's own
		return 0, errors.New("no more")
	}}
	r, err := relay.New(pool, nil, cfg)
	require.NoError(t, err)
	_, err = r.Drain(ctx)
	require.ErrorContains(t, err, "no more")
	seq := one[int](t, pool, `SELECT seq FROM effectonce.outbox_progress_now WHERE next_tick IS NOT NULL`)
	require.Positive(t, seq)
	require.Less(t, seq, 60)
	b, err := outbox.ReadBacklog(ctx, pool)
	require.NoError(t, err)
	require.EqualValues(t, 60-seq, b.Rows)
	// The next row differs by a minute. Its age grows while the test runs.
	age := one[float64](t, pool, fmt.Sprintf(`SELECT extract(epoch FROM clock_timestamp() - created_at)::float8 FROM effectonce.outbox WHERE seq = %d`, seq+1))
	require.InDelta(t, age, b.Oldest.Seconds(), 50)
}

// Property: to look at the backlog costs descents of indexes, however many rows wait or are kept.
func TestLookAtTheBacklogIsCheap(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	many := func(from, to int) {
		must(t, pool, fmt.Sprintf(`INSERT INTO effectonce.outbox (topic, payload) SELECT '%s', 'v' FROM generate_series(%d, %d)`, topic, from, to))
	}
	many(1, 20_000)
	drain(t, newRelay(t, pool, relay.Config{}))
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			must(t, pool, `ANALYZE effectonce.outbox`)
		}
		many(1, 20_000)
		rows, err := pool.Query(t.Context(), `EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF, BUFFERS OFF) SELECT oldest_seconds, rows FROM effectonce.outbox_backlog`)
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		plan := strings.Join(lines, "\n")
		require.NotRegexp(t, `rows=\d{3,}`, plan, plan)
	}
}
