package main_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// parkSQL is what a consumer leaves: order-1 failed and holds its key, with two behind it; one
// without a key; one of another topic with a key that is no text; one that is too large.
const parkSQL = `
INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing/orders', 'billing', '{orders}'), ('audit/payments', 'audit', '{payments}');
INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, payload, headers, reason, error, attempts, state, parked_at)
SELECT c.id, ('01976f00-0000-7000-8000-00000000000' || m.n)::uuid, c.topics[1], 0, m.n, m.key, convert_to(m.payload, 'UTF8'),
  '{"authorization": "CANARY header"}', m.reason, m.error, 10, m.state, clock_timestamp() - interval '10 minutes'
FROM (VALUES
  (1, 'billing', 'order-1'::bytea, E'CANARY payload\n\ttabbed \x1b[31m', 'failed', E'no account 7\nat ledger', 'parked'),
  (2, 'billing', 'order-1', 'CANARY', 'behind', '', 'behind'),
  (3, 'billing', 'order-1', 'CANARY', 'behind', '', 'behind'),
  (4, 'billing', NULL, 'CANARY', 'permanent', E'evil \x1b]0;x\x07', 'parked'),
  (5, 'audit', '\x00ff', 'CANARY', 'undecodable', 'no JSON', 'parked'),
  (6, 'audit', 'p', NULL, 'too_large', 'message has 99 bytes', 'parked')
) AS m (n, consumer_group, key, payload, reason, error, state)
JOIN effectonce.consumers c USING (consumer_group) ORDER BY m.n`

const idPrefix = "01976f00-0000-7000-8000-00000000000"

// parkedDatabase returns a database with parked messages.
func parkedDatabase(t *testing.T) (address string, conn *pgx.Conn) {
	t.Helper()
	address = pgtest.Database(t)
	conn = connect(t, address)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	return address, conn
}

// parkedRows lists what is parked, as "offset state".
func parkedRows(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT format('%s %s', "offset", state) FROM effectonce.parked_messages ORDER BY seq`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

var untouched = []string{"1 parked", "2 behind", "3 behind", "4 parked", "5 parked", "6 parked"}

// Parked messages are listed with the facts that a person needs first, the newest first, safe for a
// terminal, and with the totals; text and JSON agree.
func TestParkedListShowsWhatWaits(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	r := runOn(t, address, "parked", "list")
	require.Zero(t, r.code, r.stderr)
	lines := strings.Split(strings.TrimSpace(r.stdout), "\n")
	require.Len(t, lines, 7, r.stdout)
	assert.Regexp(t, `^id +topic/partition/offset +key +reason +attempts +age +behind it +error$`, lines[0])
	assert.Regexp(t, `^01976f00-\S+6 +payments/0/6 +p +too_large +10 +10m0?\S* +0 +message has 99 bytes$`, lines[1])
	assert.Regexp(t, `^01976f00-\S+5 +payments/0/5 +base64:AP8= +undecodable `, lines[2])
	assert.Regexp(t, `^01976f00-\S+4 +orders/0/4 +- +permanent .* evil \\x1b\]0;x\\a$`, lines[3])
	assert.Regexp(t, `^01976f00-\S+1 +orders/0/1 +order-1 +failed +10 +10m0?\S* +2 +no account 7…$`, lines[4])
	assert.Equal(t, "audit/payments: 2 parked (too_large 1, undecodable 1), 2 keys held, 0 being retried", lines[5])
	assert.Equal(t, "billing/orders: 4 parked (behind 2, failed 1, permanent 1), 1 key held, 0 being retried", lines[6])

	r = runOn(t, address, "parked", "list", "--limit", "1")
	assert.Contains(t, r.stdout, "the newest 1: --limit shows more\n")
	r = runOn(t, address, "parked", "list", "--limit", "4")
	assert.NotContains(t, r.stdout, "shows more")

	r = runOn(t, address, "parked", "list", "--json", "--key", "order-1")
	m := r.object(t)
	assert.Equal(t, idPrefix+"1", m["id"])
	assert.Equal(t, "no account 7\nat ledger", m["error"])
	assert.InDelta(t, 2, m["behind"], 0)
	execSQL(t, conn, `UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp() + interval '1 minute' WHERE "offset" = 1`)
	assert.Regexp(t, `failed \(retried in (1m|5\d(\.\d)?s)\)`, runOn(t, address, "parked", "list", "--key", "order-1").stdout)
}

// Each filter reaches the database, and filters that match nothing give a line that says so.
func TestParkedFilters(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	for _, c := range []struct {
		args []string
		want string // last digits of the IDs
	}{
		{[]string{"--id", idPrefix + "2"}, "2"},
		{[]string{"--id", "orders/0/3"}, "3"},
		{[]string{"--key", "base64:AP8="}, "5"},
		{[]string{"--topic", "payments"}, "65"},
		{[]string{"--consumer", "billing/orders"}, "41"},
		{[]string{"--group", "audit"}, "65"},
		{[]string{"--reason", "behind"}, "32"},
		{[]string{"--reason", "failed"}, "1"},
		{[]string{"--older-than", "5m"}, "6541"},
		{[]string{"--younger-than", "15m", "--topic", "orders"}, "41"},
		{[]string{"--younger-than", "5m"}, ""},
		{[]string{"--id", "orders/0/77"}, ""},
		{[]string{"--id", idPrefix + "1", "--topic", "payments"}, ""},
	} {
		r := runOn(t, address, append([]string{"parked", "list", "--json"}, c.args...)...)
		var found string
		for line := range strings.Lines(r.stdout) {
			var m queue.ParkedMessage
			_ = json.Unmarshal([]byte(line), &m) // the key is no JSON of a Key
			found += m.ID.String()[35:]
		}
		assert.Equal(t, c.want, found, c.args)
		if c.want == "" {
			assert.Equal(t, result{}, r)
			text := runOn(t, address, append([]string{"parked", "list"}, c.args...)...)
			assert.Equal(t, result{0, "no parked messages match: \"outbox-relay parked list\" shows all\n", ""}, text)
		}
	}
	execSQL(t, conn, "DELETE FROM effectonce.parked_messages")
	r := runOn(t, address, "parked", "list")
	assert.Equal(t, result{0, "no parked messages\n", ""}, r)
}

// A message is shown in full, and with what to do. The payload is cut without --full.
func TestParkedShow(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	r := runOn(t, address, "parked", "show", idPrefix+"1")
	require.Zero(t, r.code, r.stderr)
	for _, want := range []string{
		"consumer   billing/orders (group billing)\n", "record     orders/0/1\n", "key        order-1\n", "state      waits for an operator\n",
		"error\n  no account 7\n  at ledger\n", "headers\n  authorization: \"CANARY header\"\n",
		"payload    28 bytes of text\n  CANARY payload\n    tabbed \\x1b[31m\n", "behind it  2 messages\n  " + idPrefix + "2  orders/0/2  behind\n",
		"what to do fix what the error names, then retry\n",
	} {
		assert.Contains(t, r.stdout, want)
	}
	assert.Contains(t, runOn(t, address, "parked", "show", "orders/0/3").stdout, "behind "+idPrefix+"1, which has to be")
	assert.Contains(t, runOn(t, address, "parked", "show", "payments/0/6").stdout, "payload    not stored\n")

	execSQL(t, conn, `UPDATE effectonce.parked_messages SET payload = convert_to('x' || repeat('ä', 3000), 'UTF8') WHERE "offset" = 4`)
	m := runOn(t, address, "parked", "show", "orders/0/4", "--json").object(t)
	assert.Equal(t, "x"+strings.Repeat("ä", 2047), m["payload"], "cut between characters")
	assert.Equal(t, true, m["payload_truncated"])
	assert.NotEmpty(t, m["do"])
	m = runOn(t, address, "parked", "show", "orders/0/4", "--json", "--full").object(t)
	assert.Equal(t, "x"+strings.Repeat("ä", 3000), m["payload"])
	assert.Equal(t, false, m["payload_truncated"])
	execSQL(t, conn, `UPDATE effectonce.parked_messages SET payload = '\x00ff' WHERE "offset" = 4`)
	assert.Equal(t, "AP8=", runOn(t, address, "parked", "show", "orders/0/4", "--json").object(t)["payload_base64"])

	r = runOn(t, address, "parked", "show", "orders/0/77")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "no parked messages match")
	assert.Equal(t, 2, runOn(t, address, "parked", "show").code)
	assert.Equal(t, 2, runOn(t, address, "parked", "show", "a", "b").code)
}

// Acting on messages takes a choice that is made on the command line, and a reason for what is
// lost; else nothing is done.
func TestParkedActionsNeedAChoice(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	environment := map[string]string{"DATABASE_URL": address, "OUTBOX_ALL": "true", "OUTBOX_TOPIC": "orders", "OUTBOX_WHY": "w", "OUTBOX_ALL_OF_KEY": "true"}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"retry"}, 2, "no filter is given"},
		{[]string{"discard"}, 2, "no filter is given"},
		{[]string{"discard", "--topic", "orders"}, 2, "--why is missing"},
		{[]string{"retry", "--reason", "bad luck"}, 2, "--reason \"bad luck\": want one of failed, "},
		{[]string{"retry", "--key", "base64:?"}, 2, "want standard base64"},
		{[]string{"retry", "--older-than", "soon"}, 2, "want a duration"},
		{[]string{"retry", "--topic", "nothing"}, 0, ""},
		{[]string{"retry", "--id", "orders/0/77"}, 1, "no parked messages match"},
		{[]string{"retry", "--id", idPrefix + "3"}, 1, "waits behind " + idPrefix + "1: only the first"},
		{[]string{"discard", "--why", "w", "--id", "orders/0/2"}, 1, "waits behind " + idPrefix + "1: only the first"},
		{[]string{"discard", "--why", "w", "--id", "orders/0/2", "--all-of-key"}, 1, "waits behind " + idPrefix + "1: only the first"},
		{[]string{"retry", "--all", "--dry-run"}, 0, ""},
		{[]string{"discard", "--why", "w", "--all", "--dry-run", "--json"}, 0, ""},
	} {
		r := run(t, environment, append([]string{"parked"}, c.args...)...)
		assert.Equal(t, c.code, r.code, "%q: %+v", c.args, r)
		assert.Contains(t, r.stderr, c.want, c.args)
	}
	assert.Equal(t, untouched, parkedRows(t, conn))
	assert.Contains(t, runOn(t, address, "parked", "retry", "--all", "--dry-run").stdout, "4 messages would be retried; nothing was done (--dry-run)\n")
	assert.Equal(t, "parked.retry", runOn(t, address, "parked", "retry", "--all", "--dry-run", "--json").object(t)["what"])

	execSQL(t, conn, "ALTER DATABASE "+pgx.Identifier{conn.Config().Database}.Sanitize()+" SET default_transaction_read_only = on")
	r := runOn(t, address, "parked", "retry", "--all")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "it is read-only")
}

// Retry hands back what can be retried, names what cannot, and both are to be seen in the list of
// actions.
func TestParkedRetry(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	r := runOn(t, address, "parked", "retry", "--topic", "orders", "--limit", "1", "--by", "ana", "--why", "account made")
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "1 message retried\n", r.stdout)
	assert.Equal(t, []string{"1 retry", "2 behind", "3 behind", "4 parked", "5 parked", "6 parked"}, parkedRows(t, conn), "the oldest first")
	r = runOn(t, address, "parked", "retry", "--all", "--rate", "1000")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "2 messages retried; 1 were handed back before\nnot retried: "+idPrefix+"6: its payload was too large")
	assert.Equal(t, []string{"1 retry", "2 behind", "3 behind", "4 retry", "5 retry", "6 parked"}, parkedRows(t, conn))
	r = runOn(t, address, "parked", "retry", "--id", idPrefix+"1", "--wait", "--wait-max", "1s")
	assert.Equal(t, 1, r.code, "no consumer handles it")
	assert.Contains(t, r.stdout, "0 messages retried; 1 were handed back before\n0 handled, 0 failed again\nnot done within 1s: 1;")

	r = runOn(t, address, "actions", "list", "--json", "--limit", "3")
	require.Zero(t, r.code, r.stderr)
	actions := strings.Split(strings.TrimSpace(r.stdout), "\n")
	require.Len(t, actions, 3)
	var first, last operator.Action
	require.NoError(t, json.Unmarshal([]byte(actions[2]), &first))
	require.NoError(t, json.Unmarshal([]byte(actions[0]), &last))
	assert.Equal(t, "ana", *first.Stated)
	assert.Equal(t, conn.Config().User, first.Who)
	assert.Equal(t, "account made", first.Why)
	assert.Equal(t, "parked.retry", first.What)
	assert.Contains(t, string(first.Subject), idPrefix+"1")
	assert.Regexp(t, `^.+@.+$`, *last.Stated)
	assert.Equal(t, "retried by hand", last.Why)
	r = runOn(t, address, "actions", "list")
	assert.Regexp(t, `(?m)^\d{4}-\S+Z +\S+ \(ana\) +parked\.retry +`+idPrefix+`1 +account made$`, r.stdout)
	assert.Regexp(t, `\S+ \(ana\)  parked\.retry: account made\n`, runOn(t, address, "parked", "show", idPrefix+"1").stdout)
}

// Discard discards one message, or a whole key, and lets the rest continue.
func TestParkedDiscard(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	r := runOn(t, address, "parked", "discard", "--id", idPrefix+"1", "--why", "test order")
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "1 message discarded; 1 key released\n", r.stdout)
	assert.Equal(t, []string{"2 retry", "3 behind", "4 parked", "5 parked", "6 parked"}, parkedRows(t, conn))
	m := runOn(t, address, "parked", "discard", "--json", "--key", "order-1", "--all-of-key", "--yes", "--why", "all of it").object(t)
	assert.InDelta(t, 2, m["done"], 0)
	assert.Equal(t, []string{"4 parked", "5 parked", "6 parked"}, parkedRows(t, conn))
	assert.Zero(t, runOn(t, address, "parked", "discard", "--all", "--yes", "--why", "start anew").code)
	assert.Empty(t, parkedRows(t, conn))
	assert.Equal(t, 6, strings.Count(runOn(t, address, "actions", "list").stdout, "parked.discard"))
}

// consumeRetried is a consumer whose handler fails at the message of one offset.
func consumeRetried(ctx context.Context, conn *pgx.Conn, fails int64) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		_, err := conn.Exec(ctx, `WITH due AS (SELECT * FROM effectonce.parked_messages WHERE state = 'retry' ORDER BY seq LIMIT 1 FOR UPDATE),
			failed AS (UPDATE effectonce.parked_messages p SET state = 'parked', reason = 'failed', error = 'still no account' FROM due WHERE p.seq = due.seq AND due."offset" = $1),
			gone AS (DELETE FROM effectonce.parked_messages p USING due WHERE p.seq = due.seq AND due."offset" <> $1)
			UPDATE effectonce.parked_messages p SET state = 'retry' FROM due
			WHERE due."offset" <> $1 AND p.seq = (SELECT min(seq) FROM effectonce.parked_messages n WHERE n.key = due.key AND n.seq > due.seq)`, fails)
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// With --wait the command ends when the consumers are done, with status 1 if something failed
// again, or was not done in time.
func TestParkedRetryWaits(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	r := runOn(t, address, "parked", "retry", "--id", idPrefix+"5", "--wait", "--wait-max", "1s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "not done within 1s: 1; does a consumer hold their partitions?")

	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	own := connect(t, address)
	go func() { done <- consumeRetried(ctx, own, 3) }()
	r = runOn(t, address, "parked", "retry", "--id", idPrefix+"4", "--wait")
	assert.Zero(t, r.code, r.stdout)
	assert.Equal(t, "1 message retried\n1 handled, 0 failed again\n", r.stdout)
	r = runOn(t, address, "parked", "retry", "--key", "order-1", "--wait")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "1 message retried\n0 handled, 1 failed again\nfailed: "+idPrefix+"3: failed: still no account\n", r.stdout)
	m := runOn(t, address, "parked", "retry", "--key", "order-1", "--wait", "--json").object(t)
	assert.Len(t, m["waited"].(map[string]any)["failed"], 1)
	stop()
	require.NoError(t, <-done)
	assert.Equal(t, []string{"3 parked", "6 parked"}, parkedRows(t, conn))
}

// Row S3 of guarantees.md: payloads and headers are shown by "parked show" alone.
func TestParkedPayloadsAreNotPrinted(t *testing.T) {
	t.Parallel()
	address, _ := parkedDatabase(t)
	for _, args := range [][]string{
		{"parked", "list"},
		{"parked", "list", "--json"},
		{"parked", "retry", "--all", "--dry-run"},
		{"parked", "retry", "--all", "--json"},
		{"parked", "discard", "--all", "--yes", "--why", "w"},
		{"actions", "list"},
		{"actions", "list", "--json"},
		{"status", "--json"},
	} {
		r := runOn(t, address, args...)
		assertNoCanary(t, r, strings.Join(args, " "))
	}
}

// The rights that the doctor lists for an operator are those that an operator needs.
func TestParkedNeedsNoMoreRights(t *testing.T) {
	t.Parallel()
	address, conn := parkedDatabase(t)
	role := plainRole(t, address)
	grant(t, address, role)
	grant(t, address, role)
	r := runOn(t, role, "parked", "retry", "--all")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "\"outbox-relay doctor\" lists the rights that the role lacks")
	assert.Equal(t, 1, runOn(t, role, "parked", "list").code, "who relays does not see what parked messages say")
	_, rights, found := strings.Cut(runOn(t, role, "doctor").stdout, "for \"outbox-relay parked\" and similar commands: ")
	require.True(t, found)
	rights, _, _ = strings.Cut(rights, "\n")
	execSQL(t, conn, rights)
	for _, args := range [][]string{
		{"parked", "list"},
		{"parked", "show", idPrefix + "1"},
		{"parked", "retry", "--id", idPrefix + "1", "--wait", "--dry-run"},
		{"parked", "retry", "--topic", "orders"},
		{"parked", "discard", "--all", "--all-of-key", "--yes", "--why", "w"},
		{"actions", "list"},
	} {
		r := runOn(t, role, args...)
		assert.Zero(t, r.code, "%q: %s", args, r.stderr)
	}
}

// The tables may be in another schema.
func TestParkedInAnotherSchema(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	require.Zero(t, runOn(t, address, "migrate", "up", "--schema", "other").code)
	_, err := connect(t, address).PgConn().Exec(t.Context(), strings.ReplaceAll(parkSQL, "effectonce.", "other.")).ReadAll()
	require.NoError(t, err)
	for _, args := range [][]string{{"list"}, {"show", idPrefix + "1"}, {"retry", "--id", idPrefix + "1"}, {"discard", "--id", idPrefix + "1", "--why", "w"}} {
		r := runOn(t, address, append(append([]string{"parked"}, args...), "--schema", "other")...)
		assert.Zero(t, r.code, "%q: %s", args, r.stderr)
	}
	assert.Zero(t, runOn(t, address, "actions", "list", "--schema", "other").code)
}
