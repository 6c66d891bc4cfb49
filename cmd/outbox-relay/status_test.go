package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/pgtest"
)

const insertTwo = "INSERT INTO effectonce.outbox (topic) VALUES ('t'), ('t')"

// The exit status and both forms of output say the same.
func TestStatusSaysWhatWaits(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	r := runOn(t, address, "status", "--interval", "10ms")
	assert.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^relay +shard +waiting +oldest +rows/s +published +dead +relayed by +lease left +epoch$`, r.stdout)
	assert.Regexp(t, `(?m)^default +0 +0 +- +- +0 +0 +none +- +0$`, r.stdout)
	assert.Regexp(t, `well\n$`, r.stdout)

	execSQL(t, conn, insertTwo)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch, published)
		VALUES ('default', 0, E'host-\x1b[31m', clock_timestamp() + interval '1 hour', 3, 70)`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		SELECT 'default', n, gen_random_uuid(), 't', '{}', now(), CASE n WHEN 9 THEN 'refused' ELSE 'behind' END, 'e', 'held' FROM generate_series(9, 11) n`)
	r = runOn(t, address, "status", "--interval", "10ms")
	assert.Equal(t, 1, r.code)
	assert.Empty(t, r.stderr)
	assert.Regexp(t, `(?m)^default +0 +2 +\S+ +0 +70 +3 \(behind 2, refused 1\) +"host-\\x1b\[31m" +(1h|59m\d+s) +3$`, r.stdout)
	assert.Contains(t, r.stdout, `not well: relay "default", shard 0: 3 rows in outbox_dead, which hold their keys`)
	assert.NotRegexp(t, `(?m)^well$`, r.stdout)

	v := runOn(t, address, "status", "--interval", "0s", "--json").object(t)
	assert.Equal(t, false, v["well"])
	relay := v["relays"].([]any)[0].(map[string]any)
	assert.InDelta(t, 2, relay["waiting"], 0)
	assert.Equal(t, true, relay["waiting_exact"])
	assert.Equal(t, true, relay["live"])
	assert.Nil(t, relay["rows_per_second"])
	assert.Equal(t, map[string]any{"behind": 2.0, "refused": 1.0}, relay["dead"])

	// Another relay's rows are its own matter.
	v = runOn(t, address, "status", "--interval", "0s", "--json", "--relay", "other").object(t)
	assert.Len(t, v["relays"], 1)
	assert.Contains(t, v["problems"], `relay "other": rows wait and it never ran: start "outbox-relay run"`)
}

// Consumers are part of the picture: what is halted and what is parked is not well, unless so much
// is tolerated.
func TestStatusShowsConsumers(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	execSQL(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, trouble) VALUES ('billing', 'orders', 0, NULL), ('billing', 'orders', 1, 'pauses')")
	r := runOn(t, address, "status", "--interval", "0s")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^consumer +partitions +halted +behind +parked +keys held +oldest parked$`, r.stdout)
	assert.Regexp(t, `(?m)^billing/orders +2 +1 +- +4 \(behind 2, failed 1, permanent 1\) +1 +10m0?\S*$`, r.stdout)
	assert.Regexp(t, `not well: consumer "billing/orders": orders/1 halted for [\d.]+m?s: pauses`, r.stdout)
	assert.Contains(t, r.stdout, `not well: consumer "audit/payments": 2 messages parked, 2 keys held`)
	execSQL(t, conn, "UPDATE effectonce.consumer_positions SET trouble = NULL")
	assert.Equal(t, 1, runOn(t, address, "status", "--interval", "0s", "--parked-max", "5").code)
	assert.Zero(t, runOn(t, address, "status", "--interval", "0s", "--parked-max", "6").code)
	assert.Zero(t, runOn(t, address, "status", "--interval", "0s", "--relay", "default").code)
	v := runOn(t, address, "status", "--interval", "0s", "--json").object(t)
	assert.Equal(t, map[string]any{"too_large": 1.0, "undecodable": 1.0}, v["consuming"].([]any)[0].(map[string]any)["parked"])
}

// A row that waits too long is not well, even if a replica runs.
func TestStatusMindsTheAge(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', clock_timestamp() - interval '5 min')")
	execSQL(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch) VALUES ('default', 0, 'o', clock_timestamp() + interval '1 hour', 1)`)
	assert.Equal(t, 1, runOn(t, address, "status", "--interval", "0s").code)
	assert.Zero(t, runOn(t, address, "status", "--interval", "0s", "--age-max", "1h").code)
}

// Without the tables there is one line with the remedy.
func TestStatusWithoutSchema(t *testing.T) {
	t.Parallel()
	r := runOn(t, pgtest.EmptyDatabase(t), "status")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "error: schema effectonce is not installed in this database: run \"outbox-relay migrate up\"\n", r.stderr)
}

// A role without rights is referred to the doctor, which lists them.
func TestStatusWithoutRights(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	role := plainRole(t, address)
	r := runOn(t, role, "status")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, `"outbox-relay doctor" lists the rights that the role lacks`)
}

// Messages for later are counted; what is overdue for longer than a row may wait is not well.
func TestStatusCountsMessagesForLater(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.NotContains(t, runOn(t, address, "status", "--interval", "0s").stdout, "scheduled")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() + interval '1 hour', 't')")
	r := runOn(t, address, "status", "--interval", "0s")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "scheduled for later: 1\n")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() - interval '1 hour', 't')")
	r = runOn(t, address, "status", "--interval", "0s")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^scheduled for later: 2, 1 of them overdue, the oldest for 1h[0m\ds]*$`, r.stdout)
	assert.Contains(t, r.stdout, "not well: messages for later: 1 due and not in the outbox")
	assert.Zero(t, runOn(t, address, "status", "--interval", "0s", "--age-max", "2h").code)
	v := runOn(t, address, "status", "--interval", "0s", "--json").object(t)["scheduled"].(map[string]any)
	assert.InDelta(t, 2, v["count"], 0)
	assert.InDelta(t, 1, v["overdue"], 0)
}
