package pipeline_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
)

func counted(t *testing.T, conn *pgx.Conn, limit int) []pipeline.Progress {
	t.Helper()
	all, err := pipeline.Shards(t.Context(), conn, "effectonce", nil)
	require.NoError(t, err)
	require.NoError(t, pipeline.Count(t.Context(), conn, "effectonce", all, limit))
	return all
}

// Property: wherever shards are, between two ticks or inside of a batch, beside transactions that
// were open at a tick, behind a restore, or never taken, the count is that of the rows that are not
// published. A count that has to stop says so, and is near.
func TestCountsAgreeWithWhatIsPublished(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, 0))
			address := pgtest.Database(t)
			conn := connect(t, address)
			exec(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 4)")
			const insert = "INSERT INTO effectonce.outbox (topic, key) SELECT 't', convert_to(random()::text, 'UTF8') FROM generate_series(1, $1::int)"
			var open []*pgx.Conn
			ticks := 0
			for range 12 {
				exec(t, conn, insert, random.IntN(40))
				switch random.IntN(3) {
				case 0:
					late := connect(t, address)
					exec(t, late, "BEGIN")
					exec(t, late, insert, 1+random.IntN(5))
					open = append(open, late)
				case 1:
					if len(open) > 0 {
						exec(t, open[0], "COMMIT")
						open = open[1:]
					}
				}
				exec(t, conn, "INSERT INTO effectonce.outbox_ticks (snapshot, seq_last) SELECT pg_current_snapshot(), last_value FROM effectonce.outbox_seq_seq")
				ticks++
			}
			for _, late := range open {
				exec(t, late, "COMMIT")
			}
			for shard := range 3 { // of the fourth nothing is known
				system := "NULL"
				if random.IntN(6) == 0 {
					system = "1"
				}
				exec(t, conn, "INSERT INTO effectonce.outbox_progress (relay, shard, shards, epoch, system_identifier) VALUES ('default', $1, 4, 1, "+system+")", shard)
				tick := random.IntN(ticks)
				next, seq := any(nil), 0
				if random.IntN(2) == 0 {
					next, seq = tick+1+random.IntN(ticks-tick), random.IntN(300)
				}
				exec(t, conn, "INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor) VALUES ('default', $1, 1, 1, $2, $3, $4, $5)", shard, tick, next, seq, random.IntN(30))
			}
			all := counted(t, conn, 10_000)
			require.Len(t, all, 4)
			rows, err := conn.Query(t.Context(), "WITH "+pipeline.CutCTE+" SELECT count(o.seq) FILTER (WHERE NOT "+pipeline.CutPublished+") FROM generate_series(0, 3) n LEFT JOIN effectonce.outbox o ON o.shard % 4 = n "+
				pipeline.CutJoin+" GROUP BY n ORDER BY n", pipeline.CutOf(all).Args()...)
			require.NoError(t, err)
			want, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			require.NoError(t, err)
			for i, shard := range all {
				assert.True(t, shard.WaitingExact)
				assert.Equal(t, want[i], shard.Waiting, "%+v", shard)
				assert.Equal(t, shard.Waiting > 0, shard.OldestWaitingSeconds > 0)
			}
		})
	}
}

// A huge backlog costs no more than a moderate one, whatever the number of shards: the count stops,
// and an estimate takes its place.
func TestHugeBacklogIsEstimated(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 32)")
	exec(t, conn, "INSERT INTO effectonce.outbox (topic, key) SELECT 't', convert_to(n::text, 'UTF8') FROM generate_series(1, 20000) n")
	var sum int64
	for _, shard := range counted(t, conn, 4000) {
		assert.False(t, shard.WaitingExact)
		assert.InDelta(t, 625, shard.Waiting, 200)
		assert.Positive(t, shard.OldestWaitingSeconds)
		sum += shard.Waiting
	}
	assert.InDelta(t, 20000, sum, 100)
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

			all := counted(t, conn, 100)
			require.Equal(t, []any{int64(10), true}, []any{all[0].Waiting, all[0].WaitingExact})
			sql, args := pipeline.CountSQL(all, pipeline.CountMax)
			plan := pgtest.Plan(t, conn, sql, args...)
			assert.Regexp(t, `rows=1[05]\b`, plan)
			assert.NotRegexp(t, `rows=\d{4}|Removed by Filter: \d{4}`, plan, "it reads none of the old rows")

			exec(t, conn, "INSERT INTO effectonce.outbox (topic) SELECT 'newest' FROM generate_series(1, 30000)")
			sql, args = pipeline.CountSQL(all, 100)
			assert.NotRegexp(t, `rows=\d{4}`, pgtest.Plan(t, conn, sql, args...), "nor more than the limit of those that the statistics do not know")
		})
	}
}
