package consumers_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const schema = "effectonce"

var by = operator.By{Who: "ana@ops", Why: "INC-12"}

// siteSQL has a group that works on two topics, and one that asked for a topic and got nothing of
// it yet.
const siteSQL = `
INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window) VALUES
  ('billing/orders', 'billing', '{orders}', '7 days'), ('billing/refunds', 'billing', '{refunds}', '7 days'), ('audit', 'audit', '{orders}', NULL);
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, owner, trouble) VALUES
  ('billing', 'orders', 0, 40, 'host-1', 'out of range'), ('billing', 'orders', 1, NULL, NULL, NULL), ('billing', 'refunds', 0, 7, 'host-2', NULL);
UPDATE effectonce.consumer_positions SET released = false WHERE topic = 'orders' AND partition = 0`

func actions(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT concat_ws(' ', stated, what, why, subject) FROM effectonce.operator_actions ORDER BY id`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// tables are everything that an order may change.
func tables(t *testing.T, pool *pgxpool.Pool) (text string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT concat((SELECT json_agg(c ORDER BY id) FROM effectonce.consumers c),
		(SELECT json_agg(p ORDER BY topic, partition) FROM effectonce.consumer_positions p), (SELECT json_agg(p) FROM effectonce.consumer_pauses p),
		(SELECT json_agg(a) FROM effectonce.operator_actions a))`).Scan(&text))
	return text
}

// Property: a pause and its end are recorded in their transaction. A topic that is already paused
// keeps who paused it first and why; an order that changes nothing is not recorded.
func TestTopicsArePaused(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, siteSQL)
	pause, paused, err := consumers.PauseTopic(t.Context(), pool, schema, by, "billing", "orders")
	require.NoError(t, err)
	require.True(t, paused)
	again, paused, err := consumers.PauseTopic(t.Context(), pool, schema, operator.By{Who: "bob", Why: "too"}, "billing", "orders")
	require.NoError(t, err)
	require.False(t, paused)
	require.Equal(t, pause, again)
	_, _, err = consumers.PauseTopic(t.Context(), pool, schema, by, "audit", "orders")
	require.NoError(t, err)
	group := "billing"
	found, err := consumers.Pauses(t.Context(), pool, schema, &group, nil)
	require.NoError(t, err)
	require.Equal(t, []consumers.Pause{pause}, found)
	for _, want := range []bool{true, false} {
		resumed, err := consumers.ResumeTopic(t.Context(), pool, schema, by, "billing", "orders")
		require.NoError(t, err)
		require.Equal(t, want, resumed)
	}
	require.Equal(t, []string{
		`ana@ops consumer.pause INC-12 {"group": "billing", "topic": "orders"}`,
		`ana@ops consumer.pause INC-12 {"group": "audit", "topic": "orders"}`,
		`ana@ops consumer.resume INC-12 {"group": "billing", "topic": "orders"}`,
	}, actions(t, pool))
}

// Property: an order that cannot be carried out, because a group, a topic, a partition or a
// consumer of the name does not exist, is refused with the names of those that do, and changes
// nothing.
func TestUnknownNamesAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, siteSQL)
	before := tables(t, pool)
	_, _, group := consumers.PauseTopic(t.Context(), pool, schema, by, "biling", "orders")
	_, topic := consumers.ResumeTopic(t.Context(), pool, schema, by, "billing", "odrers")
	_, partition := consumers.ResumeAt(t.Context(), pool, schema, by, consumers.Partition{Group: "billing", Topic: "orders", Partition: 2}, 1, nil, false)
	_, none := consumers.ResumeAt(t.Context(), pool, schema, by, consumers.Partition{Group: "audit", Topic: "orders"}, 1, nil, false)
	_, back := consumers.Cancel(t.Context(), pool, schema, by, consumers.Partition{Group: "billing", Topic: "orders", Partition: 2})
	_, show := consumers.Rule(t.Context(), pool, schema, "billing/odrers")
	_, set := consumers.SetRule(t.Context(), pool, schema, by, "billing/odrers", "standard", false)
	for text, err := range map[string]error{
		`group "biling" is unknown: there is "audit", "billing"`:                                                      group,
		`topic "odrers" of group billing is unknown: there is "orders", "refunds"`:                                    topic,
		`resume orders/2 of group billing: no position is stored for it, the partition is unknown: there is "0", "1"`: partition,
		"unknown: there is none": none,
		`there is "0", "1"`:      back,
		`consumer "billing/odrers" is unknown: there is "audit", "billing/orders", "billing/refunds"`: show,
		`there is "audit", "billing/orders", "billing/refunds"`:                                       set,
	} {
		require.ErrorIs(t, err, consumers.ErrUnknown)
		require.ErrorContains(t, err, text)
	}
	require.Equal(t, before, tables(t, pool))
}

// Property: an order to resume is stored and recorded together, with the position and the order
// that it replaces; a dry run changes nothing; an order can be withdrawn until it is carried out.
func TestPartitionsAreOrderedToResumeElsewhere(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, siteSQL)
	p := consumers.Partition{Group: "billing", Topic: "orders"}
	before := tables(t, pool)
	r, err := consumers.ResumeAt(t.Context(), pool, schema, by, p, consumers.AtLatest, nil, true)
	require.NoError(t, err)
	require.Equal(t, before, tables(t, pool))
	require.Equal(t, []string{"host-1", "out of range"}, []string{r.Holder, r.Trouble})

	_, err = consumers.ResumeAt(t.Context(), pool, schema, by, p, consumers.AtLatest, nil, false)
	require.NoError(t, err)
	r, err = consumers.ResumeAt(t.Context(), pool, schema, by, p, 50, nil, false)
	require.NoError(t, err)
	require.Equal(t, consumers.AtLatest, *r.Before)
	orders, err := consumers.Requests(t.Context(), pool, schema)
	require.NoError(t, err)
	require.Equal(t, []consumers.Request{r.Request}, orders)
	for _, want := range []bool{true, false} {
		taken, err := consumers.Cancel(t.Context(), pool, schema, by, p)
		require.NoError(t, err)
		require.Equal(t, want, taken)
	}
	done := actions(t, pool)
	require.Len(t, done, 3)
	require.Contains(t, done[0], `"resume_at": "latest"`)
	for _, part := range []string{"ana@ops consumer.resume_at INC-12", `"group": "billing"`, `"topic": "orders"`, `"partition": 0`, `"resume_at": "50"`, `"position": 40`, `"before": -1`} {
		require.Contains(t, done[1], part)
	}
	require.Contains(t, done[2], `"resume_at": null`)
}

// Property: an order that cannot be recorded is not given either.
func TestOrdersAreWrittenDownOrNotGiven(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, siteSQL)
	before := tables(t, pool)
	tooLong := operator.By{Who: "ana", Why: strings.Repeat("x", 3000)}
	_, err := consumers.ResumeAt(t.Context(), pool, schema, tooLong, consumers.Partition{Group: "billing", Topic: "orders"}, 1, nil, false)
	require.Error(t, err)
	_, err = consumers.SetRule(t.Context(), pool, schema, tooLong, "billing/orders", "standard+debezium", false)
	require.Error(t, err)
	_, _, err = consumers.PauseTopic(t.Context(), pool, schema, tooLong, "billing", "orders")
	require.Error(t, err)
	require.Equal(t, before, tables(t, pool))
}

// Property: before an order is given, its effect (what it skips or repeats) is reported as exactly
// as it is known; an offset that the partition does not have is refused if that is known.
func TestEffectsOfOrdersAreSaid(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, siteSQL)
	known := &topicscan.Span{Start: 10, End: 60}
	for _, c := range []struct {
		partition int32
		at        int64
		extent    *topicscan.Span
		want      string
	}{
		{0, 41, nil, "1 offsets, from the position, 40, to 40: they are skipped"},
		{0, 100, nil, "60 offsets, from the position, 40, to 99: they are skipped"},
		{0, 40, nil, "nothing is skipped, nothing is repeated"},
		{0, 39, nil, "1 offsets, from 39 to 39: they are delivered again"},
		{0, 0, nil, "40 offsets, from 0 to 39: they are delivered again"},
		{0, consumers.AtEarliest, nil, "messages from the start of the partition to the position, 40: they are delivered again"},
		{0, consumers.AtLatest, nil, "messages from the position, 40, to the end of the partition: they are skipped"},
		{0, consumers.AtEarliest, known, "30 offsets, from 10 to 39: they are delivered again"},
		{0, consumers.AtLatest, known, "20 offsets, from the position, 40, to 59: they are skipped"},
		// The partition lost its end: the position is behind it.
		{0, consumers.AtLatest, &topicscan.Span{Start: 0, End: 5}, "35 offsets, from 5 to 39: they are delivered again"},
		{1, 5, nil, "nothing of the partition is handled yet"},
	} {
		r, err := consumers.ResumeAt(t.Context(), pool, schema, by, consumers.Partition{Group: "billing", Topic: "orders", Partition: c.partition}, c.at, c.extent, true)
		require.NoError(t, err)
		assert.Contains(t, r.Effect, c.want)
	}
	for at, want := range map[int64]string{9: "offset 9 is deleted, the first one is 10", 61: "offset 61 is behind the end of the partition, 60"} {
		_, err := consumers.ResumeAt(t.Context(), pool, schema, by, consumers.Partition{Group: "billing", Topic: "orders"}, at, known, false)
		require.ErrorContains(t, err, want)
	}
	require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.consumer_positions WHERE resume_at IS NOT NULL`))
	for text, want := range map[string]int64{"earliest": -2, "latest": -1, "0": 0, "9223372036854775807": 1<<63 - 1} {
		at, err := consumers.ParseAt(text)
		require.NoError(t, err)
		require.Equal(t, want, at)
		require.Equal(t, text, consumers.AtText(at))
	}
	for _, text := range []string{"", "-1", "-2", "end", "1.5", "9223372036854775808"} {
		_, err := consumers.ParseAt(text)
		require.Error(t, err, text)
	}
}

// Property: only known rules for IDs are stored, each change with a note; storing the current rule
// again is no change. A rule is not changed under a replica that runs.
func TestRulesForIDsAreChanged(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, siteSQL)
	held := func(released bool) {
		_, err := pool.Exec(t.Context(), "UPDATE effectonce.consumer_positions SET owner = 'host-1', released = $1 WHERE consumer_group = 'billing' AND topic = 'orders'", released)
		require.NoError(t, err)
	}
	held(true)
	for _, rule := range []string{"standard", "standard+debezium", "standard+watermill", "standard+watermill+debezium", "headers:id", "headers:order-id,Idempotency-Key", "headers:" + strings.Repeat("a,", 19) + "a", "standard+debezium"} {
		_, err := consumers.SetRule(t.Context(), pool, schema, by, "billing/orders", rule, false)
		require.NoError(t, err, rule)
		c, err := consumers.Rule(t.Context(), pool, schema, "billing/orders")
		require.NoError(t, err)
		require.Equal(t, rule, c.IDRule)
	}
	before, err := consumers.SetRule(t.Context(), pool, schema, by, "billing/orders", "standard+debezium", false)
	require.NoError(t, err)
	require.Equal(t, "standard+debezium", before.IDRule)
	done := actions(t, pool)
	require.Len(t, done, 7)
	require.Equal(t, `ana@ops consumer.id_rule INC-12 {"before": "standard", "id_rule": "standard+debezium", "consumer": "billing/orders"}`, done[0])
	for _, rule := range []string{
		"", "Standard", "standard+", "standard+kafka", "standard+debezium+debezium", "debezium", "standard+standard", "headers", "headers:a,", "headers:,a", "headers:a b", "headers:a\n", "headers:ä",
		"headers:" + strings.Repeat("a", 256), "headers:" + strings.Repeat("a,", 20) + "a", "headers:" + strings.Repeat(strings.Repeat("a", 250)+",", 9) + "a",
	} {
		_, err := consumers.SetRule(t.Context(), pool, schema, by, "billing/orders", rule, false)
		require.Error(t, err, rule)
	}
	held(false)
	_, err = consumers.SetRule(t.Context(), pool, schema, by, "billing/orders", "headers:id", false)
	require.ErrorContains(t, err, "orders/0 is held by host-1; stop all replicas first")
	require.Len(t, actions(t, pool), 7)
	_, err = consumers.SetRule(t.Context(), pool, schema, by, "billing/orders", "headers:id", true)
	require.NoError(t, err)
	all, err := consumers.Registered(t.Context(), pool, schema)
	require.NoError(t, err)
	require.Len(t, all, 3)
}

// Property: topics that do not exist are found, each once, and only those; without topics Kafka is
// not asked.
func TestMissingTopicsAreFound(t *testing.T) {
	t.Parallel()
	admin := kadm.NewClient(kafkatest.Client(t))
	there, gone := kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
	missing, err := consumers.Missing(t.Context(), admin, []string{there, gone, gone, "no topic: a name that Kafka refuses"})
	require.NoError(t, err)
	require.ElementsMatch(t, []string{gone, "no topic: a name that Kafka refuses"}, missing)
	missing, err = consumers.Missing(t.Context(), admin, nil)
	require.NoError(t, err)
	require.Empty(t, missing)
}

func TestMain(m *testing.M) { pgtest.Main(m) }
