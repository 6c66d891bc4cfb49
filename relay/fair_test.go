package relay_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

const laterSQL = `SELECT count(*) FROM effectonce.outbox_scheduled`

// Property: messages for later are moved, all topics of an ID together, however many IDs have rows
// that a move finds far behind each other.
func TestTopicsOfAnIDFarApartAreMoved(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	const ids = relay.PromoteRowsMax + 100
	var all []uuid.UUID
	for range ids {
		all = append(all, uuid.New())
	}
	for _, topic := range []string{"orders", "audit", "billing", "search", "mail"} {
		var msgs []outbox.Message
		for _, id := range all {
			msgs = append(msgs, outbox.Message{ID: id, Topic: topic, DeliverAt: time.Unix(1000, 0)})
		}
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Publish(ctx, tx, msgs...) }))
	}
	r := newRelay(t, pool, relay.Config{})
	for waiting := 5 * ids; waiting > 0; {
		_, moved, err := r.PromotePage(ctx, relay.PromoteRowsMax)
		require.NoError(t, err)
		require.Positive(t, moved)
		require.LessOrEqual(t, moved, 2*relay.PromoteRowsMax)
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM (SELECT FROM effectonce.outbox GROUP BY id HAVING count(*) <> 5) incomplete`))
		waiting -= moved
		require.Equal(t, waiting, one[int](t, pool, laterSQL))
	}
}

// Property: a session that has locked rows of many messages for later, or one row of each, delays
// no others. When it ends, its own are moved.
func TestLockedMessagesForLaterDelayNoOthers(t *testing.T) {
	t.Parallel()
	for name, locks := range map[string]string{"every row": `true`, "one topic of each": `topic = 'a'`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, pool := t.Context(), pgtest.Pool(t)
			must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, id, topic) SELECT '2000-01-01', id, topic
				FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, 2500)) AS i, unnest(ARRAY['a', 'b']) AS topic`)
			tx, err := pool.Begin(ctx)
			require.NoError(t, err)
			_, err = tx.Exec(ctx, `DELETE FROM effectonce.outbox_scheduled WHERE `+locks)
			require.NoError(t, err)
			must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic) SELECT '2001-01-01', 'others' FROM generate_series(1, 1500)`)
			r := newRelay(t, pool, relay.Config{})
			require.NoError(t, r.PromoteDue(ctx))
			require.Equal(t, 1500, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox WHERE topic = 'others'`))
			require.Equal(t, 5000, one[int](t, pool, laterSQL))
			require.NoError(t, tx.Rollback(ctx))
			require.NoError(t, r.PromoteDue(ctx))
			require.Zero(t, one[int](t, pool, laterSQL))
			require.Equal(t, 6500, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`))
		})
	}
}
