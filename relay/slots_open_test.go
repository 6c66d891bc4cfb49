package relay_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

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
