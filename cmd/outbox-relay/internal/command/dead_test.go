package command_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// burySQL is what a relay leaves: order-1 is too large and holds its key, with two behind it; one
// without a key; one of another topic, that does not exist, with a key that is no text.
const burySQL = `
INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, waits_for, state, died_at)
SELECT 'default', n, ('01976f00-0000-7000-8000-00000000000' || n)::uuid, topic, key, convert_to('CANARY payload', 'UTF8'),
  '{"authorization": "CANARY header"}', '2026-01-02 03:04:05Z', reason, error, topic, state, clock_timestamp() - interval '10 minutes'
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
	return pgtest.Column[string](t, conn, `SELECT format('%s %s', seq, state) FROM effectonce.outbox_dead WHERE state NOT IN ('discard', 'discarded') ORDER BY seq`)
}

var asBuried = []string{"1 held", "2 behind", "3 behind", "4 held", "5 held"}

// Acting on what waits takes a choice, and a reason for what is lost, that are made on the command
// line: nothing that decides what is lost is read from the environment. What is behind another row
// is not acted on alone. Else nothing is done.
func TestActionsNeedAChoice(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	environment := map[string]string{
		"DATABASE_URL": address, "OUTBOX_ALL": "true", "OUTBOX_TOPIC": "orders", "OUTBOX_RELAY": "default", "OUTBOX_WHY": "w", "OUTBOX_ALL_OF_KEY": "true",
		"OUTBOX_GROUP": "billing", "OUTBOX_AT": "latest", "OUTBOX_PARTITION": "0", "OUTBOX_SET": "standard",
	}
	for line, code := range map[string]int{
		"dead retry": 2, "dead discard --topic orders": 2, "parked retry": 2, "parked discard --topic orders": 2, "consumer pause": 2, "consumer pause --group billing --topic orders": 2,
		"consumer resume-at --group billing --topic orders": 2, "consumer resume-at --group billing --topic orders --partition 0 --why w": 2, "consumer id-rule billing/orders --set standard": 2,
		"dead retry --state behind": 1, "dead discard --why w 2 --all-of-key": 1, "parked discard --why w orders/0/2": 1,
		"parked retry --topic nothing": 0, "dead discard --why w --all --dry-run": 0, "parked discard --why w --all --dry-run": 0,
	} {
		r := run(t, environment, strings.Fields(line)...)
		assert.Equal(t, code, r.code, "%q: %+v", line, r)
		assert.Equal(t, code == 1, strings.Contains(r.stderr, "waits behind "+idPrefix+"1: only the first"), r.stderr)
	}
	assert.Equal(t, asBuried, deadRows(t, conn))
	assert.Equal(t, untouched, parkedRows(t, conn))
}

// Row S3 of guarantees.md: payloads and headers are shown by "dead show" and "parked show" alone.
func TestPayloadsAreNotPrinted(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	for _, line := range []string{
		"dead list", "dead list --json", "dead retry 4 --json", "dead discard --all --yes --why w",
		"parked list", "parked list --json", "parked retry --all --json", "parked discard --all --yes --why w", "actions list", "actions list --json", "status --json",
	} {
		assertNoCanary(t, runOn(t, address, strings.Fields(line)...), line)
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
			convert_to($2 || CASE WHEN $2 LIKE '%big' THEN (SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 250)) ELSE '' END, 'UTF8'), CASE WHEN $2 LIKE '%bad' THEN '{"n": {}}' ELSE '{}' END::jsonb`, topic, payload)
	}
	published := func(key string) (values []string) {
		for _, record := range kafkatest.ReadAll(t, topic) {
			if string(record.Key) == key {
				values = append(values, string(record.Value))
			}
		}
		return values
	}
	testwait.True(t, "four dead rows", func() bool { return len(deadRows(t, conn)) == 4 && len(published("c")) == 1 })

	execSQL(t, conn, "UPDATE effectonce.outbox_dead SET headers = '{}' WHERE reason = 'bad_headers'")
	r := runOn(t, address, "dead", "retry", "--reason", "bad_headers", "--wait")
	assert.Zero(t, r.code, r.stdout)
	assert.Equal(t, "1 row handed back\n1 published, 0 held again\n", r.stdout)
	assert.Equal(t, []string{"b:bad", "b2"}, published("b"))
	r = runOn(t, address, "dead", "discard", "--key", "a", "--why", "test order")
	assert.Equal(t, "1 row discarded; 1 key released\n", r.stdout)
	testwait.True(t, "no dead row", func() bool { return len(deadRows(t, conn)) == 0 })
	assert.Equal(t, []string{"a1", "a2"}, published("a"))
}

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

// parkedRows lists what is parked, as "offset state".
func parkedRows(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	return pgtest.Column[string](t, conn, `SELECT format('%s %s', "offset", state) FROM effectonce.parked_messages ORDER BY seq`)
}

var untouched = []string{"1 parked", "2 behind", "3 behind", "4 parked", "5 parked", "6 parked"}

// requests makes one key in doubt, one given up, one that is locked, one that is stuck, and two
// finished ones, one of which is over.
func requests(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	execSQL(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, call, request, body, status, locked_until, locked_by,
			attempts, error, created_at, finished_at, expires_at) VALUES
		('t7', 'charge', 'in-doubt', sha256('x'), 'indeterminate', '{reserve}', 'pay', 'once', 'card 4111', NULL, NULL, NULL, 'pod-1', 1, 'no answer', now() - interval '3 hours', NULL, NULL),
		('t7', 'charge', 'given-up', sha256('x'), 'abandoned', '{}', NULL, NULL, 'card 4222', NULL, NULL, NULL, 'pod-1', 20, 'refused', now() - interval '2 hours', NULL, NULL),
		('t7', 'charge', 'locked', sha256('x'), 'running', '{}', NULL, NULL, NULL, NULL, NULL, now() + interval '1 hour', 'pod-2', 1, NULL, now() - interval '1 hour', NULL, NULL),
		('t7', 'charge', 'same', sha256('x'), 'running', '{}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, now() - interval '4 hours', NULL, NULL),
		('t8', 'charge', 'same', sha256('x'), 'finished', '{}', NULL, NULL, NULL, 'paid: 4333', 201, NULL, NULL, 1, NULL, now(), now(), now() + interval '1 day'),
		('t8', 'charge', 'over', sha256('x'), 'finished', '{}', NULL, NULL, NULL, 'paid', 201, NULL, NULL, 1, NULL, now(), now(), now() - interval '2 hours')`)
}

// Names that are no text are refused before anything is done.
func TestKeysRefuseWrongUse(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"show \xe9", "unlock \xe9 --why w", "show k --scope \xe9", "list --operation \xe9"} {
		r := runOn(t, "postgres://u@127.0.0.1:1/d", append([]string{"keys"}, strings.Fields(line)...)...)
		assert.Equal(t, 2, r.code, line)
		assert.Contains(t, r.stderr, ": want 1 to 255 characters of UTF-8", line)
	}
	r := runOn(t, "postgres://u@127.0.0.1:1/d", "keys", "finish", "k", "--status", "201", "--header", "X-A:\xe9", "--why", "w")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "Name: value")
}

// Property: an outcome that a person stored for a webhook's event in doubt is answered: status 0 as
// 200, and a body makes no refusal of it, unless it is that of one.
func TestOutcomeOfAPersonAnswersAWebhook(t *testing.T) {
	t.Parallel()
	const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	address := pgtest.Database(t)
	receiver, err := webhook.New(pool(t, address), webhook.Config{
		Sender: "github", Name: "webhook", Scheme: webhook.GitHub(secret),
	}, func(context.Context, pgx.Tx, webhook.Event) error { return idempotency.Indeterminate(io.EOF) })
	require.NoError(t, err)
	deliver := func(id string) *httptest.ResponseRecorder {
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(`{}`))
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/webhooks", strings.NewReader(`{}`))
		r.Header = http.Header{"X-Hub-Signature-256": {"sha256=" + hex.EncodeToString(mac.Sum(nil))}, "X-Github-Delivery": {id}, "X-Github-Event": {"invoice.paid"}}
		w := httptest.NewRecorder()
		receiver.ServeHTTP(w, r)
		return w
	}
	for id, c := range map[string]struct {
		status, body string
		want         int
		text         string
	}{
		"evt_0":   {"0", "", 200, "OK\n"},
		"evt_422": {"422", "", 422, "Unprocessable Entity\n"},
		"evt_no":  {"200", "refused", 200, "refused\n"},
	} {
		require.Equal(t, http.StatusServiceUnavailable, deliver(id).Code)
		args := []string{"keys", "finish", id, "--status", c.status, "--window", "24h", "--why", "looked"}
		if c.body != "" {
			args = append(args, "--body-file", file(t, c.body))
		}
		finished := runOn(t, address, args...)
		require.Zero(t, finished.code, finished.stderr)
		for range 2 {
			w := deliver(id)
			require.Equal(t, c.want, w.Code, id)
			require.Equal(t, c.text, w.Body.String(), id)
		}
	}
}

// More dead rows than are counted are said to be more.
func TestRelaysListSaysWhereItStopsCounting(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1), ('other', 1);
		INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		SELECT 'default', n, gen_random_uuid(), 't', '{}', now(), 'refused', '', 'held' FROM generate_series(1, 100001) AS n`)
	r := runOn(t, address, "relays", "list")
	require.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^default +1 +0 +0 +0 +at least 100000 `, r.stdout)
	assert.Regexp(t, `(?m)^other +1 +0 +0 +0 +0 `, r.stdout)
}
