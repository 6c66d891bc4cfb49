package command_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// hostileText sets the title, clears the screen in 7 and 8 bits, moves the cursor, turns the
// direction, hides, and begins a line of its own that looks like one of the program's.
const hostileText = "ev\x1b]0;x\x07il\x1b[2J\u009b2J\u0085\b\r\x7f\u202eabc\u2066\u200b\ufeff\u2028\U000e0041\u00a0\nnot well: FORGED\tFORGED"

// harmful are the characters that no command may print. All but the last ones are in hostileText.
func harmful(text string) []string {
	var found []string
	for i, r := range text {
		if r == utf8.RuneError {
			if _, size := utf8.DecodeRuneInString(text[i:]); size == 1 {
				found = append(found, fmt.Sprintf("%x at %d", text[i], i))
			}
		}
		if r != '\n' && (!unicode.IsPrint(r) || strings.ContainsRune("\u202e\u2066\u200b\u2028\u009b\x7f", r)) {
			found = append(found, fmt.Sprintf("%U at %d", r, i))
		}
	}
	return found
}

// Property: each command only shows the texts that others put into the tables or a topic: none of
// their characters controls a terminal, and they begin no line; with --json a program reads them
// unchanged. Row S5 of guarantees.md.
func TestHostileValuesAreOnlyShown(t *testing.T) {
	t.Parallel()
	ctx, address, topic := t.Context(), pgtest.Database(t), kafkatest.Topic(t, 1)
	conn := connect(t, address)
	execSQL(t, conn, `
SELECT setval('effectonce.outbox_seq_seq', 1000);
INSERT INTO effectonce.outbox (id, topic, key, payload, headers) VALUES ('01976f00-0000-7000-8000-000000000001', '`+topic+`', 'k', 'x', '{"a": "b"}');
INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1), ('other', 1);
INSERT INTO effectonce.outbox_scheduled (id, topic, key, payload, due_at) VALUES ('01976f00-0000-7000-8000-000000000002', 'later', 'k', 'x', now() + interval '1 hour');
INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, died_at, reason, error, state)
  VALUES ('default', 1000, '01976f00-0000-7000-8000-000000000003', 't', 'k', 'x', '{"a": "b"}', now(), now(), 'refused', 'x', 'held');
INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing', 'billing', '{t}');
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, trouble, trouble_since) VALUES ('billing', 't', 0, 7, 'x', now());
INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, payload, headers, reason, error, state)
  SELECT c.id, '01976f00-0000-7000-8000-000000000004', 't', 0, 1, 'k', 'x', '[]', 'failed', 'x', 'parked' FROM effectonce.consumers c;
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, status, body, headers, finished_at) VALUES ('s', 'o', 'k', sha256('x'), 'finished', 200, 'x', '{"a": ["b"]}', now());
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state) VALUES ('s', 'p', 'k', sha256('x'), 'running');
INSERT INTO effectonce.operator_actions (what, subject, why) VALUES ('x', '{}', 'x');
INSERT INTO effectonce.outbox_paused (relay, topic, why, who) VALUES ('default', 't', 'x', 'x');
INSERT INTO effectonce.consumer_pauses (consumer_group, topic, why, who) VALUES ('billing', 't', 'x', 'x')`)

	// As many columns as take it: constraints may forbid some.
	var columns []struct{ Table, Column, Type string }
	rows, err := conn.Query(ctx, `
SELECT c.relname::text, a.attname::text, format_type(a.atttypid, NULL) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
WHERE c.relnamespace = 'effectonce'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND format_type(a.atttypid, NULL) IN ('text', 'text[]', 'bytea', 'jsonb', 'name', 'effectonce.key_name')
  AND (c.relname::text, a.attname::text) NOT IN (('outbox', 'topic'), ('outbox_dead', 'relay'), ('outbox_paused', 'relay'))
ORDER BY 1, 2`)
	require.NoError(t, err)
	for rows.Next() {
		var c struct{ Table, Column, Type string }
		require.NoError(t, rows.Scan(&c.Table, &c.Column, &c.Type))
		columns = append(columns, c)
	}
	require.NoError(t, rows.Err())
	values := map[string]any{
		"text": hostileText, "effectonce.key_name": hostileText, "name": hostileText[:60], "text[]": []string{hostileText}, "bytea": []byte(hostileText),
		"jsonb": map[string]any{hostileText: []string{hostileText}},
	}
	execSQL(t, conn, `SET session_replication_role = replica`)
	var taken []string
	for _, c := range columns {
		where := ""
		switch {
		case c.Column == "relay":
			where = " WHERE relay = 'other'"
		case c.Table == "idempotency_keys":
			where = " WHERE state = 'finished'"
		}
		if _, err := conn.Exec(ctx, fmt.Sprintf(`UPDATE effectonce.%s SET %s = $1%s`, c.Table, c.Column, where), values[c.Type]); err == nil {
			taken = append(taken, c.Table+"."+c.Column)
		} else {
			t.Logf("%s.%s stays: %v", c.Table, c.Column, err)
		}
	}
	for _, want := range []string{
		"outbox.key", "outbox.payload", "outbox.headers", "outbox_relays.relay", "outbox_dead.topic", "outbox_dead.key", "outbox_dead.error", "outbox_dead.headers",
		"consumers.name", "consumers.consumer_group", "consumers.topics", "consumer_positions.consumer_group", "consumer_positions.topic", "consumer_positions.trouble",
		"parked_messages.topic", "parked_messages.key", "parked_messages.error", "parked_messages.payload", "parked_messages.headers",
		"idempotency_keys.scope", "idempotency_keys.operation", "idempotency_keys.key", "idempotency_keys.body",
		"operator_actions.why", "operator_actions.stated", "operator_actions.subject", "outbox_paused.topic", "outbox_paused.why", "consumer_pauses.why",
	} {
		assert.True(t, slices.Contains(taken, want), want)
	}

	shown := func(exact bool, args ...string) {
		t.Helper()
		for _, form := range [][]string{nil, {"--json"}} {
			r := runKafka(t, address, append(args, form...)...)
			for line := range strings.Lines(r.stdout + r.stderr) {
				require.NotEqual(t, 2, r.code, "%q: %s", args, line)
				assert.Empty(t, harmful(line), "%q prints %q", args[:1], line)
				assert.False(t, forged.MatchString(line), "%q prints %q", args[:1], line)
			}
			if form == nil {
				continue
			}
			held := false
			for line := range strings.Lines(r.stdout) {
				var value any
				require.NoError(t, json.Unmarshal([]byte(line), &value), "%q: %s", args, line)
				held = held || holds(value, hostileText[:18])
			}
			assert.True(t, held || !exact, "%q prints no such value: %q", args[:min(2, len(args))], r.stdout)
		}
	}
	const id = "01976f00-0000-7000-8000-00000000000"
	shown(true, "status", "--interval", "0s")
	shown(true, "positions")
	shown(true, "doctor")
	shown(true, "relays", "list")
	shown(true, "topics", "list")
	shown(true, "dead", "list")
	shown(true, "parked", "list")
	shown(true, "keys", "list", "--state", "finished")
	shown(true, "actions", "list")
	shown(true, "consumer", "id-rule")
	shown(true, "explain", id+"1")
	shown(true, "explain", id+"3")
	shown(true, "explain", id+"4")
	shown(true, "dead", "show", id+"3")
	shown(true, "parked", "show", id+"4")
	shown(true, "keys", "show", hostileText, "--operation", hostileText, "--scope", hostileText)
	shown(false, "explain", hostileText)
	shown(true, "tail", "--from-beginning", "--limit", "1")
	shown(false, "verify", "--group", hostileText)
	drain(t, address)
	shown(true, "explain", id+"1")
	shown(true, "explain", topic+"/0/0")
}

// forged matches a line that starts inside a stored value.
var forged = regexp.MustCompile(`^not well: FORGED`)

// holds reports whether a text is part of a string somewhere in a JSON value.
func holds(value any, text string) bool {
	switch v := value.(type) {
	case string:
		if encoded, ok := strings.CutPrefix(v, "base64:"); ok {
			decoded, err := base64.StdEncoding.DecodeString(encoded)
			return err == nil && strings.Contains(string(decoded), text)
		}
		return strings.Contains(v, text)
	case []any:
		for _, one := range v {
			if holds(one, text) {
				return true
			}
		}
	case map[string]any:
		for name, one := range v {
			if strings.Contains(name, text) || holds(one, text) {
				return true
			}
		}
	}
	return false
}

// absurdRows are of other roles, in each table that they can insert into, with times that time.Time
// or RFC 3339 do not have; those of the outbox are bounded. The row of the outbox has the ID
// 01976f00-…-1, the other messages, too.
const absurdRows = `
CREATE TEMP TABLE times AS SELECT at, n FROM unnest('{-infinity, 4713-01-01 00:00:00+00 BC, 0001-01-01 00:00:00+00 BC, 10000-01-01+00, 294276-12-31+00, infinity}'::timestamptz[])
  WITH ORDINALITY AS a (at, n);
CREATE TEMP TABLE bounded AS SELECT at, n FROM unnest('{0001-01-01+00, 9998-12-31 23:59:59.999999+00}'::timestamptz[]) WITH ORDINALITY AS a (at, n);
CREATE FUNCTION pg_temp.id(n bigint) RETURNS uuid RETURN ('01976f00-0000-7000-8000-00000000000' || n)::uuid;
SELECT setval('effectonce.outbox_seq_seq', 2000);
INSERT INTO effectonce.outbox (id, topic, key, payload, created_at) SELECT pg_temp.id(n), 'TOPIC', 'k', 'row', at FROM bounded;
INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1);
INSERT INTO effectonce.outbox_scheduled (id, topic, key, payload, due_at, created_at) SELECT pg_temp.id(n), 'TOPIC', 'k', 'later', at, at FROM bounded;
INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, died_at, reason, error, state)
  SELECT 'default', 1000 + n, pg_temp.id(n), 'TOPIC', ('dead ' || n)::bytea, 'dead', '{}', at, at, 'refused', 'x', 'held' FROM times;
INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing', 'billing', '{TOPIC}');
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, record_time, caught_up_at, updated_at, trouble, trouble_since)
  SELECT 'billing', 'TOPIC', n, 7, at, at, at, 'x', at FROM times;
INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, payload, reason, error, state, parked_at, record_time)
  SELECT c.id, pg_temp.id(n), 'TOPIC', 0, n, ('parked ' || n)::bytea, 'parked', 'failed', 'x', 'parked', at, at FROM times, effectonce.consumers c;
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, created_at, locked_until, retry_at)
  SELECT 'tenant', 'charge', 'running ' || n, sha256('x'), 'running', at, at, at FROM times;
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, created_at, status, finished_at, expires_at)
  SELECT 'tenant', 'charge', 'finished ' || n, sha256('x'), 'finished', at, 200, at, at FROM times`

// Property: no time that another role stored keeps a command from showing what there is, in text
// and in JSON. Row S23 of guarantees.md.
func TestRowsOfAnyTimeAreShown(t *testing.T) {
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1)
	conn := connect(t, address)
	execSQL(t, conn, strings.ReplaceAll(absurdRows, "TOPIC", topic))
	shown := func(commands ...[]string) {
		t.Helper()
		for _, command := range commands {
			for _, form := range [][]string{nil, {"--json"}} {
				r := runKafka(t, address, append(command, form...)...)
				told := r.stdout + r.stderr
				require.NotEqual(t, 2, r.code, "%q: %s", command, told)
				require.True(t, r.stdout != "" || form != nil && slices.Equal(command, []string{"topics", "list"}), "%q: %s", command, told)
				for _, trace := range []string{"infinity", "scan ", "SQLSTATE", "unsupported value", "outside of range", "not searched", "9223372036"} {
					assert.NotContains(t, told, trace, command)
				}
			}
		}
	}
	const id = "01976f00-0000-7000-8000-00000000000"
	shown([]string{"status", "--interval", "0s"}, []string{"tail", "--from-beginning", "--limit", "2"}, []string{"positions"}, []string{"relays", "list"}, []string{"topics", "list"}, []string{"doctor"},
		[]string{"dead", "list"}, []string{"parked", "list"}, []string{"keys", "list"}, []string{"keys", "list", "--state", "finished"})
	for _, n := range []string{"1", "6"} {
		shown([]string{"dead", "show", id + n}, []string{"parked", "show", id + n}, []string{"keys", "show", "running " + n}, []string{"keys", "show", "finished " + n})
	}
	shown([]string{"explain", id + "1"}, []string{"explain", "running 6"})
	execSQL(t, conn, `DELETE FROM effectonce.outbox_scheduled`)
	drain(t, address)
	shown([]string{"explain", id + "2"}, []string{"verify"},
		[]string{"replay", "--topic", topic, "--from", "2000-01-01T00:00:00Z", "--why", "x"})
}
