package doctor_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// unpublishedSQL is the definition of a waiting row, in the plainest way.
const unpublishedSQL = `
SELECT o.seq FROM effectonce.outbox o, effectonce.outbox_progress p
JOIN effectonce.outbox_ticks t ON t.tick = p.tick LEFT JOIN effectonce.outbox_ticks n ON n.tick = p.next_tick
WHERE p.relay = 'default' AND o.seq > p.floor AND NOT pg_visible_in_snapshot(o.txid, t.snapshot)
  AND NOT (p.next_tick IS NOT NULL AND o.seq <= p.seq AND pg_visible_in_snapshot(o.txid, n.snapshot))
ORDER BY o.seq`

// history is a random run of transactions and ticks, one step after the other.
type history struct {
	*testing.T

	random *rand.Rand
	conn   *pgx.Conn
	open   []*pgx.Conn // in a transaction
	idle   []*pgx.Conn
	ticks  int64
	seqs   map[int64]*pgx.Conn // every row that was ever inserted; nil: its transaction ended
	last   int64
	safe   int64 // every row up to it has an id below the xmax of any later snapshot
}

// step does one thing that a writer or a relay might do.
func (h *history) step() {
	switch n := h.random.IntN(10); {
	case n < 2 && len(h.idle) > 0:
		conn := h.idle[0]
		h.idle = h.idle[1:]
		h.open = append(h.open, conn)
		exec(h.T, conn, "BEGIN")
	case n < 7 && len(h.open) > 0:
		conn := h.open[h.random.IntN(len(h.open))]
		require.NoError(h, conn.QueryRow(h.Context(), "INSERT INTO effectonce.outbox (topic) VALUES ('t') RETURNING seq").Scan(&h.last))
		h.seqs[h.last] = conn
	case n < 9 && len(h.open) > 0:
		i := h.random.IntN(len(h.open))
		conn, rollback := h.open[i], h.random.IntN(4) == 0
		h.open = append(h.open[:i:i], h.open[i+1:]...)
		h.idle = append(h.idle, conn)
		if rollback {
			exec(h.T, conn, "ROLLBACK")
		} else {
			exec(h.T, conn, "COMMIT")
		}
		for seq, owner := range h.seqs {
			if owner == conn {
				h.seqs[seq] = nil
				if rollback {
					delete(h.seqs, seq)
				}
			}
		}
	case n == 9:
		// As when the relay stores progress: a later transaction than that of any row so far has
		// ended.
		if h.random.IntN(2) == 0 {
			exec(h.T, h.conn, "SELECT pg_current_xact_id()")
			h.safe = h.last
		}
		var snapshot string
		require.NoError(h, h.conn.QueryRow(h.Context(), "SELECT pg_current_snapshot()::text").Scan(&snapshot))
		h.ticks++
		exec(h.T, h.conn, "INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) VALUES ($1, $2::text::pg_snapshot, $3)", h.ticks, snapshot, h.safe)
	}
}

// stand moves the cursor to a random place: behind a tick or inside a batch between two.
func (h *history) stand() {
	from := h.random.Int64N(h.ticks + 1)
	var to *int64
	var seq int64
	if h.random.IntN(2) == 0 && from < h.ticks {
		next := from + 1 + h.random.Int64N(h.ticks-from)
		to, seq = &next, h.random.Int64N(h.last+1)
	}
	exec(h.T, h.conn, "UPDATE effectonce.outbox_progress SET tick = $1, next_tick = $2, seq = $3, floor = 0", from, to, seq)
	if h.random.IntN(2) == 0 {
		return
	}
	// The highest floor that is true: below every row that waits or may still appear.
	rows, err := h.conn.Query(h.Context(), unpublishedSQL)
	require.NoError(h, err)
	waiting, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(h, err)
	floor := h.last
	for _, s := range waiting {
		floor = min(floor, s-1)
	}
	for s, owner := range h.seqs {
		if owner != nil {
			floor = min(floor, s-1)
		}
	}
	exec(h.T, h.conn, "UPDATE effectonce.outbox_progress SET floor = $1", floor)
}

// The rows that count as waiting are exactly those of the cursor's definition, wherever the cursor
// is and however transactions overlap the ticks.
func TestWaitingIsWhatTheCursorHasNotPublished(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			address := pgtest.Database(t)
			h := &history{T: t, random: rand.New(rand.NewPCG(seed, 1)), conn: connect(t, address), seqs: map[int64]*pgx.Conn{}}
			for range 6 {
				h.idle = append(h.idle, connect(t, address))
			}
			exec(t, h.conn, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('default', 0)")
			compared := 0
			for i := range 600 {
				h.step()
				if i%10 != 9 {
					continue
				}
				h.stand()
				rows, err := h.conn.Query(t.Context(), unpublishedSQL)
				require.NoError(t, err)
				want, err := pgx.CollectRows(rows, pgx.RowTo[int64])
				require.NoError(t, err)
				got, err := doctor.WaitingSeqs(t.Context(), h.conn, "effectonce", 10_000)
				require.NoError(t, err)
				require.ElementsMatch(t, want, got["default"])
				compared += len(want)
			}
			require.Positive(t, compared, "nothing ever waited")
			for _, conn := range h.open {
				exec(t, conn, "ROLLBACK")
			}
		})
	}
}

// A huge backlog costs no more than a moderate one: the count stops, and an estimate that is not
// too low takes its place.
func TestHugeBacklogIsEstimated(t *testing.T) {
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
		"between batches":   "INSERT INTO effectonce.outbox_progress (relay, shard, tick) VALUES ('default', 0, 1)",
		"inside of a batch": "INSERT INTO effectonce.outbox_progress (relay, shard, tick, next_tick, seq) VALUES ('default', 0, 0, 1, 30005)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := pgtest.Database(t)
			conn, late := connect(t, address), connect(t, address)
			exec(t, late, "BEGIN")
			exec(t, late, "INSERT INTO effectonce.outbox (topic) SELECT 'late' FROM generate_series(1, 5)")
			exec(t, conn, "INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 30000)")
			exec(t, conn, `INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) VALUES (1, pg_current_snapshot(), 0)`)
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
