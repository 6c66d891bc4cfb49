package relay_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// waitingSQL are $1 rows without a key that wait for topic "missing", $1 of 1,000 keys that wait
// for topic "paused", and the keys' first rows hold the rest.
const waitingSQL = `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
SELECT 'default', i, effectonce.uuid_v7(), CASE WHEN i % 2 = 0 THEN 'missing' ELSE 'paused' END,
  CASE WHEN i % 2 = 1 THEN int4send((i / 2 % 1000)::int) END, 'payload', '{}', clock_timestamp(),
  CASE WHEN i % 2 = 0 THEN 'unknown_topic' WHEN i <= 2000 THEN 'paused' ELSE 'behind' END, '',
  CASE WHEN i % 2 = 0 OR i <= 2000 THEN 'held' ELSE 'behind' END
FROM generate_series(1, 2 * $1::bigint) AS i`

// deadStatement is one that the relay runs while dead rows wait, and what it may read at most.
type deadStatement struct {
	sql     string
	args    []any
	indexes string // that it walks
	buffers int    // 8 KiB pages at most
}

func deadStatements() []deadStatement {
	topics, keys := make([]string, 100), make([][]byte, 100)
	for i := range topics {
		topics[i], keys[i] = "paused", fmt.Appendf(nil, "new %d", i)
	}
	return []deadStatement{
		{relay.DeadTopicsSQL, []any{"default"}, "outbox_dead_key", 30},
		{relay.WaitingTopicsSQL, []any{"default"}, "outbox_dead_waiting", 30},
		{relay.ReleasedSQL, []any{"default", 1, 0, false}, "outbox_dead_freed_pkey outbox_dead_retry outbox_dead_key", 30},
		{relay.ReleasableSQL, []any{"default", 0, 0, 100, 1, 0, false}, "outbox_dead_freed_pkey outbox_dead_retry outbox_dead_key", 30},
		{relay.HoldingSQL, []any{"default", topics, keys, false}, "outbox_dead_key", 100 * 6},
		{relay.MoveToDeadSQL, []any{"default", "{1,5000,19999}", "{refused,refused,refused}", "{x,x,x}"}, "outbox_0_pkey", 3 * 40},
		{relay.RetryTopicSQL, []any{"default", "missing", "unknown_topic", 0, 100, 1, 0}, "outbox_dead_waiting", 100 * 40},
	}
}

// explain returns the plan of a statement, and how many buffers it read. Prepared, so that the
// settings decide on the kind of plan.
func (s deadStatement) explain(t *testing.T, pool *pgxpool.Pool) (plan string, buffers int) {
	t.Helper()
	ctx := t.Context()
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(ctx)) }()
	_, err = tx.Exec(ctx, relay.DeadSettingsSQL, nil)
	require.NoError(t, err)
	literals := make([]string, len(s.args))
	for i, arg := range s.args {
		switch arg := arg.(type) {
		case []string:
			literals[i] = "'{" + strings.Join(arg, ",") + "}'"
		case [][]byte:
			quoted := make([]string, len(arg))
			for i, b := range arg {
				quoted[i] = fmt.Sprintf(`"\\x%x"`, b)
			}
			literals[i] = "'{" + strings.Join(quoted, ",") + "}'"
		case string:
			literals[i] = "'" + arg + "'"
		default:
			literals[i] = fmt.Sprint(arg)
		}
	}
	_, err = tx.Exec(ctx, "PREPARE looked_at AS "+s.sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	var text string
	require.NoError(t, tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE looked_at ("+strings.Join(literals, ", ")+")",
		pgx.QueryExecModeSimpleProtocol).Scan(&text))
	_, err = tx.Exec(ctx, "DEALLOCATE looked_at", pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(text), &plans))
	return text, plans[0].Plan.Hit + plans[0].Plan.Read
}

// Property: what the relay reads of outbox_dead depends on what may leave, and not on how many rows
// wait, and what it reads to move a row there not on how many are in the outbox, whatever the
// statistics say. Row O41 of guarantees.md.
func TestDeadStatementsReadNothingThatWaits(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	must(t, pool, `ALTER TABLE effectonce.outbox_dead SET (autovacuum_enabled = off)`)
	check := func(state string) {
		for _, s := range deadStatements() {
			plan, buffers := s.explain(t, pool)
			name, _, _ := strings.Cut(s.sql, "\n")
			t.Log(state, name, buffers)
			for _, index := range strings.Fields(s.indexes) {
				require.Contains(t, plan, fmt.Sprintf(`"Index Name": "%s"`, index), "%s: %s: %s", state, name, plan)
			}
			require.LessOrEqual(t, buffers, s.buffers, "%s: %s: %s", state, name, plan)
		}
	}
	must(t, pool, waitingSQL, 10) // a plan that is kept from a time of few rows has to be good for many
	check("few rows")
	must(t, pool, `TRUNCATE effectonce.outbox_dead`)
	must(t, pool, waitingSQL, 20_000)
	must(t, pool, `INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 20000)`)
	check("no statistics")
	must(t, pool, `ANALYZE effectonce.outbox_dead`)
	check("statistics")
	// Of a time at which every row was on its way.
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry', key = NULL`)
	must(t, pool, `ANALYZE effectonce.outbox_dead`)
	must(t, pool, `DELETE FROM effectonce.outbox_dead`)
	must(t, pool, `VACUUM effectonce.outbox_dead`)
	must(t, pool, waitingSQL, 20_000)
	check("statistics of another time")
}
