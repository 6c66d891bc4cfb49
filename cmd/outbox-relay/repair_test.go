package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: a sequence that went back is not well in the status, a failure with the exact command
// for the doctor, described by repair --dry-run, which changes nothing, and repaired by repair,
// which is written down. Row O40 of guarantees.md.
func TestSequenceIsRepaired(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	r := runOn(t, address, "repair", "--dry-run")
	assert.Zero(t, r.code, r.stderr)
	assert.Equal(t, "nothing to repair: rows have numbers up to 0, ticks up to 0\n", r.stdout)
	assert.Contains(t, runOn(t, address, "doctor").stdout, "ok    status: ")
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 7)`)
	execSQL(t, conn, `TRUNCATE effectonce.outbox RESTART IDENTITY`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, lease_until) VALUES ('default', 0, clock_timestamp() + interval '1 hour')`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, floor) VALUES ('default', 0, 1, 0, 7)`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic) VALUES ('t')`)
	for _, command := range []string{"doctor", "status"} {
		r := runOn(t, address, command)
		assert.Equal(t, 1, r.code)
		assert.Contains(t, r.stdout, "the sequence of outbox.seq is at 1, and 7 was given before")
		assert.Contains(t, r.stdout, "outbox-relay repair")
	}
	r = runOn(t, address, "repair", "--dry-run")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "the sequence of rows is at 1, the largest known number is 7")
	r = runOn(t, address, "repair", "--by", "ana", "--why", "a copy")
	assert.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stdout, "repaired: 1 rows got new numbers; the sequence of rows was at 1 and is at 8")
	var seq int64
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT seq FROM effectonce.outbox`).Scan(&seq))
	assert.EqualValues(t, 8, seq)
	assert.Regexp(t, `\(ana\) +outbox.repair +.*a copy`, runOn(t, address, "actions", "list").stdout)
	assert.Equal(t, "nothing to repair\n", runOn(t, address, "repair").stdout)
	assert.NotContains(t, runOn(t, address, "doctor").stdout, "given before")
}
