package migrations_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// catalog describes everything in a schema, one line for each column, constraint, index, function,
// setting and comment, except the table of the migrator. Partitions of days are only counted,
// because a day may end during a test.
func catalog(t *testing.T, conn *pgx.Conn, schema string) []string {
	t.Helper()
	return pgtest.Column[string](t, conn, `
WITH here AS (SELECT oid FROM pg_namespace WHERE nspname = $1),
tables AS (
  SELECT c.* FROM pg_class c, here WHERE c.relnamespace = here.oid AND c.relname !~ '_[0-9]{8}(_pkey)?$'
    AND c.relname <> 'schema_version'),
lines AS (
  SELECT format('relation %s %s %s %s', relname, relkind, reloptions, pg_get_expr(relpartbound, oid)) FROM tables
  UNION ALL
  SELECT format('column %s.%s %s %s %s %s %s %s', c.relname, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum), a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
    a.attidentity, a.attgenerated, pg_get_expr(d.adbin, d.adrelid))
  FROM tables c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum WHERE c.relkind IN ('r', 'p')
  UNION ALL
  SELECT format('constraint %s %s %s', c.relname, n.conname, pg_get_constraintdef(n.oid)) FROM tables c JOIN pg_constraint n ON n.conrelid = c.oid
  UNION ALL
  SELECT format('index %s', pg_get_indexdef(c.oid)) FROM tables c WHERE c.relkind IN ('i', 'I')
  UNION ALL
  SELECT format('function %s', pg_get_functiondef(p.oid)) FROM pg_proc p, here WHERE p.pronamespace = here.oid
  UNION ALL
  SELECT format('comment %s %s', c.relname, obj_description(c.oid)) FROM tables c WHERE obj_description(c.oid) IS NOT NULL
  UNION ALL
  SELECT format('%s partitions of days', count(*)) FROM pg_class c, here WHERE c.relnamespace = here.oid AND c.relname ~ '_[0-9]{8}$'
)
SELECT regexp_replace(format, '\m' || $1 || '\M', '(schema)', 'g') FROM lines ORDER BY 1`, schema)
}

// installed returns the catalog of a database that was migrated in the usual way.
func installed(t *testing.T) []string {
	t.Helper()
	lines := catalog(t, pgtest.Connect(t, pgtest.Database(t)), "effectonce")
	require.Greater(t, len(lines), 100, "the query for the catalog sees the tables")
	return lines
}

var nothing = []string{"0 partitions of days"}
