package doctor_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// A huge backlog costs no more than a moderate one: the count stops, and an estimate that is not
// too low takes its place.
func TestHugeBacklogIsEstimated(t *testing.T) {
	longtest.Only(t, "105,000 rows")
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	const rows = doctor.CountMax + 5000
	exec(t, conn, "INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, $1)", rows)
	status, err := doctor.ReadStatus(t.Context(), conn, "effectonce", doctor.StatusOptions{})
	require.NoError(t, err)
	require.Len(t, status.Relays, 1)
	assert.False(t, status.Relays[0].WaitingExact)
	assert.Equal(t, int64(rows), status.Relays[0].Waiting)
	assert.False(t, status.Well)
}

// The count reads what waits, not what was published, also in the middle of a batch and behind a
// tick that knows nothing of seq: two million old rows cost nothing. Here there are 30,000 old ones
// and ten that wait, half of them late.
func TestCountReadsOnlyWhatWaits(t *testing.T) {
	t.Parallel()
	for name, progress := range map[string]string{
		"between batches":   "INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick) VALUES ('default', 0, 1, 0, 1)",
		"inside of a batch": "INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq) VALUES ('default', 0, 1, 0, 0, 1, 30005)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := pgtest.Database(t)
			conn, late := connect(t, address), connect(t, address)
			exec(t, late, "BEGIN")
			exec(t, late, "INSERT INTO effectonce.outbox (topic) SELECT 'late' FROM generate_series(1, 5)")
			exec(t, conn, "INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 30000)")
			exec(t, conn, `INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) VALUES (1, pg_current_snapshot(), 0)`)
			exec(t, conn, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('default', 0)")
			exec(t, conn, progress)
			exec(t, conn, "INSERT INTO effectonce.outbox (topic) SELECT 'new' FROM generate_series(1, 5)")
			exec(t, late, "COMMIT")
			exec(t, conn, "ANALYZE effectonce.outbox")

			seqs, err := doctor.WaitingSeqs(t.Context(), conn, "effectonce", 100)
			require.NoError(t, err)
			require.Equal(t, []int64{1, 2, 3, 4, 5, 30006, 30007, 30008, 30009, 30010}, seqs["default"])
			read, err := doctor.ExplainWaiting(t.Context(), conn, "effectonce", doctor.CountMax)
			require.NoError(t, err)
			var plans []struct{ Plan plan }
			require.NoError(t, json.Unmarshal(read, &plans))
			assert.LessOrEqual(t, plans[0].Plan.rowsOfOutbox(), 20.0, "%s", read)
		})
	}
}

// plan is a node of EXPLAIN (ANALYZE, FORMAT JSON).
type plan struct {
	Relation string  `json:"Relation Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Removed  float64 `json:"Rows Removed by Filter"`
	Plans    []plan  `json:"Plans"`
}

func (p plan) rowsOfOutbox() float64 {
	read := 0.0
	if p.Relation == "outbox" {
		read = (p.Rows + p.Removed) * p.Loops
	}
	for _, sub := range p.Plans {
		read += sub.rowsOfOutbox()
	}
	return read
}
