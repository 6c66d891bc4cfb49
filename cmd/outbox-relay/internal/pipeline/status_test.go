package pipeline_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func readStatus(t *testing.T, conn *pgx.Conn, opts pipeline.StatusOptions) *pipeline.Status {
	t.Helper()
	status, err := pipeline.ReadStatus(t.Context(), conn, "effectonce", opts)
	require.NoError(t, err)
	return status
}

// Whether the pipeline is well depends on who relays and on what waits, and each problem names what
// to do.
func TestStatusIsJudged(t *testing.T) {
	t.Parallel()
	const (
		row   = "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', clock_timestamp() - interval '5 minutes')"
		live  = "INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch) VALUES ('default', 0, 'replica-1', clock_timestamp() + interval '1 hour', 3)"
		over  = "INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch) VALUES ('default', 0, 'replica-1', clock_timestamp() - interval '1 second', 3)"
		away  = "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, state, problem) VALUES ('default', 'replica-1', clock_timestamp() + interval '1 hour', 'kafka_away', 'unable to dial')"
		stuck = "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, state, problem) VALUES ('default', 'replica-1', clock_timestamp() + interval '1 hour', 'stuck', 'shard 0')"
		old   = "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until) VALUES ('default', 'replica-1', clock_timestamp() + interval '1 hour')"
		gone  = "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, state) VALUES ('default', 'replica-1', clock_timestamp() - interval '1 second', 'kafka_away')"
		dead  = "INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state) VALUES ('default', 1, gen_random_uuid(), 't', '{}', now(), 'too_large', 'e', 'held')"
		many  = "INSERT INTO effectonce.outbox_dead SELECT 'default', n, gen_random_uuid(), 't', convert_to('k' || n, 'UTF8'), '', '{}', now(), 'too_large', 'e', '', 1, 'held' FROM generate_series(1, 9) n"
		two   = "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 2)"
	)
	conn := connect(t, pgtest.Database(t))
	for name, c := range map[string]struct {
		before  []string
		ageMax  time.Duration
		problem string // empty: well
	}{
		"nothing at all":                  {},
		"idle without a relay":            {before: []string{over}},
		"rows and a relay":                {before: []string{row, live}},
		"rows that no relay ever saw":     {before: []string{row}, problem: "never ran: start"},
		"rows and a lease that ran out":   {before: []string{row, over}, problem: "no replica runs: start"},
		"a holder without Kafka":          {before: []string{row, live, away}, problem: "takes none from \"replica-1\" (unable to dial)"},
		"no holder, no Kafka":             {before: []string{row, over, away}, problem: "takes none from \"replica-1\" (unable to dial)"},
		"no holder ever, no Kafka":        {before: []string{row, away}, problem: "takes none from \"replica-1\""},
		"nothing waits for Kafka":         {before: []string{live, away}},
		"no Kafka before it ended":        {before: []string{row, over, gone}, problem: "no replica runs: start"},
		"a hung shard":                    {before: []string{row, over, stuck}, problem: "\"replica-1\" is stuck: restart it"},
		"a hung shard, nothing waits":     {before: []string{live, stuck}, problem: "replica \"replica-1\" is stuck: restart it (shard 0)"},
		"a free lease and a replica":      {before: []string{row, over, old}, problem: "though 1 run: see the log of \"replica-1\""},
		"a row that waits too long":       {before: []string{row, live}, ageMax: time.Minute, problem: "longer than 1m"},
		"a row that waits not long":       {before: []string{row, live}, ageMax: time.Hour},
		"a dead row":                      {before: []string{live, dead}, problem: "1 row in outbox_dead"},
		"dead rows of two shards":         {before: []string{two, live, many}, problem: "2 shards (0, 1): 9 rows in outbox_dead"},
		"progress of another cluster":     {before: []string{live, "UPDATE effectonce.outbox_progress SET system_identifier = 1"}, problem: "another database cluster"},
		"a tick that was deleted by hand": {before: []string{live, "INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick) VALUES ('default', 0, 1, 0, 7)"}, problem: "tick 7"},
	} {
		exec(t, conn, "TRUNCATE effectonce.outbox, effectonce.outbox_progress, effectonce.outbox_advances, effectonce.outbox_replicas, effectonce.outbox_dead, effectonce.outbox_relays RESTART IDENTITY")
		for _, sql := range c.before {
			exec(t, conn, sql)
		}
		status, err := pipeline.ReadStatus(t.Context(), conn, "effectonce", pipeline.StatusOptions{AgeMax: c.ageMax})
		if err != nil {
			require.ErrorContains(t, err, c.problem, name)
			require.NotEmpty(t, c.problem, name)
			continue
		}
		assert.Equal(t, c.problem == "", status.Well, name)
		assert.Contains(t, strings.Join(status.Problems, "\n"), c.problem, name)
	}
}

// Relays with different names are readers of their own: each has its lease, its backlog and its
// dead.
func TestEachRelayIsReported(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('t'), ('t')")
	exec(t, conn, "INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) VALUES (1, pg_current_snapshot(), 2)")
	exec(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch)
		VALUES ('ahead', 0, 'a', clock_timestamp() + interval '1 hour', 4), ('behind', 0, 'b', NULL, 2)`)
	exec(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, published) VALUES ('ahead', 0, 1, 4, 1, 20), ('behind', 0, 1, 2, 0, 10)`)
	exec(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('t')")
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		SELECT 'ahead', n, gen_random_uuid(), 't', '{}', now(), CASE n WHEN 1 THEN 'refused' ELSE 'behind' END, 'e', 'held' FROM generate_series(1, 3) n`)
	status := readStatus(t, conn, pipeline.StatusOptions{})
	require.Len(t, status.Relays, 2)
	ahead, behind := status.Relays[0], status.Relays[1]
	assert.Equal(t, []any{"ahead", "a", int64(1), int64(4), int64(20)}, []any{ahead.Relay, ahead.Owner, ahead.Waiting, ahead.Epoch, ahead.Published})
	assert.Equal(t, map[string]int64{"refused": 1, "behind": 2}, ahead.Dead)
	assert.Equal(t, []any{"behind", "", int64(3)}, []any{behind.Relay, behind.Owner, behind.Waiting})
	assert.Empty(t, behind.Dead)
	picked := readStatus(t, conn, pipeline.StatusOptions{Relay: "never"})
	require.Len(t, picked.Relays, 1)
	assert.Equal(t, int64(3), picked.Relays[0].Waiting)
}

const progressOf = `WITH shard AS (INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ($1, 0) RETURNING relay, shard)
	INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, published) SELECT relay, shard, 1, 0, $2 FROM shard`

// The rate is what was published since the status, by the database's clock.
func TestRateIsMeasuredBetweenTwoLooks(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, progressOf, "old", 1000)
	exec(t, conn, progressOf, "new", 500)
	status := readStatus(t, conn, pipeline.StatusOptions{})
	assert.Nil(t, status.Relays[0].RowsPerSecond)
	var began, ended time.Time
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&began))
	exec(t, conn, "UPDATE effectonce.outbox_advances SET published = published + CASE relay WHEN 'new' THEN 500 ELSE 300 END")
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT clock_timestamp() FROM pg_sleep(0.2)").Scan(&ended))
	now, err := pipeline.Shards(t.Context(), conn, "effectonce", nil)
	require.NoError(t, err)
	status.MeasureRates(now)
	atMost := 1 / ended.Sub(began).Seconds()
	for i, rows := range []float64{500, 300} {
		rate := status.Relays[i].RowsPerSecond
		require.NotNil(t, rate)
		assert.Positive(t, *rate)
		assert.LessOrEqual(t, *rate, rows*atMost)
		assert.InEpsilon(t, rows/500, *rate / *status.Relays[0].RowsPerSecond, 0.01)
	}
}

// Counting keys reads the partial indexes, and none of a million finished ones; each kind is
// counted up to its limit.
func TestKeysAreCountedThroughTheirIndexes(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, expires_at)
		SELECT 't', 'charge', n::text, sha256('x'), CASE WHEN n <= 10010 THEN 'indeterminate' WHEN n <= 10020 THEN 'running' ELSE 'finished' END,
			CASE WHEN n > 10020 THEN clock_timestamp() + interval '1 day' END FROM generate_series(1, 30000) n`)
	exec(t, conn, "ANALYZE effectonce.idempotency_keys")
	k, err := pipeline.ReadKeys(t.Context(), conn, "effectonce")
	require.NoError(t, err)
	assert.Equal(t, int64(pipeline.KeysMax), k.Indeterminate)
	assert.Equal(t, int64(10), k.Running)
	plan := pgtest.Plan(t, conn, pipeline.KeysSQL, pipeline.KeysMax, "1 hour")
	assert.NotContains(t, plan, "Seq Scan")
	for _, index := range []string{"unfinished", "undecided", "expiry"} {
		assert.Contains(t, plan, "idempotency_keys_"+index)
	}
}
