package main_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// withRoles brings the group roles by the command.
func withRoles(t *testing.T, address string) (prefix string) {
	t.Helper()
	prefix = pgtest.RolePrefix(t, address)
	r := runOn(t, address, "migrate", "roles", "--apply", "--prefix", prefix)
	require.Zero(t, r.code, r.stderr)
	return prefix
}

// What is printed is what is applied; both may be repeated, in any order. Wrong use is told at once, and nothing is
// printed that looks like SQL. Row S7.
func TestMigrateRoles(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	prefix := pgtest.RolePrefix(t, address)
	printed := run(t, nil, "migrate", "roles", "--prefix", prefix)
	require.Zero(t, printed.code, printed.stderr)
	conn := connect(t, address)
	rights := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_class CROSS JOIN LATERAL aclexplode(relacl) a
			JOIN pg_roles r ON r.oid = a.grantee WHERE starts_with(r.rolname, $1)`, prefix+"_").Scan(&n))
		return n
	}
	require.Zero(t, rights())
	execSQL(t, conn, printed.stdout)
	first := rights()
	require.Greater(t, first, 60)
	r := runOn(t, address, "migrate", "roles", "--apply", "--prefix", prefix)
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "schema effectonce: rights of "+prefix+"_publisher, "+prefix+"_relay, "+prefix+"_consumer, "+prefix+"_endpoint, "+prefix+"_operator\n", r.stdout)
	assert.Equal(t, map[string]any{"schema": "effectonce", "prefix": prefix}, runOn(t, address, "migrate", "roles", "--apply", "--json", "--prefix", prefix).object(t))
	execSQL(t, conn, printed.stdout)
	assert.Equal(t, first, rights())
	assert.Contains(t, run(t, nil, "migrate", "roles", "--schema", "tenant_7").stdout, `"tenant_7".outbox_paused TO tenant_7_relay;`)

	for text, args := range map[string][]string{
		"want at most 49":           {"--prefix", "Shop"},
		"--database-url is missing": {"--apply"},
		"give --apply":              {"--json"},
	} {
		r := run(t, map[string]string{"OUTBOX_APPLY": "true"}, append([]string{"migrate", "roles"}, args...)...)
		assert.Equal(t, 2, r.code, args)
		assert.Contains(t, r.stderr, text)
		assert.Empty(t, r.stdout)
	}
	assert.Contains(t, run(t, map[string]string{"OUTBOX_APPLY": "true"}, "migrate", "roles").stdout, "CREATE ROLE", "only the command line applies")

	empty := runOn(t, pgtest.EmptyDatabase(t), "migrate", "roles", "--apply", "--prefix", prefix)
	assert.Equal(t, 1, empty.code)
	assert.Contains(t, empty.stderr, `run "outbox-relay migrate up"`)
	stranger := runOn(t, pgtest.Login(t, address, prefix, "relay"), "migrate", "roles", "--apply", "--prefix", prefix+"_other")
	assert.Equal(t, 1, stranger.code)
	assert.Contains(t, stranger.stderr, "as the owner of the tables, with CREATEROLE")
}

// Property: each command of an operator works with that role alone, and says nothing of rights; what is not an
// operator's is refused. Row S7.
func TestOperatorHasItsCommands(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	conn := connect(t, address)
	execSQL(t, conn, burySQL)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	execSQL(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset) VALUES ('billing', 'orders', 0, 0)")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_relays (relay) VALUES ('old')")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('old', 0)")
	var id string
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT id::text FROM effectonce.outbox ORDER BY seq LIMIT 1").Scan(&id))
	operator := pgtest.Login(t, address, withRoles(t, address), "operator")
	codes := map[string]int{}
	for _, line := range []string{
		"status", "status --brokers KAFKA", "positions", "positions --json", "explain " + id, "explain " + topic + "/0/0", "explain " + idPrefix + "1",
		"verify", "verify --group billing", "tail --from-beginning --limit 2", "doctor", "migrate status",
		"dead list", "dead show 1", "dead show 5", "dead retry --reason too_large", "dead discard --topic payments --all-of-key --why test",
		"dead discard --id 4 --why test", "parked list", "parked show " + idPrefix + "1", "parked retry --reason failed",
		"parked retry --topic orders --key order-1 --dry-run", "parked discard --reason undecodable --why test",
		"parked discard --topic payments --all-of-key --why test", "actions list", "prune --dry-run",
		"relays list", "relays list --json", "relays delete old --why test", "shards 2 --why test", "topics pause orders --why test --wait 0s", "topics list", "topics resume orders --why test",
		"consumer pause --group billing --topic orders --why test", "consumer resume --group billing --topic orders", "consumer id-rule",
		"consumer resume-at --group billing --topic orders --partition 0 --at latest --why test", "consumer resume-at --group billing --topic orders --partition 0 --cancel --why test",
		"replay --from 2000-01-01T00:00:00Z --to 2100-01-01T00:00:00Z --topic " + topic,
	} {
		r := runKafka(t, operator, strings.Fields(strings.ReplaceAll(line, " --brokers KAFKA", ""))...)
		for _, word := range []string{"permission", "denied", "rights that", "GRANT"} {
			assert.NotContains(t, r.stdout+r.stderr, word, line)
		}
		assert.NotEmpty(t, r.stdout+r.stderr, line)
		codes[line] = r.code
	}
	for line, code := range codes {
		assert.NotEqual(t, 2, code, line)
		if strings.HasPrefix(line, "dead ") || strings.HasPrefix(line, "parked ") || strings.HasPrefix(line, "actions ") || strings.HasPrefix(line, "tail ") ||
			strings.HasPrefix(line, "shards ") || strings.HasPrefix(line, "topics ") || strings.HasPrefix(line, "replay ") || strings.HasPrefix(line, "relays ") ||
			strings.HasPrefix(line, "consumer ") {
			assert.Zero(t, code, line)
		}
	}
	var actions int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.operator_actions WHERE db_role LIKE '%_login_operator'").Scan(&actions))
	assert.Positive(t, actions)
	for _, line := range []string{"run", "prune", "migrate down --to 0 --yes", "migrate roles --apply"} {
		r := runKafka(t, operator, strings.Fields(line)...)
		assert.NotZero(t, r.code, line)
		assert.Contains(t, r.stdout+r.stderr, "42501", line)
	}
}

// Property: the role of a relay is enough for "outbox-relay run" with every metric, and for status and doctor. Row S7.
func TestRelayRunsWithItsRole(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	conn := connect(t, address)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	execSQL(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset) VALUES ('billing', 'orders', 0, 0)")
	relay := pgtest.Login(t, address, withRoles(t, address), "relay")
	environment := relayEnvironment(t, relay)
	environment["OUTBOX_LISTEN"] = "127.0.0.1:0"
	stderr, end := inBackground(t, environment, "run", "--lease", "30s", "--metrics-interval", "1s")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	awaitRecords(t, topic, 4)
	awaitGet(t, listening(t, stderr)+"/metrics", func(code int, body string) bool {
		return code == 200 && strings.Contains(body, "\neffectonce_parked_messages{") && strings.Contains(body, "\neffectonce_consumer_position_age_seconds{") &&
			strings.Contains(body, "\noutbox_table_bytes")
	})
	require.Zero(t, end(), stderr)
	assert.NotContains(t, stderr.String(), "42501")
	assert.NotContains(t, stderr.String(), "level=WARN")
	for _, line := range []string{"status", "doctor"} {
		r := runKafka(t, relay, line)
		assert.NotContains(t, r.stdout+r.stderr, "denied", line)
		assert.NotContains(t, r.stdout+r.stderr, "warn  rights", line)
	}
	assert.Contains(t, runKafka(t, relay, "status").stdout, "parked")
}
