package relays_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

var by = operator.By{Who: "ana@ops", Why: "renamed"}

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
)

const (
	rowsOfOld = `SELECT (SELECT count(*) FROM effectonce.outbox_relays WHERE relay = 'old') + (SELECT count(*) FROM effectonce.outbox_progress_now WHERE relay = 'old')
		+ (SELECT count(*) FROM effectonce.outbox_paused WHERE relay = 'old') + (SELECT count(*) FROM effectonce.outbox_replicas WHERE relay = 'old')
		+ (SELECT count(*) FROM effectonce.outbox_dead WHERE relay = 'old' AND state = 'discard')`
	actionsSQL = "SELECT count(*) FROM effectonce.operator_actions WHERE what = 'relay.delete' AND stated = 'ana@ops' AND why = 'renamed' AND subject->>'relay' = 'old'"
)

// two makes a relay that is gone, and one that is not.
func two(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	exec(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('old', 3), ('new', 1)")
	exec(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, shards, epoch, lease_until) VALUES
		('old', 0, 3, 1, NULL), ('old', 1, 3, 1, clock_timestamp() - interval '1 second'), ('new', 0, 1, 1, clock_timestamp() + interval '1 hour')`)
	exec(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, published) VALUES ('old', 0, 1, 1, 5), ('old', 1, 1, 1, 7), ('new', 0, 1, 1, 1)`)
	exec(t, conn, "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until) VALUES ('old', 'a', clock_timestamp() - interval '1 second'), ('new', 'b', clock_timestamp() + interval '1 hour')")
	exec(t, conn, "INSERT INTO effectonce.outbox_paused (relay, topic, who, why) VALUES ('old', 't', 'w', 'y'), ('new', 't', 'w', 'y')")
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		VALUES ('old', 9, gen_random_uuid(), 't', '{}', now(), 'refused', '', 'discard')`)
}

// A relay that no replica runs is deleted with all that it left, and that is recorded; others are
// not touched.
func TestRelayIsForgotten(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	two(t, conn)
	all, err := relays.List(t.Context(), conn, "effectonce")
	require.NoError(t, err)
	require.Len(t, all, 2)
	assert.True(t, all[0].Live())
	assert.Equal(t, int64(1), all[0].Leased)
	assert.Equal(t, int64(1), all[0].Replicas)
	assert.Zero(t, all[0].QuietSeconds)
	assert.Equal(t, "old", all[1].Relay)
	assert.False(t, all[1].Live())
	assert.Equal(t, int16(3), all[1].Shards)
	assert.Equal(t, int64(12), all[1].Published)
	gone, err := relays.Delete(t.Context(), conn, "effectonce", "old", by)
	require.NoError(t, err)
	assert.Equal(t, &relays.Deleted{Relay: "old", Shards: 2, Paused: 1, Replicas: 1}, gone)
	assert.Zero(t, pgtest.Count(t, conn, rowsOfOld))
	assert.Equal(t, 1, pgtest.Count(t, conn, actionsSQL))
	all, err = relays.List(t.Context(), conn, "effectonce")
	require.NoError(t, err)
	require.Len(t, all, 1)
	_, err = relays.Delete(t.Context(), conn, "effectonce", "old", by)
	require.ErrorIs(t, err, relays.ErrUnknown)
}

// A relay is not deleted while one of its shards is leased, while a replica stands by, or while its
// dead rows wait for a decision.
func TestRelayInUseIsNotForgotten(t *testing.T) {
	t.Parallel()
	for want, sql := range map[error][]string{
		relays.ErrLive: {
			"UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp() + interval '1 hour' WHERE relay = 'old' AND shard = 1",
			"UPDATE effectonce.outbox_replicas SET alive_until = clock_timestamp() + interval '1 hour' WHERE relay = 'old'",
		},
		relays.ErrDead: {`INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
			VALUES ('old', 1, gen_random_uuid(), 't', '{}', now(), 'refused', 'e', 'held')`},
	} {
		for _, change := range sql {
			conn := connect(t, pgtest.Database(t))
			two(t, conn)
			exec(t, conn, change)
			_, err := relays.Delete(t.Context(), conn, "effectonce", "old", by)
			require.ErrorIs(t, err, want)
			assert.Equal(t, 6, pgtest.Count(t, conn, rowsOfOld), "nothing was changed")
			assert.Zero(t, pgtest.Count(t, conn, actionsSQL))
		}
	}
}

// A replica that takes a shard, or renews its lease, at the same moment decides: the deletion waits
// for it and then is refused. The test takes the shard as the relay does: it locks the relay's row
// even before there is progress.
func TestForgettingWaitsForWhoTakesAShard(t *testing.T) {
	t.Parallel()
	for name, take := range map[string]string{
		"a lease that ran out": "UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp() + interval '1 hour', epoch = epoch + 1 WHERE relay = 'old' AND shard = 1",
		"a shard that nobody took yet": `INSERT INTO effectonce.outbox_progress (relay, shard, shards, lease_until, epoch)
			SELECT relay, 2, shards, clock_timestamp() + interval '1 hour', 1 FROM effectonce.outbox_relays WHERE relay = 'old' FOR SHARE`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := pgtest.Database(t)
			conn, replica := connect(t, address), connect(t, address)
			two(t, conn)
			tx, err := replica.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), take)
			require.NoError(t, err)
			refused := make(chan error, 1)
			operator := connect(t, address)
			go func() {
				_, err := relays.Delete(context.WithoutCancel(t.Context()), operator, "effectonce", "old", by)
				refused <- err
			}()
			pgtest.Blocked(t, conn, replica)
			require.NoError(t, tx.Commit(t.Context()))
			require.ErrorIs(t, testwait.Chan(t, "the refusal", refused), relays.ErrLive)
			assert.Contains(t, []int{6, 7}, pgtest.Count(t, conn, rowsOfOld))
			assert.Zero(t, pgtest.Count(t, conn, actionsSQL))
		})
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }
