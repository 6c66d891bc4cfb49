package command_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// goldenSQL is a pipeline with something for every command to show: published rows, waiting ones,
// relays, consumers, keys.
const goldenSQL = `
INSERT INTO effectonce.outbox (id, topic, key, payload, headers) SELECT ('01976f00-0000-7000-8000-0000000000b' || n)::uuid, 'TOPIC', convert_to('k' || n, 'UTF8'), 'x', '{"a": "b"}' FROM generate_series(1, 3) n;
INSERT INTO effectonce.outbox_scheduled (id, topic, key, payload, due_at) VALUES ('01976f00-0000-7000-8000-0000000000c1', 'TOPIC', 'k1', 'x', now() + interval '1 hour');
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, trouble, trouble_since, updated_at)
  VALUES ('billing', 'orders', 0, 7, NULL, NULL, now() - interval '5 minutes'), ('billing', 'orders', 1, 3, 'waits for the handler', now() - interval '2 minutes', now() - interval '3 minutes');
INSERT INTO effectonce.processed_messages (consumer, message_id, fingerprint) SELECT id, '01976f00-0000-7000-8000-0000000000b1', 0 FROM effectonce.consumers WHERE name = 'billing/orders';
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, call, request, body, status, locked_until, locked_by, attempts, error, created_at, finished_at, expires_at) VALUES
  ('t7', 'charge', 'in-doubt', sha256('x'), 'indeterminate', '{reserve}', 'pay', 'once', 'card 4111', NULL, NULL, NULL, 'pod-1', 1, 'no answer', now() - interval '3 hours', NULL, NULL),
  ('t7', 'charge', 'given-up', sha256('x'), 'abandoned', '{}', NULL, NULL, 'card 4222', NULL, NULL, NULL, 'pod-1', 20, 'refused', now() - interval '2 hours', NULL, NULL),
  ('t8', 'charge', 'over', sha256('x'), 'finished', '{}', NULL, NULL, NULL, 'paid', 201, NULL, NULL, 1, NULL, now(), now(), now() - interval '2 hours');
UPDATE effectonce.idempotency_keys SET flow = 'charge'`

// variable are the parts of an output that differ from run to run, and their replacements. The
// order matters.
var variable = []struct {
	pattern *regexp.Regexp
	name    string
}{
	{regexp.MustCompile(`\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:\d\d)?)?`), "<time>"},
	{regexp.MustCompile(`\b(localhost|127\.0\.0\.1|\[::1\]):\d+\b`), "<address>"},
	{regexp.MustCompile(`\b0x[0-9a-f]+\b`), "<number>"},
	{regexp.MustCompile(`\b20\d\d-\d\d-\d\d\b`), "<day>"},
	{regexp.MustCompile(`"cursor":"[^"]*"`), `"cursor":"<cursor>"`},
	{regexp.MustCompile(`"((?:forever_)?bytes)":\d+`), `"$1":<bytes>`},
	{regexp.MustCompile(`\d+\.\d MiB`), "<size>"},
	{regexp.MustCompile(`([ "(])[a-z]+@[-.\w]+`), "${1}<user>"},
	{regexp.MustCompile(`"(age|oldest|seconds|[a-z_]+_seconds)":\d+(\.\d+)?(e[+-]\d+)?`), `"$1":<seconds>`},
	{regexp.MustCompile(`\b\d+(\.\d+)?(d|h|m|ms|µs|s)(\d+(\.\d+)?(h|m|s|ms))*\b`), "<duration>"},
	{regexp.MustCompile(`\b(PostgreSQL |"server_version":")\d+\.\d+`), "${1}<version>"},
	{regexp.MustCompile(`go1\.\d+(\.\d+)?( \w+/\w+)?`), "<go>"},
	{regexp.MustCompile(` {2,}`), "  "},
	{regexp.MustCompile(`"floor":\d+`), `"floor":<floor>`},
	// A relay stores a tick whenever it has published everything that is there: one or several times here
	{regexp.MustCompile(`"tick":\d+`), `"tick":<tick>`},
	{regexp.MustCompile(`(?m)^(default  \d+  \d+  )\d+(  <duration>)`), "${1}<tick>${2}"},
	{regexp.MustCompile(`(?m)^(default  \d+  \d+  <tick>  <duration>  )\d+`), "${1}<floor>"}, // which other tests' transactions hold back
}

// steady replaces what differs from run to run.
func steady(text string, names *strings.Replacer) string {
	text = names.Replace(text)
	for _, v := range variable {
		text = v.pattern.ReplaceAllString(text, v.name)
	}
	return text
}

// progress is written as often as a command takes long.
var progress = regexp.MustCompile(`^\d+ of \d+ (row|message)s? `)

// golden runs command lines and compares all that they print, and their exit status, with a file of
// testdata/golden.
func golden(t *testing.T, name, address string, names *strings.Replacer, lines ...string) {
	t.Helper()
	var all strings.Builder
	for _, line := range lines {
		if sql, is := strings.CutPrefix(line, "sql "); is { // what others do in the meantime
			execSQL(t, connect(t, address), sql)
			fmt.Fprintf(&all, "-- %s\n\n", sql)
			continue
		}
		r := runKafka(t, address, shellWords(line)...)
		fmt.Fprintf(&all, "$ outbox-relay %s\n", names.Replace(line))
		all.WriteString(steady(r.stdout, names))
		for text := range strings.Lines(steady(r.stderr, names)) {
			if !progress.MatchString(text) {
				all.WriteString("! " + text)
			}
		}
		fmt.Fprintf(&all, "exit %d\n\n", r.code)
	}
	path := filepath.Join("testdata", "golden", name+".txt")
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o750))
		require.NoError(t, os.WriteFile(path, []byte(all.String()), 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, string(want), all.String(), "%s is not what the commands print: go test ./cmd/outbox-relay/internal/command -run TestGolden -update", path)
}

// shown are the commands that show and change nothing.
var shown = []string{
	"status --interval 0s", "relays list", "topics list", "consumer id-rule", "positions", "dead list", "parked list", "keys list",
	"keys list --state finished", "actions list", "migrate status", "verify --since 1h", "prune --dry-run",
}

// Property: what the command line prints, as text and as JSON, changes only on purpose.
func TestGoldenOfAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	lines := bothForms(shown...)
	golden(t, "empty", address, strings.NewReplacer(address, "<database>"), lines...)
}

// bothForms runs each line as text and as JSON.
func bothForms(lines ...string) (all []string) {
	for line := range slices.Values(lines) {
		all = append(all, line, line+" --json")
	}
	return all
}

func TestGoldenOfAPipeline(t *testing.T) {
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1)
	conn := connect(t, address)
	execSQL(t, conn, burySQL)
	_, err := conn.PgConn().Exec(t.Context(), strings.ReplaceAll(parkSQL, idPrefix, "01976f00-0000-7000-8000-0000000000a")).ReadAll()
	require.NoError(t, err)
	execSQL(t, conn, `SELECT setval('effectonce.outbox_seq_seq', (SELECT pg_catalog.max(seq) FROM effectonce.outbox_dead))`)
	_, err = conn.PgConn().Exec(t.Context(), strings.ReplaceAll(goldenSQL, "TOPIC", topic)).ReadAll()
	require.NoError(t, err)
	drain(t, address)
	const a, b = "01976f00-0000-7000-8000-0000000000a", "01976f00-0000-7000-8000-0000000000b"
	lines := bothForms(append(slices.Clone(shown),
		"dead show "+idPrefix+"1", "dead show "+idPrefix+"1 --payload", "parked show "+a+"1 --payload", "keys show in-doubt", "keys show given-up --payload", "explain "+b+"1", "explain "+b+"2", "explain "+a+"2", "explain "+idPrefix+"2",
		"explain "+topic+"/0/0", "explain 01976f00-0000-7000-8000-0000000000ff", "tail --from-beginning --limit 1",
		"replay --topic "+topic+" --from 2026-01-01T00:00:00Z",
		"dead retry "+idPrefix+"1 --dry-run", "dead discard "+idPrefix+"4 --why test --dry-run", "parked retry "+a+"1 --dry-run", "parked discard --reason permanent --why test --dry-run",
		"topics pause other --why test --force", "topics resume other", "consumer pause --group billing --topic orders --why test", "consumer resume --group billing --topic orders",
		"keys unlock given-up --why test", "dead retry "+idPrefix+"1", "dead discard "+idPrefix+"4 --why test", "parked retry "+a+"1", "parked discard "+a+"4 --why test", "keys retry given-up --why test", "actions list --limit 3", "parked list",
	)...)
	golden(t, "pipeline", address, strings.NewReplacer(address, "<database>", topic, "<topic>"), lines...)
}

func TestGoldenOfMistakes(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	golden(t, "mistakes", address, strings.NewReplacer(address, "<database>"),
		"nosuch", "dead", "dead nosuch", "dead list --nosuch", "dead list extra", "dead list --limit 0", "dead list --limit x", "dead show", "dead show x", "dead retry", "dead discard",
		"parked show", "parked retry --reason nosuch", "keys show", "keys show nosuch", "keys list --state nosuch", "explain", "explain x", "verify --since x", "verify --since -1h",
		"positions --group nosuch", "replay", "replay --topic t --from yesterday", "topics pause", "topics pause x", "consumer pause", "consumer resume-at", "status --interval -1s",
		"run --shards 0", "run --keep 1ms --lease 1ms", "shards", "shards x", "migrate down", "migrate up --schema BAD!", "relays delete nosuch", "repair", "prune --retention 1s",
		"tail --from-beginning --limit -1", "bench relay --messages 0", "bench consume --messages -1", "completion nosuch", "doctor --timeout -1s", "status --database-url postgres://h/db?sslmode=bogus",
		"status --brokers nosuch:port", "consumer resume-at --partition x --at y", "topics resume", "keys finish k --status 99 --window 1ns",

		"''", "statsu", "migrate upp", "run --leese 3s", "run -brokers=x", "run --lease", "verify --topic ''", "status now", "version --json=perhaps", "help frobnicate",
		"run --topic-prefix 'a b'",
		"bench relay --rows 7 --rounds 0",
		"replay --to 2026-01-01T00:00:00Z", "replay --from 7", "replay --from 2026-01-01T00:00:00Z --to 2026-01-01T00:00:00Z",
		"dead discard --topic orders", "dead retry --reason bad", "dead retry --state dead", "dead retry x", "dead retry 77",
		"parked retry", "parked discard", "parked discard --topic orders", "parked retry --key base64:?", "parked retry --older-than soon", "parked show a b", "parked retry orders/0/77",
		"consumer pause --group billing", "consumer pause --group billing --topic orders", "consumer resume --topic orders", "consumer resume-at --group billing --topic orders",
		"consumer resume-at --group billing --topic orders --partition 0 --why w", "consumer resume-at --group billing --topic orders --partition 0 --at 7",
		"consumer resume-at --group billing --topic orders --partition 0 --at 7 --cancel --why w", "consumer resume-at --group billing --topic orders --partition 0 --cancel --dry-run --why w",
		"consumer resume-at --group billing --topic orders --partition 0 --at end --why w", "consumer resume-at --group billing --topic orders --partition 0 --at -1 --why w",
		"consumer id-rule c --set standard", "consumer id-rule c --set best --why w", "consumer id-rule --set standard --why w",
		"keys finish k", "keys finish k --status 201 --why w --forever=0", "keys finish k --status 1000", "keys show "+strings.Repeat("k", 256), "keys list --scope=", "keys retry k", "keys retry --why w",
		"keys finish k --status 201 --header nope", "keys finish k --status 201 --header Set-Cookie:a=b --why w", "keys finish k --status 201 --header x-auth-token:t --why w",
		"keys finish k --status 201 --header www-authenticate:Basic --why w", "keys finish k --status 201 --why w --forever --window 1h",
		"relays delete old", "relays delete --why w", "relays delete '' --why w",
	)
}

// Property: decisions of an operator, what they leave, and what they say when there is nothing to do.
func TestGoldenOfDecisions(t *testing.T) {
	t.Parallel()
	address, body := pgtest.Database(t), file(t, `{"paid":true}`)
	conn := connect(t, address)
	requests(t, conn)
	for _, sql := range []string{burySQL, parkSQL, decisionsSQL} {
		_, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
		require.NoError(t, err)
	}
	const pause, resume = "consumer pause --group billing --topic orders --why INC-12 --by ana", "consumer resume --group billing --topic orders"
	const at, rule = "consumer resume-at --group billing --topic orders --partition 1 --by ana", "consumer id-rule billing/orders"
	golden(t, "decisions", address, strings.NewReplacer(address, "<database>", body, "<body>"),
		pause, pause, pause+" --json", "positions", resume, resume, resume+" --json", "consumer pause --group biling --topic orders --why w",
		at+" --at latest --dry-run", at+" --at earliest --why INC-12 --json", at+" --at 50 --why INC-12", "positions", at+" --cancel --why wrong", at+" --cancel --why wrong",
		rule+" --set standard --why test", rule+" --set headers:order-id,event-id --why test --by ana --force", rule+" --set standard --why test --json --force", rule+" --set standard --why test",
		"relays list", "relays delete default --why w", "relays delete old --why renamed --json", "relays delete old --why again",
		"dead list "+idPrefix+"2", "dead list 3", "dead list --key base64:AP8=", "dead list --relay default --topic payments", "dead list --relay other", "dead list --reason behind",
		"dead list --state held --older-than 5m", "dead list --younger-than 5m", "parked list "+idPrefix+"2", "parked list orders/0/3", "parked list --key base64:AP8=",
		"parked list --consumer billing/orders", "parked list --group audit --reason too_large", "parked list --older-than 5m --topic payments", "parked list --younger-than 5m --json", "parked list --younger-than 5m",
		"dead retry --topic orders --limit 1 --by ana --why raised", "dead retry --topic orders --rate 1000", "dead retry --topic orders --wait --wait-max 1s", "dead discard 1 --why w",
		"sql UPDATE effectonce.outbox_dead SET state = 'held' WHERE seq = 1", "dead discard "+idPrefix+"1 --why test",
		"sql UPDATE effectonce.outbox_dead SET state = 'held' WHERE seq = 2", "dead discard --json --key order-1 --all-of-key --yes --why test", "dead list",
		"parked list --limit 1", "parked retry --topic orders --limit 1 --by ana --why made", "parked retry --all --rate 1000", "parked retry "+idPrefix+"1 --wait --wait-max 1s",
		"parked discard "+idPrefix+"1 --why test", "parked discard --json --key order-1 --all-of-key --yes --why test", "parked show "+idPrefix+"6", "parked list",
		"keys list", "keys list --state stuck", "keys show in-doubt", "keys show in-doubt --child reserve --json", "keys show given-up --payload",
		"sql UPDATE effectonce.idempotency_keys SET sealed = true WHERE key = 'given-up'", "keys show given-up --payload --full", "keys show given-up --payload --json",
		"keys show cut", "keys show late", "keys show plain", "keys show unknown", "keys show work", "keys show counts",
		"keys retry in-doubt --why w", "keys retry in-doubt --call-did-not-happen --why w --json", "keys retry in-doubt --why w", "keys retry nobody --why w", "keys retry plain --why w",
		"keys unlock locked --why hangs", "keys unlock given-up --why w", "keys unlock same --why w", "keys retry late --why w", "keys unlock late --why w",
		"keys finish given-up --status 201 --why w --forever --body-file /nonexistent/body",
		"keys finish given-up --status 201 --header content-type:application/json --header X-A:1 --header X-A:2 --body-file "+body+" --window 1h --why statement", "keys show given-up --payload",
		"keys finish work --status 409 --forever --why w --json", "keys finish plain --status 409 --window 24h --why w", "keys reap --json", "keys reap",
		"sql UPDATE effectonce.idempotency_keys SET state = 'indeterminate', calling = 'pay', call = 'once', flow = 'f' WHERE key IN ('cut', 'late'); UPDATE effectonce.idempotency_keys SET state = 'abandoned' WHERE key = 'counts'",
		"keys retry --all --why w", "keys retry x --all --operation charge --yes", "keys retry --all --operation charge --why w", "keys retry --all --operation charge --why w --yes",
		"keys retry --all --operation charge --state indeterminate --call-did-not-happen --why w --yes --json", "keys retry --all --operation charge --why w",
		"sql INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, obeys) VALUES ('default', 'a', 'infinity', '{}')",
		"topics pause orders --relay other", "topics pause misspelt --wait 0s", "topics pause orders --wait 1s --json", "topics pause orders --wait 0s",
		"sql UPDATE effectonce.outbox_replicas SET obeys = ARRAY(SELECT id FROM effectonce.outbox_paused)", "topics pause orders",
		"sql DELETE FROM effectonce.outbox_replicas", "topics pause misspelt --force", "actions list",
	)
}

// decisionsSQL has, beside what is dead and parked, positions, two relays, one of which is gone, and
// keys of each kind that a person is asked about.
const decisionsSQL = `
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, owner, released, trouble) VALUES
  ('billing', 'orders', 0, 7, 'host-1', true, NULL), ('billing', 'orders', 1, 40, 'host-1', false, E'offset out of range\nsecond line');
INSERT INTO effectonce.outbox_relays (relay, created_at) VALUES ('default', clock_timestamp()), ('old', clock_timestamp() - interval '26 hours');
INSERT INTO effectonce.outbox_progress (relay, shard, lease_until) VALUES ('default', 0, clock_timestamp() + interval '1 hour'), ('old', 0, NULL);
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, published, at) VALUES ('default', 0, 1, 0, 3, clock_timestamp()), ('old', 0, 1, 0, 7, clock_timestamp() - interval '25 hours');
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, call, attempts, locked_until, retry_at, expires_at, error) VALUES
  ('t7', 'charge', 'work', sha256('x'), 'indeterminate', '{}', NULL, NULL, 1, NULL, NULL, NULL, 'the bank did not answer'),
  ('t7', 'charge', 'cut', sha256('x'), 'running', '{reserve}', 'pay', 'once', 1, NULL, NULL, NULL, NULL),
  ('t7', 'charge', 'late', sha256('x'), 'running', '{reserve}', 'pay', 'once', 1, now() + interval '1 hour', NULL, NULL, NULL),
  ('t7', 'charge', 'plain', sha256('x'), 'abandoned', '{reserve}', NULL, NULL, 1, NULL, NULL, NULL, NULL),
  ('t7', 'charge', 'unknown', sha256('x'), 'running', '{reserve}', NULL, NULL, 1, NULL, now() + interval '1 min', NULL, 'the phases that are done do not begin this flow''s list: done are ["reserve"], known ["begin"]'),
  ('t7', 'charge', 'counts', sha256('x'), 'running', '{}', NULL, NULL, 2, NULL, now() + interval '1 day', now() + interval '1 day', NULL);
UPDATE effectonce.idempotency_keys SET flow = 'charge' WHERE key <> 'work';
UPDATE effectonce.idempotency_keys SET retry_at = now() + interval '1 minute' WHERE key = 'in-doubt'`
