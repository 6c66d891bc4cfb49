package main_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

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
		[]string{"replay", "--topic", topic, "--from", "2000-01-01T00:00:00Z", "--why", "x", "--dry-run"})
}
