package migrations_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// firstAdditive is the first migration of those that programs of the release before run on with.
const firstAdditive = 5

var (
	sqlComment = regexp.MustCompile(`--[^\n]*`)
	sqlBody    = regexp.MustCompile(`(?s)\$[a-z]*\$.*?\$[a-z]*\$`) // of a function: new ones are none of an older program's business
	raises     = regexp.MustCompile(`UPDATE effectonce\.schema_compatibility SET oldest = \d+`)
	replaces   = regexp.MustCompile(`DROP CONSTRAINT (\w+), ADD CONSTRAINT (\w+) CHECK \((?:[^();]|\([^()]*\))*\)`)
	dropsIndex = regexp.MustCompile(`DROP INDEX effectonce\.(\w+);`)
	revokes    = regexp.MustCompile(`REVOKE ALL ON FUNCTION ([^;]*?) FROM PUBLIC;`)
	replacesFn = regexp.MustCompile(`CREATE OR REPLACE (FUNCTION [^';]*) AS '';`)
	makes      = regexp.MustCompile(`CREATE FUNCTION (\S+?)\(`)
	addsColumn = regexp.MustCompile(`(?i)\bADD (COLUMN )?(IF NOT EXISTS )?[a-z_]+ [^,;]*\bNOT NULL\b[^,;]*`)
)

// triggers run when rows are truncated, and truncate nothing.
var triggers = regexp.MustCompile(`\b(CREATE TRIGGER \w+ (BEFORE|AFTER)) TRUNCATE ON\b`)

// breaking are statements that a program which does not know of them may fail or err with.
var breaking = map[string]*regexp.Regexp{
	"takes something away":               regexp.MustCompile(`(?i)\b(DROP|TRUNCATE|REVOKE)\b`),
	"renames something":                  regexp.MustCompile(`(?i)\bRENAME\b`),
	"moves something":                    regexp.MustCompile(`(?i)\bSET SCHEMA\b`),
	"changes the type of a column":       regexp.MustCompile(`(?i)\bALTER (COLUMN )?[a-z_]+ (SET DATA )?TYPE\b`),
	"wants a value":                      regexp.MustCompile(`(?i)\bSET NOT NULL\b`),
	"refuses what an old program writes": regexp.MustCompile(`(?i)\b(ADD (CONSTRAINT|CHECK|UNIQUE|PRIMARY|FOREIGN|EXCLUDE)|CREATE UNIQUE INDEX)\b`),
	"changes a function":                 regexp.MustCompile(`(?i)\b(CREATE OR REPLACE|ALTER FUNCTION)\b`),
}

// bare is SQL in one line, without comments and the bodies of functions.
func bare(sql string) string {
	return strings.Join(strings.Fields(sqlBody.ReplaceAllString(sqlComment.ReplaceAllString(sql, ""), "''")), " ")
}

// broken says what in a migration an older program may break at, behind the migrations before it. A migration that raises the
// oldest version may do all of it.
func broken(before, up string) (found []string) {
	if raises.MatchString(up) {
		return nil
	}
	before, up = bare(before), bare(up)
	for _, m := range replacesFn.FindAllStringSubmatch(up, -1) {
		if strings.Contains(before, "CREATE "+m[1]+" AS '';") { // older programs call it as before; what it does for them is for its author to see
			up = strings.ReplaceAll(up, m[0], "")
		}
	}
	for _, m := range replaces.FindAllStringSubmatch(up, -1) {
		if m[1] == m[2] { // a CHECK that is put in other words, or takes more
			up = strings.ReplaceAll(up, m[0], "")
		}
	}
	for _, m := range dropsIndex.FindAllStringSubmatch(up, -1) {
		if strings.Contains(up, " CREATE INDEX "+m[1]+" ON ") { // one that is made anew, with more columns: no program names it
			up = strings.ReplaceAll(up, m[0], "")
		}
	}
	made := map[string]bool{}
	for _, m := range makes.FindAllStringSubmatch(up, -1) {
		made[m[1]] = true
	}
	for _, m := range revokes.FindAllStringSubmatch(up, -1) {
		names := regexp.MustCompile(`effectonce\.\w+`).FindAllString(m[1], -1)
		if !slices.ContainsFunc(names, func(name string) bool { return !made[name] }) { // a new function: no older program calls it
			up = strings.ReplaceAll(up, m[0], "")
		}
	}
	up = triggers.ReplaceAllString(up, "$1")
	for what, pattern := range breaking {
		if match := pattern.FindString(up); match != "" {
			found = append(found, what+": "+match)
		}
	}
	for _, column := range addsColumn.FindAllString(up, -1) {
		if !regexp.MustCompile(`(?i)\b(DEFAULT|GENERATED)\b`).MatchString(column) {
			found = append(found, "wants a value: "+column)
		}
	}
	return found
}

// D25: programs of the release before go on with the tables of a migration, or the migration says which programs
// do: from version 5 on each adds only, or raises schema_compatibility.oldest.
func TestMigrationsAddOnly(t *testing.T) {
	t.Parallel()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	before := ""
	for _, m := range all {
		if m.Version >= firstAdditive {
			assert.Empty(t, broken(before, m.Up), "%s: add only, or raise schema_compatibility.oldest (docs/design.md, Migrations)", m.Name)
		}
		before += m.Up
	}
	const made = "CREATE FUNCTION effectonce.f(a int) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;"
	for sql, want := range map[string]string{
		"ALTER TABLE effectonce.consumers DROP COLUMN name":                                                          "takes something away",
		"DROP TABLE effectonce.fences":                                                                               "takes something away",
		"ALTER TABLE effectonce.consumers RENAME name TO title":                                                      "renames something",
		"ALTER TABLE effectonce.consumers ALTER COLUMN name TYPE varchar(600)":                                       "changes the type",
		"ALTER TABLE effectonce.consumers ALTER name SET DATA TYPE text":                                             "changes the type",
		"ALTER TABLE effectonce.consumers ALTER COLUMN dedup_window SET NOT NULL":                                    "wants a value",
		"ALTER TABLE effectonce.consumers ADD COLUMN a text, ADD b text NOT NULL":                                    "wants a value",
		"ALTER TABLE effectonce.consumers ADD CONSTRAINT c CHECK (name <> '')":                                       "refuses what",
		"ALTER TABLE effectonce.outbox_dead DROP CONSTRAINT a":                                                       "takes something away",
		"DROP INDEX effectonce.i; CREATE INDEX j ON effectonce.t (a)":                                                "takes something away",
		"REVOKE ALL ON FUNCTION effectonce.uuid_v7() FROM PUBLIC":                                                    "takes something away",
		"CREATE UNIQUE INDEX ON effectonce.consumers (consumer_group)":                                               "refuses what",
		"TRUNCATE effectonce.fences":                                                                                 "takes something away",
		"CREATE OR REPLACE FUNCTION effectonce.uuid_v7() RETURNS uuid AS $$ $$ ()":                                   "changes a function",
		"CREATE OR REPLACE FUNCTION effectonce.f(a int, b int DEFAULT 1) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$": "changes a function",
	} {
		if found := broken(made, "-- Additive.\n"+sql+";"); assert.Len(t, found, 1, sql) {
			assert.Contains(t, found[0], want, sql)
		}
		assert.Empty(t, broken(made, sql+"; UPDATE effectonce.schema_compatibility SET oldest = 6"), sql)
	}
	for _, sql := range []string{
		"ALTER TABLE effectonce.consumers ADD COLUMN a text NOT NULL DEFAULT 'x' CHECK (a <> ''), ADD COLUMN b bigint -- DROP nothing",
		"CREATE TABLE effectonce.t (a text NOT NULL, CONSTRAINT t_pkey PRIMARY KEY (a))",
		"ALTER TABLE effectonce.t DROP CONSTRAINT a, ADD CONSTRAINT a CHECK (b IN ('c', 'd'))",
		"CREATE FUNCTION effectonce.f() RETURNS trigger AS $$ BEGIN DROP TABLE t; END $$",
		"DROP INDEX effectonce.i; CREATE INDEX i ON effectonce.t (a, b)",
		"CREATE OR REPLACE FUNCTION effectonce.f(a int) RETURNS int LANGUAGE sql AS $$ SELECT 2 $$;",
		"CREATE FUNCTION effectonce.f(a int) RETURNS int AS $$ $$; REVOKE ALL ON FUNCTION effectonce.f(int) FROM PUBLIC;",
	} {
		assert.Empty(t, broken(made, sql), sql)
	}

	var oldest int
	require.NoError(t, connect(t, pgtest.Database(t)).QueryRow(t.Context(), "SELECT oldest FROM effectonce.schema_compatibility").Scan(&oldest))
	assert.GreaterOrEqual(t, oldest, firstAdditive, "programs of earlier versions do not ask")
	assert.LessOrEqual(t, oldest, len(all))
}
