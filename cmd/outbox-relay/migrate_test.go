package main_test

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

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

// Row O39 of guarantees.md: ten processes that migrate at once all succeed; one works, the others
// wait and find nothing to do. Five times.
func TestTenProcessesMigrateAtOnce(t *testing.T) {
	t.Parallel()
	for range 5 {
		address := pgtest.EmptyDatabase(t)
		var group errgroup.Group
		var outputs []*output
		for range 10 {
			cmd, written := process(t, map[string]string{"DATABASE_URL": address}, "migrate", "up")
			outputs = append(outputs, written)
			require.NoError(t, cmd.Start())
			group.Go(cmd.Wait)
		}
		err := group.Wait()
		for _, o := range outputs {
			if err != nil {
				t.Log(o)
			}
		}
		require.NoError(t, err)
		for _, o := range outputs {
			assert.Contains(t, o.String(), fmt.Sprintf("schema effectonce: version %d", latest(t)))
		}
		conn := connect(t, address)
		require.NoError(t, migrations.Check(t.Context(), conn, migrations.Options{}))
		var rows int
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.schema_version").Scan(&rows))
		assert.Equal(t, 1, rows)
	}
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

// A database that a newer release migrated, and that works with this program, is used as it is.
func TestCompatibleSchemaIsUsed(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), "UPDATE effectonce.schema_version SET version = version + 7")
	for _, tc := range []struct {
		args []string
		text string
	}{
		{[]string{"migrate", "up"}, fmt.Sprintf("version %d, nothing to do", latest(t)+7)},
		{[]string{"migrate", "status"}, "newer, and this program works with it"},
		{[]string{"status", "--interval", "0s"}, ""},
	} {
		r := runOn(t, address, tc.args...)
		assert.Zero(t, r.code, "%v: %s", tc.args, r.stderr)
		assert.Contains(t, r.stdout, tc.text)
	}
	assert.Equal(t, "compatible", runOn(t, address, "migrate", "status", "--json").object(t)["state"])
	assert.Contains(t, runOn(t, address, "doctor").stdout, "update this program when you can")
}

// "migrate up" says who holds the locks that it waits for, and for how long it waits.
func TestMigrateUpSaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, 4))
	execSQL(t, conn, "SET application_name = 'night report'; BEGIN; LOCK TABLE effectonce.consumers IN ROW EXCLUSIVE MODE")
	r := runOn(t, address, "migrate", "up", "--lock-wait", "4s")
	assert.Equal(t, 1, r.code)
	held := fmt.Sprintf("pid %d (night report, role ", conn.PgConn().PID())
	assert.Regexp(t, `(?s)level=WARN msg="migration waits for a lock; other programs continue" migration=0005_promise held_by="`+regexp.QuoteMeta(held)+`.*gave up after \d+s: waited for a lock held by `+regexp.QuoteMeta(held), r.stderr)

	_, err := connect(t, address).PgConn().Exec(t.Context(), run(t, nil, "migrate", "print", "--version", "5").stdout).ReadAll()
	require.ErrorContains(t, err, "SQLSTATE 55P03", "psql gives up as well")
	execSQL(t, conn, "COMMIT")
	assert.Zero(t, runOn(t, address, "migrate", "up").code)
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

// Row O25 of guarantees.md: a database that takes no writes is refused with the remedy.
func TestMigrateRefusesReadOnly(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	conn := connect(t, address)
	execSQL(t, conn, "ALTER DATABASE "+pgx.Identifier{conn.Config().Database}.Sanitize()+" SET default_transaction_read_only = on")
	r := runOn(t, address, "migrate", "up")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "read-only")
}

// The printed SQL does what "migrate up" does, so that either can continue after the other, and
// refuses to run on another version.
func TestPrintedMigrationsRun(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"effectonce", "another_1"} {
		t.Run(schema, func(t *testing.T) {
			t.Parallel()
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
			assert.Zero(t, runOn(t, address, "migrate", "status", "--schema", schema).code)
			assert.Contains(t, runOn(t, address, "migrate", "up", "--schema", schema).stdout, "nothing to do")
			execSQL(t, conn, "INSERT INTO "+schema+".outbox (topic) VALUES ('t')")

			_, err = conn.PgConn().Exec(t.Context(), printed.stdout).ReadAll()
			require.ErrorContains(t, err, fmt.Sprintf("the schema has version %d, migration 1 needs version 0", latest(t)))
			execSQL(t, conn, "ROLLBACK")
			assert.Zero(t, runOn(t, address, "migrate", "status", "--schema", schema).code)
		})
	}
}

var goodSchema = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,48}$`)

// Row S1 of guarantees.md: a schema name is either one of the plain ones or refused before any SQL
// is made of it.
func FuzzSchemaName(f *testing.F) {
	for _, name := range []string{
		"effectonce", "other", "a", "_", "user", "order", "x9", strings.Repeat("a", 49), strings.Repeat("a", 50),
		`we""ird; DROP TABLE x`, `we"ird`, "a;b", "a b", "A", "9a", "pg_temp", "pg_catalog", "ä", "a\x00b", "a\n", "$1", "''", "--", "VERSION",
	} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if name == "" {
			return // an empty variable is none
		}
		r := run(t, map[string]string{"OUTBOX_SCHEMA": name}, "migrate", "print")
		if goodSchema.MatchString(name) && !strings.HasPrefix(name, "pg_") {
			require.Zero(t, r.code, r.stderr)
			if name != migrations.DefaultSchema {
				require.Contains(t, r.stdout, `CREATE TABLE "`+name+`".outbox (`)
			}
			return
		}
		require.Equal(t, 2, r.code)
		require.Empty(t, r.stdout)
	})
}

// Row S1 of guarantees.md: every name that is taken works, words of SQL as well, and one that is
// refused changes nothing.
func TestSchemaNamesInSQL(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	conn := connect(t, address)
	execSQL(t, conn, "CREATE TABLE x AS SELECT 1")
	for _, name := range []string{"order", "user", "_", strings.Repeat("a", 49)} {
		r := runOn(t, address, "migrate", "up", "--schema", name)
		require.Zero(t, r.code, "%s: %s", name, r.stderr)
		assert.Zero(t, runOn(t, address, "migrate", "status", "--schema", name).code)
		r = runOn(t, address, "status", "--interval", "0s", "--schema", name)
		assert.Zero(t, r.code, r.stderr)
	}
	for _, name := range []string{`we""ird; DROP TABLE x`, `x"; DROP TABLE x; --`, "x; DROP TABLE x"} {
		for _, args := range [][]string{{"migrate", "up"}, {"migrate", "status"}, {"status"}, {"doctor"}, {"run", "--brokers", "127.0.0.1:1"}} {
			assert.Equal(t, 2, runOn(t, address, append(args, "--schema", name)...).code)
		}
	}
	execSQL(t, conn, "SELECT FROM x")
}
