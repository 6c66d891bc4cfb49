package relay_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
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
		{relay.ReleasedSQL, []any{"default", 1, 0, false}, "outbox_dead_leaving outbox_dead_key", 30},
		{relay.ReleasableSQL, []any{"default", 0, 100, 1, 0, false}, "outbox_dead_leaving outbox_dead_key", 30},
		{relay.HoldingSQL, []any{"default", topics, keys, false}, "outbox_dead_key", 100 * 6},
		{relay.MoveToDeadSQL, []any{"default", "{1,5000,19999}", "{refused,refused,refused}", "{x,x,x}", "{x,x,x}", "held"}, "outbox_0_pkey", 3 * 40},
		{relay.RetryTopicSQL, []any{"default", "missing", "unknown_topic", "", 100, 1, 0}, "outbox_dead_waiting", 100 * 40},
	}
}

// Property: a look reads rows by index only, by one plan, whatever the statistics say: there are
// none, they are of a table that was empty, or they are right. Row O21 of guarantees.md.
func TestFetchWalksIndexes(t *testing.T) {
	t.Parallel()
	for _, statistics := range []string{"none", "of the empty table", "right"} {
		for name, sql := range map[string]string{"fetch": relay.FetchSQL, "fetch new": relay.FetchNewSQL, "fetch sized": relay.FetchSizedSQL} {
			t.Run(name+", statistics "+statistics, func(t *testing.T) {
				t.Parallel()
				pool := pgtest.Pool(t)
				if statistics == "of the empty table" {
					must(t, pool, `VACUUM ANALYZE effectonce.outbox`)
				}
				// One transaction with all rows is what misleads the planner about txid.
				must(t, pool, `INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 30000)`)
				if statistics == "right" {
					must(t, pool, `VACUUM ANALYZE effectonce.outbox`)
				}
				for _, after := range []int64{0, 29990} {
					plan, _ := look(t, pool, sql, after, "5:7:5", "5,6") // beside two transactions that had been open
					for slot := range 4 {
						require.Regexp(t, fmt.Sprintf(`Index (Only )?Scan using outbox_%d_pkey`, slot), plan)
						if sql != relay.FetchNewSQL {
							require.Regexp(t, fmt.Sprintf(`Index (Only )?Scan using outbox_%d_txid_seq_idx`, slot), plan)
						}
					}
					require.Contains(t, plan, "Merge Append", "the page comes in order from the index")
					// Only a page of late rows is sorted, never the rest of the outbox.
					require.LessOrEqual(t, strings.Count(plan, "Sort ("), 2, plan)
					require.NotRegexp(t, `Rows Removed by Filter: \d{3,}`, plan)
					require.NotRegexp(t, `Seq Scan on outbox_\d`, plan)
				}
			})
		}
	}
}

// Property: a look reads nothing of a transaction that is still open, however many rows it has.
// Row O21 of guarantees.md.
func TestOpenTransactionCostsALookNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	open := opened(t, pool, `INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 20000)`)
	txid := one[int64](t, open, `SELECT pg_current_xact_id()::text::bigint`)
	for _, sql := range []string{relay.FetchSQL, relay.FetchSizedSQL} {
		plan, pages := look(t, pool, sql, 20000, fmt.Sprintf("%d:%d:%d", txid, txid+1, txid), fmt.Sprint(txid))
		require.Less(t, pages, 100, plan)
	}
}

// look executes a fetch. It returns its plan, and how many pages it read.
func look(t *testing.T, pool *pgxpool.Pool, sql string, after int64, since, open string) (plan string, pages int) {
	t.Helper()
	types, args := "(text, bigint, text, bigint, text, int, int, int)", []any{nil, after, since, 100, nil, 1, 0, 16384}
	if sql != relay.FetchNewSQL {
		types, args = "(text, bigint, text, bigint, text, int, int, int, text[], bigint)", append(args, "{"+open+"}", 0)
	}
	return explained(t, pool, relay.FetchSettingsSQL, types, sql, args...)
}

// explained executes a statement in a transaction that is rolled back: prepared, so that the settings decide
// on the kind of plan. It returns its plan, and how many pages it read.
func explained(t *testing.T, pool *pgxpool.Pool, settings, types, sql string, args ...any) (plan string, pages int) {
	t.Helper()
	ctx := t.Context()
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(ctx)) }()
	must(t, tx, settings)
	literals := make([]string, len(args))
	for i, arg := range args {
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
		case nil:
			literals[i] = "NULL"
		default:
			literals[i] = fmt.Sprint(arg)
		}
	}
	must(t, tx, "PREPARE explained "+types+" AS "+sql, pgx.QueryExecModeSimpleProtocol)
	explain := "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, COSTS OFF) EXECUTE explained (" + strings.Join(literals, ", ") + ")"
	lines := all[string](t, tx, explain, pgx.QueryExecModeSimpleProtocol)
	must(t, tx, "DEALLOCATE explained")
	plan = strings.Join(lines, "\n")
	whole := regexp.MustCompile(`Buffers: shared(?: hit=(\d+))?(?: read=(\d+))?`).FindStringSubmatch(plan) // the first: of all nodes
	require.NotNil(t, whole, plan)
	for _, n := range whole[1:] {
		some, _ := strconv.Atoi(n)
		pages += some
	}
	return plan, pages
}

// Property: what the relay reads of outbox_dead depends on what may leave, and not on how many rows
// wait, and what it reads to move a row there not on how many are in the outbox, whatever the
// statistics say. Row O41 of guarantees.md.
func TestDeadStatementsReadNothingThatWaits(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	must(t, pool, `ALTER TABLE effectonce.outbox_dead SET (autovacuum_enabled = off)`)
	settings := strings.ReplaceAll(relay.DeadSettingsSQL, "$1", "NULL")
	check := func(state string) {
		for _, s := range deadStatements() {
			plan, buffers := explained(t, pool, settings, "", s.sql, s.args...)
			name, _, _ := strings.Cut(s.sql, "\n")
			t.Log(state, name, buffers)
			for _, index := range strings.Fields(s.indexes) {
				require.Regexp(t, `Index (Only )?Scan (using|on) `+index+`\b`, plan, "%s: %s: %s", state, name, plan)
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

// Property: a writer, with no more rights than to publish, sees how old and how many the rows are
// that are not published: none where none waits, also while rolled back rows left gaps; rows that
// commit late; the slowest relay's; all where no relay ever ran.
func TestWriterSeesTheBacklog(t *testing.T) {
	t.Parallel()
	const tolerance = 20 * time.Minute // the rows differ by an hour
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	pool, _, prefix := roled(t)
	writer := pgtest.Connect(t, pgtest.Login(t, pool.Config().ConnString(), prefix, "publisher"))
	backlog := func() outbox.Backlog {
		b, err := outbox.ReadBacklog(ctx, writer)
		require.NoError(t, err)
		return b
	}
	require.Zero(t, backlog().Rows)
	require.Zero(t, one[float64](t, pool, "SELECT max(oldest_seconds) FROM effectonce.outbox_backlog"), "for those who read the view")
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, created_at) SELECT $1, n::text::bytea, clock_timestamp() - interval '1 hour' FROM generate_series(1, 20) n`, topic)
	b := backlog()
	require.EqualValues(t, 20, b.Rows, "no relay ever ran")
	require.InDelta(t, time.Hour, b.Oldest, float64(tolerance))
	require.Positive(t, b.Bytes)

	r, slow := newRelay(t, pool, relay.Config{}), newRelay(t, pool, relay.Config{Name: "slow", Shards: 3})
	drain(t, r)
	b = backlog()
	require.Zero(t, b.Rows)
	require.Zero(t, b.Oldest)

	late := opened(t, pool, `INSERT INTO effectonce.outbox (topic, key, created_at) VALUES ($1, 'k', clock_timestamp() - interval '2 hours')`, topic)
	_, err := pool.Exec(ctx, `DO $$ BEGIN INSERT INTO effectonce.outbox (topic) VALUES ('gone'); RAISE EXCEPTION 'rolled back'; END $$`)
	require.Error(t, err)
	insert(t, pool, topic, "k", "v")
	drain(t, r)
	require.Zero(t, backlog().Oldest, "what is not committed does not wait")
	require.NoError(t, late.Commit(ctx))
	b = backlog()
	require.InDelta(t, 2*time.Hour, b.Oldest, float64(tolerance), "it was open at the last tick")
	require.Positive(t, b.Rows)
	drain(t, r)
	require.Zero(t, backlog().Oldest)
	must(t, pool, `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('slow', 3)`)
	require.InDelta(t, time.Hour, backlog().Oldest, float64(tolerance), "the slow relay has published nothing, and begins with the first row")
	drain(t, slow)
	require.Zero(t, backlog().Oldest)

	for _, table := range []string{"outbox", "outbox_progress", "outbox_ticks"} {
		_, err := writer.Exec(ctx, `SELECT FROM effectonce.`+table)
		require.ErrorContains(t, err, "permission denied")
	}
}

// Property: the backlog inside a batch of several pages begins where the last page ended.
func TestBacklogWithinABatch(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	must(t, pool, `INSERT INTO effectonce.outbox (topic, payload, created_at) SELECT 't', CASE WHEN n > 50 THEN 'first' ELSE 'v' END::bytea, clock_timestamp() - n * interval '1 minute' FROM generate_series(60, 1, -1) n`)
	sink := &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		if string(messages[0].Payload) == "first" {
			return len(messages), nil
		}
		const inside = `SELECT EXISTS (SELECT FROM effectonce.outbox_progress_now WHERE next_tick IS NOT NULL AND seq = 10)`
		testwait.True(t, "progress is inside the batch", func() bool { return one[bool](t, pool, inside) }) //nolint:contextcheck // the test's own
		return 0, errors.New("no more")
	}}
	_, err := newSinkRelay(t, pool, sink, relay.Config{PageRowsMax: 10, ProgressEvery: time.Millisecond}).Drain(ctx)
	require.ErrorContains(t, err, "no more")
	seq := one[int](t, pool, `SELECT seq FROM effectonce.outbox_progress_now WHERE next_tick IS NOT NULL`)
	require.Positive(t, seq)
	require.Less(t, seq, 60)
	b, err := outbox.ReadBacklog(ctx, pool)
	require.NoError(t, err)
	require.EqualValues(t, 60-seq, b.Rows)
	// The next row differs by a minute. Its age grows while the test runs.
	age := one[float64](t, pool, fmt.Sprintf(`SELECT extract(epoch FROM clock_timestamp() - created_at)::float8 FROM effectonce.outbox WHERE seq = %d`, seq+1))
	require.InDelta(t, age, b.Oldest.Seconds(), 50)
}

// Property: to look at the backlog costs descents of indexes, however many rows wait or are kept.
func TestLookAtTheBacklogIsCheap(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	many := func(from, to int) {
		must(t, pool, fmt.Sprintf(`INSERT INTO effectonce.outbox (topic, payload) SELECT '%s', 'v' FROM generate_series(%d, %d)`, topic, from, to))
	}
	many(1, 20_000)
	drain(t, newRelay(t, pool, relay.Config{}))
	conn := pgtest.Connect(t, pool.Config().ConnString())
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			must(t, pool, `ANALYZE effectonce.outbox`)
		}
		many(1, 20_000)
		plan := pgtest.Plan(t, conn, `SELECT oldest_seconds, rows FROM effectonce.outbox_backlog`)
		require.NotRegexp(t, `rows=\d{3,}`, plan, plan)
	}
}

// relayPages is how many pages the tables that a relay writes may have, with their indexes: what
// they have when they are new, and room for the versions that an open transaction keeps. Progress
// is written 20 times a second; each write leaves a version of some 150 bytes.
const relayPages = 120

// Property: whatever is published, and whatever snapshots are held during that, the relay changes
// and deletes no row of the outbox and leaves no dead one, also without vacuum; and what it writes
// itself stays small. Row O21 of guarantees.md.
func TestBacklogLeavesNoDeadRows(t *testing.T) {
	longtest.Only(t, "1,000,000 rows")
	t.Parallel()
	topic, rows := kafkatest.Topic(t, 4), 1_000_000
	if testing.Short() {
		rows = 50_000
	}
	server, pool := ownCluster(t, map[string]string{"autovacuum": "off", "max_wal_size": "4GB"})
	must(t, pgtest.Connect(t, server.URL), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()`) // until the test ends
	config := pool.Config()
	config.ConnConfig.RuntimeParams["application_name"] = "the relay"
	relays := pgtest.PoolOf(t, config)
	stop := starts(t, newRelay(t, relays, relay.Config{Lease: time.Minute}))
	const parts = 20
	for range parts {
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
			SELECT $1, convert_to((n % 1000)::text, 'UTF8'), convert_to(repeat(md5(n::text), 8), 'UTF8') FROM generate_series(1, $2::int) AS n`, topic, rows/parts)
	}
	testwait.True(t, "all rows are published", func() bool { return published(t, pool) == rows })
	stop()
	require.Equal(t, rows, kafkatest.Count(t, topic))

	// A connection hands its statistics in before it is gone.
	relays.Close()
	testwait.True(t, "the server counted", func() bool {
		return one[int](t, pool, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'the relay'`) == 0 &&
			one[int](t, pool, `SELECT sum(n_tup_ins) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`) == rows
	})
	for _, column := range []string{"n_tup_upd", "n_tup_del", "n_dead_tup"} {
		assert.Zero(t, one[int](t, pool, `SELECT sum(`+column+`) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`), column)
	}
	const own = ` FROM pg_stat_user_tables WHERE schemaname = 'effectonce' AND relname ~ '^outbox_(progress|ticks|slots|relays|replicas|paused|dead|scheduled)$'`
	assert.Less(t, one[int](t, pool, `SELECT sum(pg_total_relation_size(relid)) / 8192`+own), relayPages,
		one[string](t, pool, `SELECT string_agg(concat_ws(' ', relname, 'pages', pg_total_relation_size(relid) / 8192, 'dead', n_dead_tup), ', ')`+own))
}

// Property: an old snapshot, which keeps all dead versions, makes no write of progress slower:
// after an hour's worth of writes (72,000) and of renewals of the lease (1,440) a write reads as
// many pages as before. Row O43 of guarantees.md.
func TestOldSnapshotDoesNotSlowProgress(t *testing.T) {
	longtest.Only(t, "72,000 commits")
	t.Parallel()
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	server, pool := ownCluster(t, map[string]string{"synchronous_commit": "off"})
	must(t, pgtest.Connect(t, server.URL), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()`) // until the test ends
	r := newRelay(t, pool, relay.Config{})
	publish := func() time.Duration {
		insert(t, pool, topic, "k", "1")
		begun := time.Now()
		drain(t, r)
		return time.Since(begun)
	}
	publish()
	run, token := one[string](t, pool, relay.RunSQL), one[string](t, pool, `SELECT token FROM effectonce.outbox_ticks WHERE tick = 0`)
	pages := func(sql string, args ...any) int {
		_, n := explained(t, pool, "", "", sql, args...)
		return n
	}
	advance := func() int {
		n := one[int64](t, pool, `SELECT max(n) FROM effectonce.outbox_advances`)
		return pages(relay.AdvanceSQL, run, "default", 0, n+1, 1, 0, nil, 0, 0, 1, nil, token, nil)
	}
	acquire := func() int {
		return pages(relay.AcquireSQL, run, "default", 0, "test", "1 second", nil, nil)
	}
	before, took, acquires := advance(), publish(), acquire()

	// What a relay writes in an hour, and what it clears away, each in a transaction of its own: a
	// row that is made and removed in one leaves nothing.
	const hour = 72_000
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	must(t, conn, `DO $$
		BEGIN
			FOR i IN 1..72000 LOOP
				INSERT INTO effectonce.outbox_advances SELECT relay, shard, n + 1, epoch, tick, next_tick, seq, floor, published, journal_offset
				FROM effectonce.outbox_advances WHERE relay = 'default' AND shard = 0 ORDER BY n DESC LIMIT 1;
				IF i % 1000 = 0 THEN
					DELETE FROM effectonce.outbox_advances WHERE n < (SELECT max(n) - 1000 FROM effectonce.outbox_advances);
				END IF;
				IF i % 50 = 0 THEN
					UPDATE effectonce.outbox_progress SET lease_until = lease_until;
				END IF;
				COMMIT;
			END LOOP;
		END $$`)
	require.Greater(t, one[int64](t, pool, `SELECT max(n) FROM effectonce.outbox_advances`), int64(hour))
	after := advance()
	t.Logf("pages read and written: by a write of progress %d before, %d after an hour of them; by taking the lease %d and %d; a drain of one row took %v and %v",
		before, after, acquires, acquire(), took, publish())
	require.Less(t, after, before+30, "the index got deeper; nothing else grows")
}
