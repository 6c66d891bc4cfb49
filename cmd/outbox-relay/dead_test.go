package main_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// burySQL is what a relay leaves: order-1 is too large and holds its key, with two behind it; one
// without a key; one of another topic, that does not exist, with a key that is no text.
const burySQL = `
INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state, died_at)
SELECT 'default', n, ('01976f00-0000-7000-8000-00000000000' || n)::uuid, topic, key, convert_to('CANARY payload', 'UTF8'),
  '{"authorization": "CANARY header"}', '2026-01-02 03:04:05Z', reason, error, state, clock_timestamp() - interval '10 minutes'
FROM (VALUES
  (1, 'orders', 'order-1'::bytea, 'too_large', E'the record has 7 bytes\nmore', 'held'),
  (2, 'orders', 'order-1', 'behind', 'an earlier row', 'behind'),
  (3, 'orders', 'order-1', 'behind', 'an earlier row', 'behind'),
  (4, 'orders', NULL, 'refused', E'evil \x1b]0;x\x07', 'held'),
  (5, 'payments', '\x00ff', 'unknown_topic', 'topic "payments" does not exist', 'held')
) AS d (n, topic, key, reason, error, state)`

// deadDatabase returns a database with dead rows.
func deadDatabase(t *testing.T) (address string, conn *pgx.Conn) {
	t.Helper()
	address = pgtest.Database(t)
	conn = connect(t, address)
	execSQL(t, conn, burySQL)
	return address, conn
}

// deadRows lists what is dead, as "seq state".
func deadRows(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT format('%s %s', seq, state) FROM effectonce.outbox_dead ORDER BY seq`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

var asBuried = []string{"1 held", "2 behind", "3 behind", "4 held", "5 held"}

// Dead rows are listed with the facts that a person needs first, safe for a terminal, and with the
// totals.
func TestDeadListShowsWhatWaits(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	r := runOn(t, address, "dead", "list")
	require.Zero(t, r.code, r.stderr)
	lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
	require.Len(t, lines, 5, r.stdout)
	assert.Regexp(t, `^seq +id +topic +key +reason +attempts +age +behind it +error$`, lines[0])
	assert.Regexp(t, `^5 +01976f00-\S+5 +payments +base64:AP8= +unknown_topic +1 +10m0?\S* +0 +topic "payments" does not exist$`, lines[1])
	assert.Regexp(t, `^4 +01976f00-\S+4 +orders +- +refused .* evil \\x1b\]0;x\\a$`, lines[2])
	assert.Regexp(t, `^1 +01976f00-\S+1 +orders +order-1 +too_large +1 +10m0?\S* +2 +the record has 7 bytes…$`, lines[3])
	assert.Equal(t, "relay default: 5 dead (behind 2, refused 1, too_large 1, unknown_topic 1), 2 keys held, 0 being retried", lines[4])
	assert.Contains(t, runOn(t, address, "dead", "list", "--limit", "1").stdout, "the newest 1: --limit shows more\n")
	execSQL(t, conn, "UPDATE effectonce.outbox_dead SET state = 'retry' WHERE seq = 1")
	assert.Contains(t, runOn(t, address, "dead", "list", "--key", "order-1").stdout, "too_large (being retried)")
	execSQL(t, conn, "DELETE FROM effectonce.outbox_dead")
	r = runOn(t, address, "dead", "list")
	assert.Equal(t, result{0, "no dead rows\n", ""}, r)
}

// Each filter reaches the database, and filters that match nothing give a line that says so.
func TestDeadFilters(t *testing.T) {
	t.Parallel()
	address, _ := deadDatabase(t)
	for _, c := range []struct {
		args []string
		want string // last digits of the IDs
	}{
		{[]string{"--id", idPrefix + "2"}, "2"},
		{[]string{"--id", "3"}, "3"},
		{[]string{"--key", "base64:AP8="}, "5"},
		{[]string{"--topic", "orders"}, "41"},
		{[]string{"--relay", "default", "--topic", "payments"}, "5"},
		{[]string{"--relay", "other"}, ""},
		{[]string{"--reason", "behind"}, "32"},
		{[]string{"--reason", "refused"}, "4"},
		{[]string{"--state", "behind"}, "32"},
		{[]string{"--state", "held"}, "541"},
		{[]string{"--older-than", "5m"}, "541"},
		{[]string{"--younger-than", "5m"}, ""},
	} {
		r := runOn(t, address, append([]string{"dead", "list", "--json"}, c.args...)...)
		var found string
		for line := range strings.Lines(r.stdout) {
			var row queue.DeadRow
			_ = json.Unmarshal([]byte(line), &row) // the key is no JSON of a Key
			found += row.ID.String()[35:]
		}
		assert.Equal(t, c.want, found, c.args)
		if c.want == "" {
			assert.Equal(t, result{}, r)
			text := runOn(t, address, append([]string{"dead", "list"}, c.args...)...)
			assert.Equal(t, result{0, "no dead rows match: \"outbox-relay dead list\" shows all\n", ""}, text)
		}
	}
}

// One row is shown with everything, and with what to do.
func TestDeadShow(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	r := runOn(t, address, "dead", "show", idPrefix+"1")
	require.Zero(t, r.code, r.stderr)
	for _, want := range []string{
		"row        seq 1 of relay default, written 2026-01-02T03:04:05Z\n", "topic      orders\n", "key        order-1\n", "state      waits for an operator\n",
		"error\n  the record has 7 bytes\n  more\n", "headers\n  authorization: \"CANARY header\"\n", "payload    14 bytes of text\n  CANARY payload\n",
		"behind it  2 rows\n  " + idPrefix + "2  seq 2\n", "what to do raise max.message.bytes of the topic, then retry",
	} {
		assert.Contains(t, r.stdout, want)
	}
	execSQL(t, conn, "UPDATE effectonce.outbox_dead SET payload = 'x' WHERE seq = 1")
	execSQL(t, conn, "DELETE FROM effectonce.outbox_dead WHERE seq = 2")
	r = runOn(t, address, "dead", "show", "1")
	assert.Contains(t, r.stdout, "payload    1 byte of text\n  x\n")
	assert.Contains(t, r.stdout, "behind it  1 row\n")
	assert.Contains(t, runOn(t, address, "dead", "show", "3").stdout, "behind "+idPrefix+"1, which has to be")
	m := runOn(t, address, "dead", "show", "4", "--json").object(t)
	assert.Equal(t, "CANARY payload", m["payload"])
	assert.NotEmpty(t, m["do"])
	assert.Equal(t, 1, runOn(t, address, "dead", "show", "77").code)
	assert.Equal(t, 2, runOn(t, address, "dead", "show", "seven").code)
	assert.Equal(t, 2, runOn(t, address, "dead", "show").code)
}

// Acting on rows takes a choice that is made on the command line, and a reason for what is lost;
// what is behind another row is not acted on alone, and the error names the head. Else nothing is
// done.
func TestDeadActionsNeedAChoice(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	environment := map[string]string{"DATABASE_URL": address, "OUTBOX_ALL": "true", "OUTBOX_TOPIC": "orders", "OUTBOX_RELAY": "default", "OUTBOX_WHY": "w", "OUTBOX_ALL_OF_KEY": "true"}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"retry"}, 2, "no filter is given"},
		{[]string{"discard"}, 2, "no filter is given"},
		{[]string{"discard", "--topic", "orders"}, 2, "--why is missing"},
		{[]string{"retry", "--reason", "bad luck"}, 2, "--reason \"bad luck\": want one of unknown_topic, "},
		{[]string{"retry", "--state", "dead"}, 2, "want one of held, behind, retry"},
		{[]string{"retry", "--id", "x"}, 2, "want the row's id or its seq"},
		{[]string{"retry", "--topic", "nothing"}, 0, ""},
		{[]string{"retry", "--id", "77"}, 1, "no dead rows match"},
		{[]string{"retry", "--id", idPrefix + "3"}, 1, "waits behind " + idPrefix + "1: only the first"},
		{[]string{"retry", "--state", "behind"}, 1, "waits behind " + idPrefix + "1: only the first"},
		{[]string{"discard", "--why", "w", "--id", "2", "--all-of-key"}, 1, "waits behind " + idPrefix + "1: only the first"},
		{[]string{"retry", "--all", "--dry-run"}, 0, ""},
		{[]string{"discard", "--why", "w", "--all", "--dry-run", "--json"}, 0, ""},
	} {
		r := run(t, environment, append([]string{"dead"}, c.args...)...)
		assert.Equal(t, c.code, r.code, "%q: %+v", c.args, r)
		assert.Contains(t, r.stderr, c.want, c.args)
	}
	assert.Equal(t, asBuried, deadRows(t, conn))
	assert.Contains(t, runOn(t, address, "dead", "retry", "--all", "--dry-run").stdout, "3 rows would be retried; nothing was done (--dry-run)\n")
	assert.Contains(t, runOn(t, address, "dead", "discard", "--all", "--all-of-key", "--why", "w", "--dry-run").stdout,
		"3 rows, and all rows behind them, would be discarded; nothing was done (--dry-run)\n")
}

// Retry and discard work in the order of age, and are recorded; a row that was handed back cannot
// be discarded any more.
func TestDeadRetryAndDiscard(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	r := runOn(t, address, "dead", "retry", "--topic", "orders", "--limit", "1", "--by", "ana", "--why", "limit raised")
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "1 row retried\n", r.stdout)
	assert.Equal(t, []string{"1 retry", "2 behind", "3 behind", "4 held", "5 held"}, deadRows(t, conn), "the oldest first")
	r = runOn(t, address, "dead", "retry", "--topic", "orders", "--rate", "1000")
	assert.Zero(t, r.code)
	assert.Equal(t, "1 row retried; 1 were handed back before\n", r.stdout)
	r = runOn(t, address, "dead", "retry", "--topic", "orders", "--wait", "--wait-max", "1s")
	assert.Equal(t, 1, r.code, "no relay publishes them")
	assert.Contains(t, r.stdout, "0 rows retried; 2 were handed back before\n0 published, 0 held again\nnot done within 1s: 2;")
	r = runOn(t, address, "dead", "discard", "--id", "1", "--why", "w")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "not discarded: "+idPrefix+"1: it was handed back")

	execSQL(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held' WHERE seq IN (1, 4)") // as the relay does that cannot publish them
	r = runOn(t, address, "dead", "discard", "--id", idPrefix+"1", "--why", "test order")
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "1 row discarded; 1 key released\n", r.stdout)
	assert.Equal(t, []string{"2 retry", "3 behind", "4 held", "5 held"}, deadRows(t, conn))
	execSQL(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held' WHERE seq = 2")
	m := runOn(t, address, "dead", "discard", "--json", "--key", "order-1", "--all-of-key", "--yes", "--why", "all of it").object(t)
	assert.InDelta(t, 2, m["done"], 0)
	assert.Equal(t, []string{"4 held", "5 held"}, deadRows(t, conn))
	r = runOn(t, address, "actions", "list")
	assert.Regexp(t, `(?m)^\d{4}-\S+Z +\S+ \(ana\) +dead\.retry +`+idPrefix+`1 +limit raised$`, r.stdout)
	assert.Equal(t, 3, strings.Count(r.stdout, "dead.discard"))
}

// Rows that were not reached because of an error are reported as not done, and not as gone.
func TestDeadRetryThatFails(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	execSQL(t, conn, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''refused''; END'`)
	execSQL(t, conn, "CREATE TRIGGER refuse BEFORE UPDATE ON effectonce.outbox_dead FOR EACH ROW EXECUTE FUNCTION refuse()")
	r := runOn(t, address, "dead", "retry", "--all")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "0 rows retried; 3 not done\n", r.stdout)
	assert.Contains(t, r.stderr, "refused")
	assert.Equal(t, asBuried, deadRows(t, conn))
}

// Row S3 of guarantees.md: payloads and headers are shown by "dead show" alone.
func TestDeadPayloadsAreNotPrinted(t *testing.T) {
	t.Parallel()
	address, _ := deadDatabase(t)
	for _, args := range [][]string{
		{"dead", "list"},
		{"dead", "list", "--json"},
		{"dead", "retry", "--all", "--dry-run"},
		{"dead", "retry", "--id", "4", "--json"},
		{"dead", "discard", "--all", "--yes", "--why", "w"},
		{"actions", "list", "--json"},
	} {
		assertNoCanary(t, runOn(t, address, args...), strings.Join(args, " "))
	}
}

// Rows O11, O12 of guarantees.md: a running relay follows the operator: retried rows are published
// in the order of their key, rows held again are named with the new reason, discarded rows are
// never published, and the rest of their key is.
func TestRelayFollowsTheOperator(t *testing.T) {
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1, "max.message.bytes", "5000")
	conn := connect(t, address)
	inBackground(t, map[string]string{"DATABASE_URL": address, "KAFKA_BROKERS": strings.Join(kafkatest.Brokers(t), ",")}, "run", "--lease", "1m")
	for _, payload := range []string{"a1", "a:big", "a2", "b:bad", "b2", "c1"} {
		execSQL(t, conn, `INSERT INTO effectonce.outbox (topic, key, payload, headers) SELECT $1, convert_to(left($2, 1), 'UTF8'),
			convert_to($2 || repeat('x', CASE WHEN $2 LIKE '%big' THEN 6000 ELSE 0 END), 'UTF8'), CASE WHEN $2 LIKE '%bad' THEN '{"n": {}}' ELSE '{}' END::jsonb`, topic, payload)
	}
	published := func(key string) (values []string) {
		for _, record := range kafkatest.ReadAll(t, topic) {
			if string(record.Key) == key {
				values = append(values, string(record.Value))
			}
		}
		return values
	}
	require.Eventually(t, func() bool { return len(deadRows(t, conn)) == 4 && len(published("c")) == 1 }, commandMax, 20*time.Millisecond)

	r := runOn(t, address, "dead", "retry", "--all", "--wait")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "2 rows retried\n0 published, 2 held again\nheld: ")
	execSQL(t, conn, "UPDATE effectonce.outbox_dead SET headers = '{}' WHERE reason = 'bad_headers'")
	r = runOn(t, address, "dead", "retry", "--reason", "bad_headers", "--wait")
	assert.Zero(t, r.code, r.stdout)
	assert.Equal(t, "1 row retried\n1 published, 0 held again\n", r.stdout)
	assert.Equal(t, []string{"b:bad", "b2"}, published("b"))
	r = runOn(t, address, "dead", "discard", "--key", "a", "--why", "test order")
	assert.Equal(t, "1 row discarded; 1 key released\n", r.stdout)
	require.Eventually(t, func() bool { return len(deadRows(t, conn)) == 0 }, commandMax, 20*time.Millisecond)
	assert.Equal(t, []string{"a1", "a2"}, published("a"))
}
