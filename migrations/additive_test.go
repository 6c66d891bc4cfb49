package migrations_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

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
	var oldest int
	require.NoError(t, pgtest.Connect(t, pgtest.Database(t)).QueryRow(t.Context(), "SELECT oldest FROM effectonce.schema_compatibility").Scan(&oldest))
	assert.LessOrEqual(t, oldest, len(all))
}
