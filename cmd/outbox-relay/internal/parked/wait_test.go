package parked_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func look(t *testing.T, conn *pgx.Conn, wait *parked.Wait) parked.Report {
	t.Helper()
	report, err := wait.Look(t.Context(), conn, schema)
	require.NoError(t, err)
	return report
}

// A message counts as handled when it and the messages behind it are gone. Messages that failed
// again, also those behind it, are named. Messages that an operator discarded since then are no
// success. Messages that arrive later are not waited for.
func TestWaitTellsWhatBecameOfEach(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := park(t, conn, "a failed parked", "a behind behind", "b failed parked", "c failed parked", "c behind behind", "- failed parked", "e failed parked")
	wait := &parked.Wait{}
	assert.Equal(t, parked.Report{Failed: []operator.Failure{}}, look(t, conn, wait))
	wait.Add(retry(t, conn, seqs...).Done)
	exec(t, conn, `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
		SELECT consumer, gen_random_uuid(), topic, partition, 99, key, 'behind', '', 'behind' FROM effectonce.parked_messages WHERE seq = $1`, seqs[0])
	assert.Equal(t, 5, look(t, conn, wait).Pending)

	exec(t, conn, succeed) // a: one is behind it
	assert.Equal(t, 5, look(t, conn, wait).Pending)
	exec(t, conn, succeed) // and now only what came later
	report := look(t, conn, wait)
	assert.Equal(t, 4, report.Pending)
	assert.Equal(t, 1, report.Succeeded)
	exec(t, conn, "DELETE FROM effectonce.parked_messages WHERE \"offset\" = 99")

	exec(t, conn, fail) // b
	exec(t, conn, succeed)
	exec(t, conn, fail) // what is behind c
	report = look(t, conn, wait)
	assert.Equal(t, 2, report.Pending)
	require.Len(t, report.Failed, 2)
	assert.Equal(t, operator.Failure{ID: report.Failed[0].ID, Reason: "failed", Error: "failed again"}, report.Failed[0])
	assert.Equal(t, byte(3), report.Failed[0].ID[15])
	assert.Equal(t, byte(5), report.Failed[1].ID[15])

	discard(t, conn, false, seqs[5])
	report = look(t, conn, wait)
	assert.Equal(t, 1, report.Discarded)
	assert.Equal(t, 1, report.Succeeded)
	exec(t, conn, succeed)
	report = look(t, conn, wait)
	assert.Zero(t, report.Pending)
	assert.Equal(t, 2, report.Succeeded)
	assert.Equal(t, report, look(t, conn, wait))
}
