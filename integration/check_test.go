package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// tables of the workload. effects has no unique constraint on purpose: a second effect must become
// visible instead of being refused.
const workload = `
CREATE TABLE versions (key text PRIMARY KEY, version int NOT NULL);
CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, message_id uuid NOT NULL, key text NOT NULL, version int NOT NULL, worker int NOT NULL);`

func createWorkload(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	_, err := pool.Exec(t.Context(), workload)
	require.NoError(t, err)
}

// written is what the writers committed: the last version of each key. Versions have no gaps, since
// a version that is rolled back is given again.
func written(ctx context.Context, t *testing.T, pool *pgxpool.Pool) map[string]int {
	t.Helper()
	rows, err := pool.Query(ctx, `SELECT key, version FROM versions WHERE version > 0`)
	require.NoError(t, err)
	found := map[string]int{}
	var key string
	var version int
	_, err = pgx.ForEachRow(rows, []any{&key, &version}, func() error { found[key] = version; return nil })
	require.NoError(t, err)
	return found
}

// stream is what a topic holds, judged.
type stream struct {
	records, duplicates, inversions int
	last                            map[string]int // of each key: versions 1 to this are all there
	missing                         []string
}

// judge reads a topic's records as a consumer that drops duplicates would: first occurrences per
// key must be 1, 2, 3 and so on.
func judge(t *testing.T, records []*kgo.Record) stream {
	t.Helper()
	s := stream{last: map[string]int{}}
	seen := map[string]bool{}
	versions := map[string]map[int]bool{}
	for _, record := range records {
		s.records++
		id := ""
		for _, h := range record.Headers {
			if h.Key == "message-id" {
				id = string(h.Value)
			}
		}
		require.NotEmpty(t, id, "record without message-id at offset %d", record.Offset)
		if seen[id] {
			s.duplicates++
			continue
		}
		seen[id] = true
		var e event
		require.NoError(t, json.Unmarshal(record.Value, &e))
		if versions[e.Key] == nil {
			versions[e.Key] = map[int]bool{}
		}
		if e.Version != s.last[e.Key]+1 {
			s.inversions++
		}
		require.False(t, versions[e.Key][e.Version], "INVARIANT: two messages carry %s version %d", e.Key, e.Version)
		versions[e.Key][e.Version] = true
		s.last[e.Key] = max(s.last[e.Key], e.Version)
	}
	for key, last := range s.last {
		for v := 1; v <= last; v++ {
			if !versions[key][v] {
				s.missing = append(s.missing, fmt.Sprintf("%s/%d", key, v))
			}
		}
	}
	return s
}

// requireEffects proves the whole promise by plain SQL: one effect for each version of each key, in
// order.
func requireEffects(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	requireOnce(ctx, t, pool)
	require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM (SELECT version - lag(version, 1, 0) OVER (PARTITION BY key ORDER BY n) AS step FROM effects) g
		WHERE step <> 1`), "INVARIANT: effects out of order")
}

// requireOnce is requireEffects without the order.
func requireOnce(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var lost, doubled int
	require.NoError(t, pool.QueryRow(ctx, `SELECT count(*) FROM versions v CROSS JOIN LATERAL generate_series(1, v.version) AS s (version)
		WHERE NOT EXISTS (SELECT FROM effects e WHERE e.key = v.key AND e.version = s.version)`).Scan(&lost))
	require.NoError(t, pool.QueryRow(ctx, `SELECT coalesce(sum(n - 1), 0) FROM (SELECT count(*) AS n FROM effects GROUP BY key, version) g`).Scan(&doubled))
	require.Zero(t, lost, "INVARIANT: lost effects")
	require.Zero(t, doubled, "INVARIANT: doubled effects")
}
