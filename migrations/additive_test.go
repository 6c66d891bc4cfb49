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

// firstAdditive is the first migration that programs of the previous release work with.
const firstAdditive = 5

var (
	sqlComment = regexp.MustCompile(`--[^\n]*`)
	sqlBody    = regexp.MustCompile(`(?s)\$[a-z]*\$.*?\$[a-z]*\$`) // of a function: older programs do not call new ones
	raises     = regexp.MustCompile(`UPDATE effectonce\.schema_compatibility SET oldest = \d+`)
	replaces   = regexp.MustCompile(`DROP CONSTRAINT (\w+), ADD CONSTRAINT (\w+) CHECK \((?:[^();]|\([^()]*\))*\)`)
	dropsIndex = regexp.MustCompile(`DROP INDEX effectonce\.(\w+);`)
	revokes    = regexp.MustCompile(`REVOKE ALL ON FUNCTION ([^;]*?) FROM PUBLIC;`)
	replacesFn = regexp.MustCompile(`CREATE OR REPLACE (FUNCTION [^';]*) AS '';`)
	makes      = regexp.MustCompile(`CREATE FUNCTION (\S+?)\(`)
	addsColumn = regexp.MustCompile(`(?i)\bADD (COLUMN )?(IF NOT EXISTS )?[a-z_]+ [^,;]*\bNOT NULL\b[^,;]*`)
)

// triggers run when rows are truncated, and truncate nothing.
var triggers = regexp.MustCompile(`\b(CREATE TRIGGER \w+ (BEFORE|AFTER)) (?:UPDATE OR DELETE OR )?TRUNCATE ON\b`)

// breaking are statements that may break a program that does not know about them.
var breaking = map[string]*regexp.Regexp{
	"takes something away":               regexp.MustCompile(`(?i)\b(DROP|TRUNCATE|REVOKE)\b`),
	"renames something":                  regexp.MustCompile(`(?i)\bRENAME\b`),
	"moves something":                    regexp.MustCompile(`(?i)\bSET SCHEMA\b`),
	"changes the type of a column":       regexp.MustCompile(`(?i)\bALTER (COLUMN )?[a-z_]+ (SET DATA )?TYPE\b`),
	"wants a value":                      regexp.MustCompile(`(?i)\bSET NOT NULL\b`),
	"refuses what an old program writes": regexp.MustCompile(`(?i)\b(ADD (CONSTRAINT|CHECK|UNIQUE|PRIMARY|FOREIGN|EXCLUDE)|CREATE UNIQUE INDEX)\b`),
	"changes a function":                 regexp.MustCompile(`(?i)\b(CREATE OR REPLACE|ALTER FUNCTION)\b`),
}

// reviewed are statements that a program of the previous release survives, with the reason beside
// each.
var reviewed = []*regexp.Regexp{
	// 0008: bounds far from what any program writes; a publisher's statement fails as it does with
	// another bad value.
	regexp.MustCompile(`ADD CONSTRAINT \w+_(is_out_of_bounds|is_too_large|are_too_many) CHECK \((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\) NOT VALID`),
	// 0008: one more column in a key: no statement names it as the target of a conflict.
	regexp.MustCompile(`DROP CONSTRAINT outbox_scheduled_pkey, ADD CONSTRAINT outbox_scheduled_pkey PRIMARY KEY \(id, topic, publisher\)`),
	// 0008: the same definitions, bound again under a safe search path.
	regexp.MustCompile(`CREATE OR REPLACE FUNCTION effectonce\.(uuid_v7|uuid_floor)\([^)]*\) RETURNS uuid LANGUAGE sql (VOLATILE|IMMUTABLE STRICT) PARALLEL SAFE RETURN `),
	regexp.MustCompile(`CREATE OR REPLACE VIEW effectonce\.(outbox_progress_now|outbox_backlog) AS`),
	// 0008: the same function with another lock.
	regexp.MustCompile(`CREATE OR REPLACE FUNCTION effectonce\.repair_outbox_sequences\(`),
	regexp.MustCompile(`ALTER DOMAIN effectonce\.key_name DROP CONSTRAINT is_empty; ALTER DOMAIN effectonce\.key_name ADD CONSTRAINT is_empty CHECK \(VALUE <> ''\) NOT VALID`),
}

// bare returns SQL in one line, without comments and function bodies.
func bare(sql string) string {
	return strings.Join(strings.Fields(sqlBody.ReplaceAllString(sqlComment.ReplaceAllString(sql, ""), "''")), " ")
}

// broken returns what may break an older program in a migration, given the migrations before it. A
// migration that raises the oldest version may do all of it.
func broken(before, up string) (found []string) {
	if raises.MatchString(up) {
		return nil
	}
	before, up = bare(before), bare(up)
	for _, m := range replacesFn.FindAllStringSubmatch(up, -1) {
		if strings.Contains(before, "CREATE "+m[1]+" AS '';") { // older programs call it as before; its author must check what it does for them
			up = strings.ReplaceAll(up, m[0], "")
		}
	}
	for _, m := range replaces.FindAllStringSubmatch(up, -1) {
		if m[1] == m[2] { // a CHECK that is rewritten, or allows more
			up = strings.ReplaceAll(up, m[0], "")
		}
	}
	for _, m := range dropsIndex.FindAllStringSubmatch(up, -1) {
		if strings.Contains(up, " CREATE INDEX "+m[1]+" ON ") { // an index that is created again, with more columns: no program names it
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
	for _, statement := range reviewed {
		up = statement.ReplaceAllString(up, "")
	}
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

// D25: programs of the previous release work with the tables of a migration, or the migration
// states which programs do: from version 5 on each migration only adds, or raises
// schema_compatibility.oldest.
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
	require.NoError(t, pgtest.Connect(t, pgtest.Database(t)).QueryRow(t.Context(), "SELECT oldest FROM effectonce.schema_compatibility").Scan(&oldest))
	assert.GreaterOrEqual(t, oldest, firstAdditive, "programs of earlier versions do not ask")
	assert.LessOrEqual(t, oldest, len(all))
}
