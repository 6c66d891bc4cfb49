package dead_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/dead"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// A row counts as published when it and the rows behind it are gone. Rows that are held again, also
// those behind it, are named. Rows that an operator discarded since then do not count as published.
// Rows that die later are not waited for.
func TestWaitTellsWhatBecameOfEach(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := insertDead(t, conn, "a refused held", "a behind behind", "b refused held", "c refused held", "c behind behind", "- refused held", "e refused held")
	wait := &dead.Wait{}
	look := func() dead.Report {
		report, err := wait.Look(t.Context(), conn, schema)
		require.NoError(t, err)
		return report
	}
	publish := func(seq int) { exec(t, conn, "DELETE FROM effectonce.outbox_dead WHERE seq = $1", seq) }
	hold := func(seq int) {
		exec(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held', reason = 'refused', error = 'refused again' WHERE seq = $1", seq)
	}
	assert.Equal(t, dead.Report{Failed: []operator.Failure{}}, look())
	wait.Add(retry(t, conn, places...).Done)
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
		VALUES ('default', 99, gen_random_uuid(), 'orders', 'a', '{}', now(), 'behind', '', 'behind')`)
	assert.Equal(t, 5, look().Pending)
	publish(1) // one is behind it
	assert.Equal(t, 5, look().Pending)
	publish(2) // and now only what came later
	report := look()
	assert.Equal(t, 4, report.Pending)
	assert.Equal(t, 1, report.Published)
	hold(3)
	publish(4)
	hold(5) // what is behind 4
	report = look()
	assert.Equal(t, 2, report.Pending)
	require.Len(t, report.Failed, 2)
	assert.Equal(t, operator.Failure{ID: report.Failed[0].ID, Reason: "refused", Error: "refused again"}, report.Failed[0])
	assert.Equal(t, byte(3), report.Failed[0].ID[15])
	assert.Equal(t, byte(5), report.Failed[1].ID[15])
	exec(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held' WHERE seq = 6")
	discard(t, conn, false, places[5])
	publish(7)
	report = look()
	assert.Equal(t, 1, report.Discarded)
	assert.Equal(t, 2, report.Published)
	assert.Zero(t, report.Pending)
	assert.Equal(t, report, look())
}
