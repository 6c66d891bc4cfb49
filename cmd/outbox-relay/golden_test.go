package main_test

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
INSERT INTO effectonce.processed_messages (consumer, message_id) SELECT id, '01976f00-0000-7000-8000-0000000000b1' FROM effectonce.consumers WHERE name = 'billing/orders';
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, request, body, status, locked_until, locked_by, attempts, error, created_at, finished_at, expires_at) VALUES
  ('t7', 'charge', 'in-doubt', sha256('x'), 'indeterminate', '{reserve}', 'pay', 'card 4111', NULL, NULL, NULL, 'pod-1', 1, 'no answer', now() - interval '3 hours', NULL, NULL),
  ('t7', 'charge', 'given-up', sha256('x'), 'abandoned', '{}', NULL, 'card 4222', NULL, NULL, NULL, 'pod-1', 20, 'refused', now() - interval '2 hours', NULL, NULL),
  ('t8', 'charge', 'over', sha256('x'), 'finished', '{}', NULL, NULL, 'paid', 201, NULL, NULL, 1, NULL, now(), now(), now() - interval '2 hours')`

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

// golden runs command lines and compares all that they print, and their exit status, with a file of
// testdata/golden.
func golden(t *testing.T, name, address string, names *strings.Replacer, lines ...string) {
	t.Helper()
	var all strings.Builder
	for _, line := range lines {
		r := runKafka(t, address, strings.Fields(line)...)
		fmt.Fprintf(&all, "$ outbox-relay %s\n", names.Replace(line))
		all.WriteString(steady(r.stdout, names))
		for text := range strings.Lines(steady(r.stderr, names)) {
			all.WriteString("! " + text)
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
	assert.Equal(t, string(want), all.String(), "%s is not what the commands print: go test ./cmd/outbox-relay -run TestGolden -update", path)
}

// shown are the commands that show and change nothing.
var shown = []string{
	"status --interval 0s", "relays list", "topics list", "consumer id-rule", "positions", "dead list", "parked list", "keys list",
	"keys list --state finished", "actions list", "publishers list", "migrate status", "verify --since 1h", "prune --dry-run",
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
	_, err = conn.PgConn().Exec(t.Context(), strings.ReplaceAll(goldenSQL, "TOPIC", topic)).ReadAll()
	require.NoError(t, err)
	drain(t, address)
	const a, b = "01976f00-0000-7000-8000-0000000000a", "01976f00-0000-7000-8000-0000000000b"
	lines := bothForms(append(slices.Clone(shown),
		"dead show "+idPrefix+"1", "parked show "+a+"1", "keys show in-doubt", "keys show given-up --payload", "explain "+b+"1", "explain "+b+"2", "explain "+a+"2", "explain "+idPrefix+"2",
		"explain "+topic+"/0/0", "explain 01976f00-0000-7000-8000-0000000000ff", "tail --from-beginning --limit 1",
		"replay --topic "+topic+" --from 2026-01-01T00:00:00Z --dry-run",
		"dead retry --id "+idPrefix+"1 --dry-run", "dead discard --id "+idPrefix+"4 --why test --dry-run", "parked retry --id "+a+"1 --dry-run", "parked discard --reason permanent --why test --dry-run",
		"topics pause other --why test --force", "topics resume other", "consumer pause --group billing --topic orders --why test", "consumer resume --group billing --topic orders",
		"keys unlock given-up --why test", "dead retry --id "+idPrefix+"1", "dead discard --id "+idPrefix+"4 --why test", "parked retry --id "+a+"1", "parked discard --id "+a+"4 --why test", "keys retry given-up --why test", "actions list --limit 3", "parked list",
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
		"run --shards 0", "run --keep 1ms --lease 1ms", "shards", "shards x", "migrate down", "migrate up --schema BAD!", "publishers limit", "relays delete nosuch", "repair", "prune --retention 1s",
		"tail --from-beginning --limit -1", "bench relay --messages 0", "bench consume --messages -1", "completion nosuch", "doctor --timeout -1s", "status --database-url postgres://h/db?sslmode=bogus",
		"status --brokers nosuch:port", "consumer resume-at --partition x --at y", "topics resume", "keys finish k --status 99 --window 1ns",
	)
}
