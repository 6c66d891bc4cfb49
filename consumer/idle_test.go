package consumer_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// sorted returns how many statements of the consumer there were beside its polls, and how many others.
func sorted(statements []string) (own, others int) {
	for _, tag := range statements {
		switch {
		case tag == "-- consumer.poll":
		case strings.HasPrefix(tag, "-- consumer."):
			own++
		default:
			others++
		}
	}
	return own, others
}

// parkMany stores parked messages of many kinds, all of one partition: 60,000 that wait for an
// operator, a key with 20,000 behind its first, and 20,000 that are retried later.
func (h *harness) parkMany(name, partition int) {
	h.t.Helper()
	_, err := h.pool.Exec(h.t.Context(), `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, payload, record_time, reason, error, state, retry_at)
		SELECT $1, gen_random_uuid(), $2, $3, n, convert_to(CASE WHEN n BETWEEN 60000 AND 79999 THEN 'flood' ELSE 'key ' || n END, 'UTF8'), 'x', now(),
			CASE WHEN n BETWEEN 60001 AND 79999 THEN 'behind' ELSE 'failed' END, 'e',
			CASE WHEN n BETWEEN 60001 AND 79999 THEN 'behind' WHEN n >= 80000 THEN 'retry' ELSE 'parked' END, now() + interval '1 h'
		FROM generate_series(0, 99999) n`, name, h.topic, partition)
	require.NoError(h.t, err)
	h.exec(`ANALYZE effectonce.parked_messages`)
}

// Property: an idle process asks the database about once a second, for all its partitions and
// whatever is parked: 200 partitions and 100,000 parked messages cost one statement. It runs no
// other statements except those that run once a minute.
func TestIdlePartitionsAskOnceASecond(t *testing.T) {
	longtest.Only(t, "it counts statements in real time")
	t.Parallel()
	for name, settings := range map[string]func(*consumer.Config){"by partition": orders["by partition"], "by key": orders["by key"]} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const partitions, polls = 200, 5
			h := newHarness(t, partitions)
			pool, counted := h.counting()
			stop := h.runOn(pool, consumer.Each(effect), settings)
			h.wait("all partitions are in work", func() bool { return counted.count("-- consumer.heads") == partitions })
			h.parkMany(h.number(`SELECT id FROM effectonce.consumers`), 7)
			begun := h.number(`SELECT extract(epoch FROM clock_timestamp())::int`)
			before, polled := len(counted.all()), counted.count("-- consumer.poll")
			h.wait("polls", func() bool { return counted.count("-- consumer.poll") >= polled+polls })
			which := counted.all()[before:]
			own, others := sorted(which)
			require.LessOrEqual(t, own, 3, which)
			require.LessOrEqual(t, others, 50, which) // the upkeep of claims, once a minute
			require.GreaterOrEqual(t, h.number(`SELECT extract(epoch FROM clock_timestamp())::int`)-begun, counted.count("-- consumer.poll")-polled-2)
			require.NoError(t, stop())
		})
	}
}

// counting is a pool whose statements are collected, by their tags.
func (h *harness) counting() (*pgxpool.Pool, *list) {
	h.t.Helper()
	counted := &list{}
	note := func(sql string) {
		tag, _, _ := strings.Cut(sql, "\n")
		counted.add(tag)
	}
	return h.poolWith(func(config *pgxpool.Config) { config.ConnConfig.Tracer = pgtest.Statements(note) }), counted
}

// Property: while an operator pauses a topic, parked messages of it are not retried; they are when
// the pause ends.
func TestPausedTopicRetriesNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	pool, counted := h.counting()
	var repaired atomic.Bool
	stop := h.runOn(pool, failing(&repaired), parallel(consumer.OrderByKey))
	h.produceKeyed("a:bad")
	h.waitParked("permanent")
	polls := func() {
		before := counted.count("-- consumer.poll")
		h.wait("polls", func() bool { return counted.count("-- consumer.poll") >= before+2 })
	}
	h.exec(fmt.Sprintf(`INSERT INTO effectonce.consumer_pauses VALUES ('%[1]s', '%[1]s', 'ops', 'look')`, h.topic))
	polls()
	repaired.Store(true)
	h.retry()
	h.produceKeyed("b:1")
	polls()
	require.Empty(t, h.values())
	require.Equal(t, []string{"a:bad permanent retry"}, h.parked())
	h.exec(`DELETE FROM effectonce.consumer_pauses`)
	h.untilEffects(2, stop)
}

// node is a part of a plan.
type node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Removed  float64 `json:"Rows Removed by Filter"`
	Rechecks float64 `json:"Rows Removed by Index Recheck"`
	Plans    []node  `json:"Plans"`
}

// read is how many rows of parked messages a plan read.
func (n node) read() (rows float64) {
	if n.Relation == "parked_messages" && strings.Contains(n.Type, "Scan") && n.Type != "Bitmap Index Scan" {
		rows = (n.Rows + n.Removed + n.Rechecks) * n.Loops
	}
	for _, below := range n.Plans {
		rows += below.read()
	}
	return rows
}

// Property: the queries about parked messages read only the rows that they concern, not all parked
// ones, with either kind of plan. Row C15 of guarantees.md.
func TestParkedMessagesAreFoundByIndex(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.exec(`INSERT INTO effectonce.consumer_positions (consumer_group, topic, topic_id, partition, next_offset) SELECT 'g', '` + h.topic + `', NULL, n, 5 FROM generate_series(0, 9) n`)
	h.parkMany(1, 0)
	var head int64
	var hash []byte
	h.exec(`UPDATE effectonce.parked_messages SET state = 'retry', retry_at = now() WHERE "offset" IN (5, 60000, 60009)`)
	require.NoError(t, h.pool.QueryRow(t.Context(), `SELECT seq, sha256(key) FROM effectonce.parked_messages WHERE "offset" = 60000`).Scan(&head, &hash))
	topics, numbers, consumers := make([]string, 10), make([]int32, 10), make([]int32, 10)
	epochs, known := make([]int64, 10), make([]int64, 10)
	for i := range topics {
		topics[i], numbers[i], consumers[i], epochs[i], known[i] = h.topic, int32(i), 1, 1, 5
	}
	place := []any{1, h.topic, 0}
	for mode := range strings.SplitSeq("force_custom_plan force_generic_plan", " ") {
		for _, statement := range []struct {
			name, sql string
			rows      float64
			args      []any
		}{
			{"poll", consumer.PollSQL, 20, []any{"g", topics, numbers, consumers, epochs, known}},
			{"held now", consumer.HeldNowSQL, 4, append(place, [][]byte{hash})},
			{"touch heads", consumer.TouchHeadsSQL, 6, append(place, [][]byte{hash})},
			{"due", consumer.DueSQL, 20, append(place, 1000, true)},
			{"release", consumer.ReleaseSQL, 400, append(place, 100, 1<<20, []int64{head}, 100)},
		} {
			tx, err := h.pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `SET LOCAL plan_cache_mode = `+mode)
			require.NoError(t, err)
			var text []byte
			require.NoError(t, tx.QueryRow(t.Context(), `EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) `+statement.sql, statement.args...).Scan(&text), statement.name)
			require.NoError(t, tx.Rollback(t.Context()))
			var plans []struct{ Plan node }
			require.NoError(t, json.Unmarshal(text, &plans))
			require.LessOrEqual(t, plans[0].Plan.read(), statement.rows, "%s, %s: %s", statement.name, mode, text)
		}
	}
}

// Property: a fresh claim in the range that the consumer has handled was forgotten: the message is
// parked as expired and not run. Before and after that range it is run. Consumers that never
// forget, and those without claims, park none.
func TestFreshWhereAllWasWorkedThroughIsNotRun(t *testing.T) {
	t.Parallel()
	type testCase struct {
		settings      func(*consumer.Config)
		apart         bool
		fresh, parked int
	}
	each(t, map[string]testCase{
		"by ID":       {func(*consumer.Config) {}, false, 5, 5},
		"a worker":    {parallel(consumer.OrderByKey), true, 5, 5},
		"unordered":   {parallel(consumer.OrderUnordered), true, 5, 5},
		"for ever":    {func(c *consumer.Config) { c.Forever = true }, false, 10, 0},
		"by position": {func(c *consumer.Config) { c.Dedup = consumer.DedupByPosition }, false, 0, 0},
	}, func(t *testing.T, h *harness, _ string, c testCase) {
		t.Helper()
		cfg := consumer.Config{Group: "g", Topics: []string{h.topic}}
		c.settings(&cfg)
		cfg.BatchMax = 500
		engine := consumer.NewEngine(t, h.pool, consumer.Each(effect), cfg)
		at, err := engine.Hold(t.Context(), 0)
		require.NoError(t, err)
		fresh, err := engine.Apply(t.Context(), at, 0, 10)
		require.NoError(t, err)
		require.Equal(t, 10, fresh)
		h.exec(`DELETE FROM effectonce.processed_messages`)
		h.exec(`DELETE FROM effectonce.processed_forever`)
		at.HandledFrom(5)
		apply := engine.Apply
		if c.apart {
			apply = engine.ApplyApart
		}
		fresh, err = apply(t.Context(), at, 0, 10)
		require.NoError(t, err)
		require.Equal(t, c.fresh, fresh)
		require.Equal(t, c.parked, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE reason = 'expired' AND "offset" BETWEEN 5 AND 9`))
		fresh, err = apply(t.Context(), at, 10, 5)
		require.NoError(t, err)
		require.Equal(t, 5, fresh, "behind the position")
		require.Equal(t, c.parked, h.number(`SELECT count(*) FROM effectonce.parked_messages`))
	})
}

// Property: parked messages that are retried are read in bounded memory, with their headers.
func TestHeadersCountForWhatIsRetried(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var largest, handled atomic.Int64
	handler := consumer.Batch(func(_ context.Context, _ pgx.Tx, msgs []*consumer.Message) error {
		size := int64(0)
		for _, msg := range msgs {
			for _, header := range msg.Headers {
				size += int64(len(header.Value))
			}
		}
		largest.Store(max(largest.Load(), size))
		handled.Add(int64(len(msgs)))
		return nil
	})
	stop := h.run(handler, nil)
	h.wait("the name", func() bool { return h.number(`SELECT count(*) FROM effectonce.consumers`) == 1 })
	h.exec(fmt.Sprintf(`INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", headers, record_time, reason, error, state)
		SELECT (SELECT id FROM effectonce.consumers), gen_random_uuid(), '%s', 0, n, jsonb_build_object('h', repeat('x', 1 << 20)), now(), 'failed', 'e', 'retry' FROM generate_series(0, 39) n`, h.topic))
	h.wait("retried", func() bool { return handled.Load() == 40 })
	require.NoError(t, stop())
	require.LessOrEqual(t, largest.Load(), int64(16<<20))
	require.Empty(t, h.parked())
}
