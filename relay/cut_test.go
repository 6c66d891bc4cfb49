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

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: the number of shards does not change under a replica that lost one of them when it was
// about to change it: who has the shard now publishes on. It changes when that one is gone. Rows
// O5, O13 of guarantees.md.
func TestShardsDoNotChangeUnderAnotherHolder(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	var once sync.Once
	var lost, refused atomic.Bool
	taken := meddle(t, pool, strings.Replace(takenSQL, "shard >= 0", "shard = 1", 1))
	take := func(ctx context.Context) {
		once.Do(func() {
			taken(ctx)
			lost.Store(true)
		})
	}
	running(t, traced(t, pool, &between{"-- relay.all_held", take}), relay.Config{Shards: 2, Lease: 30 * time.Second, Hooks: relay.Hooks{
		Interrupted: func(error) { refused.Store(lost.Load()) }, // before that it is something else, on a busy machine
	}})
	for i := range 10 {
		insert(t, pool, topic, fmt.Sprint("k", i), fmt.Sprint(i))
	}
	testwait.True(t, "rows are published", func() bool { return kafkatest.Count(t, topic) >= 10 })
	_, err := relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 3)
	require.NoError(t, err)
	const changedSQL = `SELECT shards = 3 FROM effectonce.outbox_relays`
	testwait.True(t, "the change is refused", func() bool { return refused.Load() || one[bool](t, pool, changedSQL) })
	require.Equal(t, "another", one[string](t, pool, `SELECT owner FROM effectonce.outbox_progress_now WHERE shard = 1`))
	require.False(t, one[bool](t, pool, changedSQL))
	must(t, pool, `UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp() WHERE shard = 1`)
	testwait.True(t, "the number changes", func() bool { return one[bool](t, pool, changedSQL) })
}

// Property: new shards begin with the lowest floor and a later epoch than any of the old ones, also
// those that are gone with the change, and with what all of them published: no holder of before can
// store progress, and a restore publishes again all that a shard was behind with. Rows O5, O13, O22
// of guarantees.md.
func TestNewShardsBeginWithWhatAllOldOnesKnew(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	write := func() {
		for i := range 12 {
			insert(t, pool, topic, fmt.Sprint("k", i), fmt.Sprint(i))
		}
	}
	write()
	before := newRelay(t, pool, relay.Config{Shards: 3})
	testwait.True(t, "the floors move", func() bool {
		drain(t, before)
		return one[int](t, pool, `SELECT min(floor) FROM effectonce.outbox_progress_now`) > 0
	})
	must(t, pool, `UPDATE effectonce.outbox_progress SET epoch = epoch + 100 WHERE shard = 2`) // it changed hands often …
	must(t, pool, `CREATE TABLE held (epoch bigint); CREATE TABLE begun (epoch bigint, floor bigint, published bigint);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO begun VALUES (NEW.epoch, NEW.floor, NEW.published); RETURN NULL; END';
		CREATE TRIGGER note AFTER UPDATE ON effectonce.outbox_progress FOR EACH ROW WHEN (OLD.shards <> NEW.shards) EXECUTE FUNCTION note()`)
	behind := meddle(t, pool, `INSERT INTO held SELECT max(epoch) FROM effectonce.outbox_progress_now;
		UPDATE effectonce.outbox_progress SET floor = 0 WHERE shard = 2; DELETE FROM effectonce.outbox_advances WHERE shard = 2`) // … and is behind
	var log lockedBuffer
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(log.String())
		}
	})
	running(t, traced(t, pool, &between{"-- relay.all_held", behind}), relay.Config{Lease: 30 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	write()
	testwait.True(t, "rows are published", func() bool {
		n := one[int](t, pool, `SELECT sum(published)::int FROM effectonce.outbox_progress_now`)
		require.LessOrEqual(t, n, 24, "rows are published twice: %s", log.String())
		return n == 24
	})
	_, err := relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 1)
	require.NoError(t, err)
	testwait.True(t, "the number changes", func() bool { return one[int](t, pool, `SELECT count(*) FROM begun`) == 1 })
	require.Equal(t, []int64{1, 0, 24}, one[[]int64](t, pool, `SELECT ARRAY[epoch - (SELECT max(epoch) FROM held), floor, published] FROM begun`))
	require.Greater(t, one[int](t, pool, `SELECT max(epoch) FROM held`), 100, "the test's own premise")
	require.Equal(t, 1, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_progress_now`))
}

// Property: a shard that is dropped by a change of the number of shards is not taken by a replica
// that acquires it at the same time: that replica would begin the outbox anew. Row O5 of
// guarantees.md.
func TestShardThatGoesAwayIsNotTaken(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	other, asked := newRelay(t, pool, relay.Config{Owner: "other", Lease: 30 * time.Second}), make(chan error, 1)
	var once sync.Once
	taken := make(chan bool, 1)
	running(t, traced(t, pool, &changing{between{"-- relay.cut_over", func(ctx context.Context) {
		once.Do(func() {
			go func() {
				took, err := other.Acquires(context.WithoutCancel(ctx), 2)
				taken <- took
				asked <- err
			}()
			waiting, cancel := context.WithTimeout(ctx, 20*time.Second) // the relay's own limit is its lease
			defer cancel()
			for waits := false; !waits; {
				err := pool.QueryRow(waiting, `SELECT EXISTS (SELECT FROM pg_stat_activity
					WHERE datname = current_database() AND query LIKE '-- relay.acquire%' AND wait_event_type = 'Lock')`).Scan(&waits)
				if err != nil {
					t.Errorf("the other one does not wait: %v", err)
					return
				}
			}
		})
	}}}), relay.Config{Shards: 3, Lease: 30 * time.Second})
	insert(t, pool, topic, "k", "1")
	testwait.True(t, "a row is published", func() bool { return kafkatest.Count(t, topic) == 1 })
	_, err := relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 1)
	require.NoError(t, err)
	require.NoError(t, testwait.Chan(t, "the number of shards changes", asked))
	require.False(t, <-taken)
	require.Equal(t, []int16{0}, one[[]int16](t, pool, `SELECT array_agg(shard) FROM effectonce.outbox_progress_now`))
}

// changing is between, for what goes in a batch.
type changing struct{ between }

func (c *changing) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		c.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: q.SQL})
	}
	return ctx
}

func (*changing) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*changing) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
