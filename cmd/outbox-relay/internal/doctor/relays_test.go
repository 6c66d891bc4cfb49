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

// A relay under a disused name, whose rows the outbox would keep indefinitely, is a warning with
// the command that publishes them. A relay that works, stands by, or stopped a moment ago is none.
func TestOldRelaysAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	check := func() []doctor.Finding { return doctor.Relays(t.Context(), conn, "effectonce", time.Minute) }
	require.Equal(t, doctor.OK, only(t, check()).Severity)
	exec(t, conn, `INSERT INTO effectonce.outbox_relays (relay, shards, created_at)
		SELECT unnest(ARRAY['works', 'stands by', 'stopped', 'it''s old', 'never leased']), 2, clock_timestamp() - interval '3 hours'`)
	exec(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, shards, lease_until) VALUES
		('works', 1, 2, clock_timestamp() + interval '10 s'), ('stands by', 0, 2, NULL), ('stopped', 0, 2, NULL), ('it''s old', 0, 2, clock_timestamp() - interval '61 minutes')`)
	exec(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, at) VALUES
		('works', 1, 1, 0, clock_timestamp() - interval '2 hours'), ('stands by', 0, 1, 0, clock_timestamp() - interval '2 hours'),
		('stopped', 0, 1, 0, clock_timestamp() - interval '59 minutes'), ('it''s old', 0, 1, 0, clock_timestamp() - interval '2 hours')`)
	exec(t, conn, `INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until) VALUES
		('stands by', 'a', clock_timestamp() + interval '10 s'), ('it''s old', 'b', clock_timestamp() - interval '62 minutes')`)
	found := check()
	require.Len(t, found, 2)
	assert.Contains(t, found[0].Message, `no replica of relay "it's old" has run for 1h1m`)
	assert.Contains(t, found[0].Remedy, `outbox-relay run --relay 'it'\''s old'`)
	assert.Contains(t, found[1].Message, `relay "never leased" has run for 3h`)
	for _, f := range found {
		assert.Equal(t, doctor.Warn, f.Severity)
		harmless(t, f)
	}
}

// Property: a replica that does not reach Kafka, or whose shard hangs, is a failure that names it
// and what it waits for; one that is well, of an earlier release, or gone is none. Rows O45, O46 of
// guarantees.md.
func TestReplicasThatCannotPublishAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	check := func() []doctor.Finding { return doctor.Replicas(t.Context(), conn, "effectonce") }
	exec(t, conn, `INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, reached_at, state, problem) VALUES
		('r', 'well', clock_timestamp() + interval '1 hour', clock_timestamp(), 'publishing', NULL),
		('r', 'old', clock_timestamp() + interval '1 hour', NULL, NULL, NULL),
		('r', 'gone', clock_timestamp() - interval '1 s', NULL, 'stuck', 'x')`)
	f := only(t, check())
	require.Equal(t, doctor.OK, f.Severity)
	require.Contains(t, f.Message, "2 run")
	exec(t, conn, `INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, reached_at, state, problem) VALUES
		('r', 'cut off', clock_timestamp() + interval '1 hour', NULL, 'kafka_away', 'unable to dial'),
		('r', 'hung', clock_timestamp() + interval '1 hour', clock_timestamp(), 'stuck', '1 shards make no progress'),
		('r', 'sink', clock_timestamp() + interval '1 hour', clock_timestamp() - interval '1 minute', 'sink_away', 'no answer')`)
	found := check()
	require.Len(t, found, 3)
	for i, want := range []string{`"cut off" of relay "r" waits for Kafka, which it has never reached: unable`, `"hung" of relay "r" is stuck`, `waits for its sink, which it reached 1m`} {
		assert.Equal(t, doctor.Fail, found[i].Severity)
		assert.Contains(t, found[i].Message, want)
		harmless(t, found[i])
	}
}

// Slots of the outbox that do not turn, or are not truncated, are warnings; how long rows are meant
// to be kept is taken into account, and an outbox without rows has nothing to turn.
func TestSlotsThatDoNotTurnAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	check := func(keep time.Duration) []doctor.Finding { return doctor.Slots(t.Context(), conn, "effectonce", keep) }
	exec(t, conn, "UPDATE effectonce.outbox_slots SET turned_to = turned_to - interval '1 day'")
	require.Equal(t, doctor.OK, only(t, check(10*time.Minute)).Severity)
	const old = "INSERT INTO effectonce.outbox (topic, created_at, slot) VALUES ('t', clock_timestamp() - interval '31 minutes', $1), ('t', clock_timestamp(), $1)"
	exec(t, conn, old, 0)
	f := only(t, check(10*time.Minute))
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Contains(t, f.Message, "the outbox does not switch away from slot 0 (0 MiB): its first row is 31m")
	exec(t, conn, remedy(f))
	require.Equal(t, doctor.OK, only(t, check(11*time.Minute)).Severity)
	exec(t, conn, old, 2)
	found := check(10 * time.Minute)
	require.Len(t, found, 2)
	assert.Contains(t, found[1].Message, "slot 2 of the outbox (0 MiB) is not truncated")
}

// Messages for later that no relay moves when they are due are a warning and, in the status, a
// problem as soon as they are older than rows may be; those that are not due are only counted.
func TestOverdueMessagesAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	later := func() doctor.Finding { return only(t, doctor.Later(t.Context(), conn, "effectonce")) }
	opts := doctor.StatusOptions{AgeMax: 2 * time.Minute}
	exec(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() + interval '1 hour', 't'), (clock_timestamp() - interval '30 s', 't')")
	assert.Equal(t, doctor.OK, later().Severity)
	status := readStatus(t, conn, opts)
	assert.True(t, status.Well, status.Problems)
	assert.Equal(t, []int64{2, 1}, []int64{status.Scheduled.Count, status.Scheduled.Overdue})
	exec(t, conn, "UPDATE effectonce.outbox_scheduled SET due_at = due_at - interval '2 minutes'")
	assert.Equal(t, doctor.Warn, later().Severity)
	assert.Contains(t, later().Message, "messages for later: 1 due")
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
