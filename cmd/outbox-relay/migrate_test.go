package main_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// latest is this program's schema version.
func latest(t *testing.T) int {
	t.Helper()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	return len(all)
}

// The way up, the look at it, and the way down, with their exit codes.
func TestMigrateUpStatusDown(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	r := runOn(t, address, "migrate", "status")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, `not installed: run "outbox-relay migrate up"`)
	assert.Equal(t, "missing", runOn(t, address, "migrate", "status", "--json").object(t)["state"])

	up := runOn(t, address, "migrate", "up", "--json").object(t)
	assert.Equal(t, map[string]any{"schema": "effectonce", "from": 0.0, "to": float64(latest(t))}, up)
	r = runOn(t, address, "migrate", "up")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "nothing to do")
	r = runOn(t, address, "migrate", "status")
	assert.Zero(t, r.code)

	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('t'), ('t')")
	r = run(t, map[string]string{"DATABASE_URL": address, "OUTBOX_YES": "true"}, "migrate", "down", "--to", "0")
	assert.Equal(t, 2, r.code, "consent must not come from the environment")
	assert.Contains(t, r.stderr, "would lose 2 unpublished outbox rows and 0 dead rows, 0 parked messages, the claims of 0 consumers")
	assert.Contains(t, r.stderr, "--yes")
	r = runOn(t, address, "migrate", "down", "--yes")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "--to is missing")
	r = runOn(t, address, "migrate", "down", "--to", strconv.Itoa(latest(t)), "--yes")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "nothing to do")
	require.NoError(t, migrations.Check(t.Context(), conn, migrations.Options{}))

	r = runOn(t, address, "migrate", "down", "--to", "0", "--yes")
	assert.Zero(t, r.code, r.stderr)
	require.ErrorIs(t, migrations.Check(t.Context(), conn, migrations.Options{}), migrations.ErrTooOld)
	r = runOn(t, address, "migrate", "down", "--to", "1", "--yes")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "goes forward")
}

// A database of a newer release that does not work with this program is left alone, with the
// remedy, by everything that would use it.
func TestNewerSchemaIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), "UPDATE effectonce.schema_version SET version = version + 7; UPDATE effectonce.schema_compatibility SET oldest = 1000")
	for _, args := range [][]string{{"migrate", "up"}, {"status"}, {"run", "--brokers", "127.0.0.1:1"}} {
		r := runOn(t, address, args...)
		assert.Equal(t, 1, r.code, args)
		assert.Contains(t, r.stderr, "database schema is too new", args)
		assert.Contains(t, r.stderr, "update this program", args)
		assert.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
	}
	r := runOn(t, address, "migrate", "status", "--json")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "new", r.object(t)["state"])
}

// The printed SQL does what "migrate up" does, so that either can continue after the other, and
// refuses to run on another version.
func TestPrintedMigrationsRun(t *testing.T) {
	t.Parallel()
	const schema = "another_1"
	address := pgtest.EmptyDatabase(t)
	conn := connect(t, address)
	printed := run(t, nil, "migrate", "print", "--schema", schema)
	require.Zero(t, printed.code)
	var one strings.Builder
	for version := range latest(t) {
		one.WriteString(run(t, nil, "migrate", "print", "--schema", schema, "--version", strconv.Itoa(version+1)).stdout)
	}
	assert.Equal(t, printed.stdout, one.String())
	_, err := conn.PgConn().Exec(t.Context(), printed.stdout).ReadAll()
	require.NoError(t, err)
	assert.Contains(t, runOn(t, address, "migrate", "up", "--schema", schema).stdout, "nothing to do")
	execSQL(t, conn, "INSERT INTO "+schema+".outbox (topic) VALUES ('t')")

	_, err = conn.PgConn().Exec(t.Context(), printed.stdout).ReadAll()
	require.ErrorContains(t, err, fmt.Sprintf("the schema has version %d, migration 1 needs version 0", latest(t)))
	execSQL(t, conn, "ROLLBACK")
	assert.Zero(t, runOn(t, address, "migrate", "status", "--schema", schema).code)
}
