package doctor_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Messages for later that no relay moves when they are due are a problem as soon as they are older
// than rows may be; those that are not due are only counted.
func TestOverdueMessagesAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	opts := doctor.StatusOptions{AgeMax: 2 * time.Minute}
	exec(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() + interval '1 hour', 't'), (clock_timestamp() - interval '30 s', 't')")
	status := readStatus(t, conn, opts)
	assert.True(t, status.Well, status.Problems)
	assert.Equal(t, []int64{2, 1}, []int64{status.Scheduled.Count, status.Scheduled.Overdue})
	exec(t, conn, "UPDATE effectonce.outbox_scheduled SET due_at = due_at - interval '2 minutes'")
	status = readStatus(t, conn, opts)
	assert.False(t, status.Well)
	assert.Contains(t, status.Problems[0], "messages for later: 1 due and not in the outbox, the oldest for longer than 2m")
}

// A shard that no replica ever took has published nothing: its rows wait, whatever the others did,
// and dead rows are counted once, in their shard.
func TestShardsThatWereNeverLeasedCount(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "INSERT INTO effectonce.outbox (topic, key) SELECT 't', convert_to(n::text, 'UTF8') FROM generate_series(1, 100) n")
	var odd int64
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox WHERE shard % 2 = 1").Scan(&odd))
	exec(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 2)")
	status := readStatus(t, conn, doctor.StatusOptions{})
	require.Len(t, status.Relays, 2)
	assert.Equal(t, []int64{100 - odd, odd}, []int64{status.Relays[0].Waiting, status.Relays[1].Waiting})
	assert.Contains(t, status.Problems[0], "rows wait and it never ran")

	exec(t, conn, "INSERT INTO effectonce.outbox_ticks (snapshot, seq_last) VALUES (pg_current_snapshot(), 100)")
	exec(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, shards, epoch, lease_until) VALUES ('default', 0, 2, 1, clock_timestamp() + interval '1 minute')`)
	exec(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick) VALUES ('default', 0, 1, 1, 1)`)
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
		SELECT 'default', o.seq, o.id, o.topic, o.key, '{}', now(), 'refused', 'e', 'held' FROM effectonce.outbox o`)
	status = readStatus(t, conn, doctor.StatusOptions{})
	for shard, want := range [][]int64{{0, 100 - odd}, {odd, odd}} {
		assert.Equal(t, want, []int64{status.Relays[shard].Waiting, status.Relays[shard].Dead["refused"]}, shard)
	}
	assert.Contains(t, strings.Join(status.Problems, "\n"), `relay "default", shard 1: rows wait and no replica ever took it`)
	backlog, err := doctor.ReadBacklog(t.Context(), conn, "effectonce", "default", nil, 1000)
	require.NoError(t, err)
	assert.Equal(t, odd, backlog.Waiting)
}
