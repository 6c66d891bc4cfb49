package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

const insertTwo = "INSERT INTO effectonce.outbox (topic) VALUES ('t'), ('t')"

// The exit status and both forms of output say the same, and what is tolerated is well.
func TestStatusSaysWhatWaits(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.Regexp(t, `well\n$`, runOn(t, address, "status", "--interval", "10ms").stdout)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, created_at) SELECT 't', clock_timestamp() - interval '5 min' FROM generate_series(1, 2)")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() - interval '1 hour', 't')")
	execSQL(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch)
		VALUES ('default', 0, E'host-\x1b[31m', clock_timestamp() + interval '1 hour', 3)`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, published) VALUES ('default', 0, 1, 3, 70)`)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	r := runOn(t, address, "status", "--interval", "10ms")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^default +0 +2 +\S+ +0 +70 +0 +"host-\\x1b\[31m" +(1h|59m\d+s) +3$`, r.stdout)
	assert.Regexp(t, `(?m)^scheduled for later: 1, 1 of them overdue, the oldest for 1h[0m\ds]*$`, r.stdout)
	assert.NotRegexp(t, `(?m)^well$`, r.stdout)
	assert.Equal(t, false, runOn(t, address, "status", "--interval", "0s", "--json").object(t)["well"])
	assert.Equal(t, 1, runOn(t, address, "status", "--interval", "0s", "--parked-max", "6").code)
	assert.Equal(t, 1, runOn(t, address, "status", "--interval", "0s", "--age-max", "2h").code)
	assert.Zero(t, runOn(t, address, "status", "--interval", "0s", "--age-max", "2h", "--parked-max", "6").code)
	assert.Contains(t, runOn(t, address, "status", "--interval", "0s", "--relay", "other").stdout, `relay "other": rows wait and it never ran: start "outbox-relay run"`)
}

// Without the tables there is one line with the remedy.
func TestStatusWithoutSchema(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	r := runOn(t, address, "status")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "error: schema effectonce is not installed in this database: run \"outbox-relay migrate up\"\n", r.stderr)
	assert.Equal(t, r, runOn(t, address, "run", "--brokers", "127.0.0.1:1"))
}
