// Package effects reads what handlers left in the tables of a test's database, and compares two
// such readings.
package effects

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Effects are the rows of tables, counted, without the ignored columns.
type Effects map[string]map[string]int

// tablesSQL lists the tables that a handler may write, with the columns that count: not those that
// the database itself generates. In the pipeline's schema only the outbox is an effect of the
// handler.
const tablesSQL = `-- effects.tables
SELECT n.nspname, c.relname, pg_catalog.array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\_%'
  AND (n.nspname <> 'effectonce' OR c.relname = 'outbox' AND a.attname IN ('id', 'topic', 'key', 'payload', 'headers'))
  AND (a.attidentity = '' AND (d.oid IS NULL OR pg_catalog.pg_get_expr(d.adbin, d.adrelid) NOT LIKE '%(%') OR n.nspname = 'effectonce')
  AND NOT (n.nspname || '.' || c.relname || '.' || a.attname = ANY ($1::text[]) OR c.relname || '.' || a.attname = ANY ($1::text[]))
GROUP BY n.nspname, c.relname ORDER BY 1, 2`

// Read returns the current content of the tables, without the columns named in ignore, as
// "table.column".
func Read(ctx context.Context, pool *pgxpool.Pool, ignore []string) (Effects, error) {
	rows, err := pool.Query(ctx, tablesSQL, append([]string{}, ignore...)) // never null
	if err != nil {
		return nil, fmt.Errorf("list the tables: %w", err)
	}
	type table struct {
		Schema, Name string
		Columns      []string
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[table])
	if err != nil {
		return nil, fmt.Errorf("list the tables: %w", err)
	}
	found := Effects{}
	for _, t := range tables {
		name := t.Schema + "." + t.Name
		columns := make([]string, len(t.Columns))
		for i, column := range t.Columns {
			columns[i] = pgx.Identifier{column}.Sanitize()
		}
		rows, err := pool.Query(ctx, "SELECT to_jsonb(r)::text FROM (SELECT "+strings.Join(columns, ", ")+" FROM "+pgx.Identifier{t.Schema, t.Name}.Sanitize()+") r")
		if err != nil {
			return nil, fmt.Errorf("read table %s: %w", name, err)
		}
		texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, fmt.Errorf("read table %s: %w", name, err)
		}
		for _, text := range texts {
			if found[name] == nil {
				found[name] = map[string]int{}
			}
			found[name][text]++
		}
	}
	return found, nil
}

// shownMax bounds how many differences are reported.
const shownMax = 5

// Compare describes how the effects differ from those of the clean run; empty: they do not.
func Compare(clean, other Effects) string {
	var said []string
	for _, table := range slices.Sorted(maps.Keys(merged(clean, other))) {
		more, fewer := differences(table, clean[table], other[table])
		said = append(append(said, more...), fewer...)
	}
	return shown(said)
}

// Twice describes what exists more often than after the clean run, where less is no fault; empty:
// nothing. A row with another text counts only in a table that had rows after the clean run and has
// more now: it is the same effect again. A row that replaces another one is not a second effect,
// nor is the first row of a table.
func Twice(clean, other Effects) string {
	var said []string
	for _, table := range slices.Sorted(maps.Keys(other)) {
		again, _ := differences(table, clean[table], other[table])
		if n := rows(clean[table]); n == 0 || rows(other[table]) <= n {
			again = slices.DeleteFunc(again, func(text string) bool { return !strings.HasPrefix(text, doubled) })
		}
		said = append(said, again...)
	}
	return shown(said)
}

const doubled = "doubled: "

// differences lists the rows that a table has more often than after the clean run, and those that
// it has less often.
func differences(table string, clean, other map[string]int) (more, fewer []string) {
	for _, row := range slices.Sorted(maps.Keys(merged(clean, other))) {
		want, got := clean[row], other[row]
		switch {
		case got > want && want > 0:
			more = append(more, fmt.Sprintf(doubled+"%s has %d times %s, the clean run %d", table, got, row, want))
		case got > want:
			more = append(more, fmt.Sprintf("different: %s has %s, the clean run does not", table, row))
		case got < want:
			fewer = append(fewer, fmt.Sprintf("lost: %s has %d times %s, the clean run %d", table, got, row, want))
		}
	}
	return more, fewer
}

func rows(table map[string]int) (n int) {
	for _, times := range table {
		n += times
	}
	return n
}

func shown(said []string) string {
	if more := len(said) - shownMax; more > 0 {
		said = append(said[:shownMax], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(said, "\n  ")
}

// merged returns a map with the keys of both maps.
func merged[V any](a, b map[string]V) map[string]V {
	both := maps.Clone(a)
	if both == nil {
		return b
	}
	maps.Copy(both, b)
	return both
}
