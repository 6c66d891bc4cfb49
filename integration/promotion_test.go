package integration_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: a standby is promoted after the primary died with commits that were not replicated, and
// assigns their transaction ids and row numbers again. Nothing that is committed on it is skipped.
// The order of first occurrences is kept, although some of the lost rows had been published (which
// cannot be undone) and with exactly-once Kafka's progress is ahead of the database. A relay that
// is connected to the old primary afterwards refuses, once it can know. Rows O22, O23, O24, O26 of
// guarantees.md.
func TestPromotionThatLosesCommitsSkipsNothing(t *testing.T) {
	longtest.Only(t, "promotions of clusters of its own")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		for _, shards := range []int16{1, 3} {
			t.Run(fmt.Sprintf("%d shards", shards), func(t *testing.T) {
				t.Parallel()
				either(t, "restarted", "runs on", func(t *testing.T, running bool) {
					t.Helper()
					promote(t, child{ExactlyOnce: exactly, Shards: shards}, running)
				})
			})
		}
	})
}

func promote(t *testing.T, c child, running bool) {
	t.Helper()
	ctx := t.Context()
	// Embedded: the standby runs from its programs and a copy of its files.
	primary, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Embedded: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = primary.Stop(context.WithoutCancel(ctx)) })
	pgtest.Migrate(t, primary.URL)
	second := newStandby(t, primary)
	pool := open(t, primary.URL)
	createWorkload(t, pool)
	topic := kafkatest.Topic(t, 2)
	c.Role, c.URL, c.Brokers, c.Lease = "relay", second.either(primary), kafkatest.Brokers(t), time.Second
	r := start(t, c)
	w := writers{goroutines: 4, transactions: 200, keys: 6, topic: topic, seed: 3}
	w.run(ctx, t, pool)
	before := requirePublished(t, pool, topic)
	floor := `SELECT min(floor) FROM effectonce.outbox_progress_now`
	eventually(t, "it is replicated", func() (bool, any) {
		var n int
		err := second.pool.QueryRow(ctx, floor).Scan(&n)
		return err == nil && n > 0 && n == count(ctx, t, pool, floor), fmt.Sprint(n, err)
	})
	second.cut(t)
	// Lost: more transactions than come after, each with rows of its own, all of them published.
	for i := range 150 {
		_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, $2, $3)`,
			topic, fmt.Appendf(nil, "lost%d", i%3), fmt.Appendf(nil, `{"key":"lost%d","version":%d}`, i%3, i/3+1))
		require.NoError(t, err)
	}
	eventually(t, "what will be lost is published", func() (bool, any) {
		n := kafkatest.Count(t, topic)
		return n >= before.records+150, n
	})
	if !running {
		require.NoError(t, r.terminate())
	}
	lost := count(ctx, t, pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`)
	require.NoError(t, primary.Kill(ctx))
	_, err = second.pool.Exec(ctx, `SELECT pg_promote()`)
	require.NoError(t, err)
	require.Less(t, count(ctx, t, second.pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`), lost, "the test's own premise: transaction ids come again")
	if !running {
		r = start(t, c)
	}
	w.transactions, w.seed = 120, 4
	w.run(ctx, t, second.pool)
	requireKept(t, second.pool, topic)
	require.NoError(t, r.terminate())

	// The old primary comes back, and learns of the promotion as a restore of it would.
	require.NoError(t, primary.Restart(ctx))
	pool.Reset()
	_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_progress SET timeline = timeline + 1, lease_until = NULL`)
	require.NoError(t, err)
	old, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(c.Brokers...)}, relay.Config{ExactlyOnce: c.ExactlyOnce})
	require.NoError(t, err)
	limited, cancel := context.WithTimeout(ctx, testwait.Bound)
	defer cancel()
	require.ErrorIs(t, old.Run(limited), relay.ErrOldPrimary)
}

// requireKept waits until everything that the database has is published, and judges it; what was
// lost is left out.
func requireKept(t *testing.T, pool *pgxpool.Pool, topic string) {
	t.Helper()
	want := written(t.Context(), t, pool)
	var judged stream
	eventually(t, "everything is published", func() (bool, any) {
		var kept []*kgo.Record
		for _, record := range kafkatest.ReadAll(t, topic) {
			if !strings.HasPrefix(string(record.Key), "lost") {
				kept = append(kept, record)
			}
		}
		judged = judge(t, kept)
		for key, version := range want {
			if judged.last[key] != version {
				return false, fmt.Sprint(key, judged.last[key], version)
			}
		}
		return true, nil
	})
	require.Equal(t, want, judged.last)
	require.Empty(t, judged.missing)
	require.Zero(t, judged.inversions)
}
