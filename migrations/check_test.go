package migrations_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// A program can check at its start whether the database has the schema that it was built for, and
// if not, gets the remedy. The check changes nothing.
func TestCheckTellsTheRemedy(t *testing.T) {
	t.Parallel()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	latest := len(all)
	const newer = "UPDATE effectonce.schema_version SET version = version + 1"
	for _, tc := range []struct {
		name    string
		sql     string
		current int
		oldest  int
		is      error
		text    string
	}{
		{"right", "", latest, 0, nil, ""},
		{"no schema", "DROP SCHEMA effectonce CASCADE", 0, 0, migrations.ErrTooOld, `schema effectonce is not installed in this database: run "outbox-relay migrate up"`},
		{"no version table", "DROP TABLE effectonce.schema_version", 0, 0, migrations.ErrTooOld, `schema effectonce is not installed in this database: run "outbox-relay migrate up"`},
		{"no version", "DELETE FROM effectonce.schema_version", 0, 0, migrations.ErrTooOld, "is not installed"},
		{"version 0", "UPDATE effectonce.schema_version SET version = 0", 0, 0, migrations.ErrTooOld, "is not installed"},
		{"older", "UPDATE effectonce.schema_version SET version = 1", 1, 0, migrations.ErrTooOld, fmt.Sprintf(`has version 1, this program needs %d: run "outbox-relay migrate up"`, latest)},
		{"newer, and this program works with it", newer, latest + 1, 3, nil, ""},
		{"newer, from this version on", newer + fmt.Sprintf("; UPDATE effectonce.schema_compatibility SET oldest = %d", latest), latest + 1, latest, nil, ""},
		{
			"too new", newer + "; UPDATE effectonce.schema_compatibility SET oldest = 1000", latest + 1, 1000, migrations.ErrTooNew,
			fmt.Sprintf("schema effectonce has version %d, this program knows %d: update this program", latest+1, latest),
		},
		{
			"newer, and does not say", newer + "; DROP TABLE effectonce.schema_compatibility", latest + 1, 0, migrations.ErrTooNew,
			"update this program",
		},
		{
			"newer, and says nothing", newer + "; DELETE FROM effectonce.schema_compatibility", latest + 1, 0, migrations.ErrTooNew,
			fmt.Sprintf("schema effectonce has version %d, this program knows %d: update this program", latest+1, latest),
		},
	} {
		conn := pgtest.Connect(t, pgtest.Database(t))
		pgtest.Exec(t, conn, tc.sql)
		before := catalog(t, conn, "effectonce")

		state, err := migrations.Status(t.Context(), conn, migrations.Options{})
		require.NoError(t, err, tc.name)
		assert.Equal(t, migrations.State{Schema: "effectonce", Current: tc.current, Latest: latest, Oldest: tc.oldest}, state, tc.name)
		err = migrations.Check(t.Context(), conn, migrations.Options{})
		if tc.is == nil {
			require.NoError(t, err, tc.name)
		} else {
			require.ErrorIs(t, err, tc.is, tc.name)
			require.ErrorContains(t, err, tc.text, tc.name)
		}
		assert.Equal(t, before, catalog(t, conn, "effectonce"), tc.name)
	}
}

// A newer database is left unchanged: an older program cannot migrate it down. If the program works
// with it, Up has nothing to do, so a process that calls Up at its start can restart.
func TestNewerDatabaseIsNotTouched(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	pgtest.Exec(t, conn, "UPDATE effectonce.schema_version SET version = version + 1")
	before := catalog(t, conn, "effectonce")
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	refuse := func(err error) {
		require.ErrorIs(t, err, migrations.ErrTooNew)
		require.ErrorContains(t, err, "update this program")
	}
	refuse(migrations.To(t.Context(), conn, migrations.Options{}, 0))
	pgtest.Exec(t, conn, "UPDATE effectonce.schema_compatibility SET oldest = 1000")
	refuse(migrations.Up(t.Context(), conn, migrations.Options{}))
	refuse(migrations.To(t.Context(), conn, migrations.Options{}, 0))
	require.Equal(t, before, catalog(t, conn, "effectonce"))
}

// A role without the right to read gets an error other than a missing schema.
func TestCheckWithoutRightsIsNoVerdict(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	becomeRole(t, conn, "")
	err := migrations.Check(t.Context(), conn, migrations.Options{})
	require.ErrorContains(t, err, "read the schema version: ")
	require.ErrorContains(t, err, "permission denied for schema effectonce")
	require.NotErrorIs(t, err, migrations.ErrTooOld)
}

// released is the schema version of 0.1.0: migrations behind it find older programs running.
const released = 3

var (
	notStatements = regexp.MustCompile(`--[^\n]*|(?s:\$[a-z]*\$.*?\$[a-z]*\$)`) // comments, and bodies of functions
	raises        = regexp.MustCompile(`UPDATE effectonce\.schema_compatibility SET oldest = \d+`)
)

// breaking are statements that may break a program that does not know about them.
var breaking = map[string]*regexp.Regexp{
	"takes something away":               regexp.MustCompile(`(?i)\b(DROP|TRUNCATE (TABLE )?effectonce|REVOKE)\b`),
	"renames something":                  regexp.MustCompile(`(?i)\bRENAME\b`),
	"moves something":                    regexp.MustCompile(`(?i)\bSET SCHEMA\b`),
	"changes the type of a column":       regexp.MustCompile(`(?i)\bALTER (COLUMN )?[a-z_]+ (SET DATA )?TYPE\b`),
	"wants a value":                      regexp.MustCompile(`(?i)\bSET NOT NULL\b|\bADD (COLUMN )?[a-z_]+ [a-z]+ NOT NULL(,|;|$)`),
	"refuses what an old program writes": regexp.MustCompile(`(?i)\b(ADD (CONSTRAINT|CHECK|UNIQUE|PRIMARY|FOREIGN|EXCLUDE)|CREATE UNIQUE INDEX)\b`),
	"changes a function":                 regexp.MustCompile(`(?i)\b(CREATE OR REPLACE|ALTER FUNCTION)\b`),
}

// broken returns what may break an older program in a migration. A migration that raises the oldest
// version may do all of it.
func broken(up string) (found []string) {
	if raises.MatchString(up) {
		return nil
	}
	up = strings.Join(strings.Fields(notStatements.ReplaceAllString(up, "")), " ")
	for what, pattern := range breaking {
		if match := pattern.FindString(up); match != "" {
			found = append(found, what+": "+match)
		}
	}
	return found
}

// D25: programs of the previous release work with the tables of a migration, or the migration
// states which programs do: each migration only adds, or raises schema_compatibility.oldest.
func TestMigrationsAddOnly(t *testing.T) {
	t.Parallel()
	all, err := migrations.All(next())
	require.NoError(t, err)
	require.Greater(t, len(all), released)
	for _, m := range all {
		if m.Version > released {
			assert.Empty(t, broken(m.Up), "%s: add only, or raise schema_compatibility.oldest (docs/design.md, Migrations)", m.Name)
		}
	}
	for sql, want := range map[string]string{ // what the look finds
		"ALTER TABLE effectonce.consumers DROP COLUMN name":                       "takes something away",
		"ALTER TABLE effectonce.consumers RENAME name TO title":                   "renames something",
		"ALTER TABLE effectonce.consumers ALTER name SET DATA TYPE text":          "changes the type",
		"ALTER TABLE effectonce.consumers ADD COLUMN a text, ADD b text NOT NULL": "wants a value",
		"ALTER TABLE effectonce.consumers ADD CONSTRAINT c CHECK (name <> '')":    "refuses what",
		"CREATE OR REPLACE FUNCTION effectonce.uuid_v7() RETURNS uuid":            "changes a function",
	} {
		if found := broken(sql + ";"); assert.Len(t, found, 1, sql) {
			assert.Contains(t, found[0], want, sql)
		}
		assert.Empty(t, broken(sql+"; UPDATE effectonce.schema_compatibility SET oldest = 4"), sql)
	}
	assert.Empty(t, broken("CREATE TABLE effectonce.t (a text NOT NULL); ALTER TABLE effectonce.t ADD b text NOT NULL DEFAULT '' -- DROP\n; CREATE FUNCTION effectonce.f() AS $$ DROP $$"))
	conn := pgtest.Connect(t, pgtest.Database(t))
	assert.LessOrEqual(t, pgtest.Count(t, conn, "SELECT oldest FROM effectonce.schema_compatibility"), len(all))
}
