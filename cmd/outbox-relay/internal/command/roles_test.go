package command_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// withRoles creates the group roles with the command.
func withRoles(t *testing.T, address string) (prefix string) {
	t.Helper()
	prefix = pgtest.RolePrefix(t, address)
	r := runOn(t, address, "migrate", "roles", "--apply", "--prefix", prefix)
	require.Zero(t, r.code, r.stderr)
	return prefix
}

// --apply executes the printed SQL; both may be repeated, in any order. Wrong use is reported at
// once, and nothing is printed that looks like SQL. Row S7 of guarantees.md.
func TestMigrateRoles(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	prefix, conn := pgtest.RolePrefix(t, address), connect(t, address)
	rights := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_class CROSS JOIN LATERAL aclexplode(relacl) a
			JOIN pg_roles r ON r.oid = a.grantee WHERE starts_with(r.rolname, $1)`, prefix+"_").Scan(&n))
		return n
	}
	printed := run(t, nil, "migrate", "roles", "--prefix", prefix)
	execSQL(t, conn, printed.stdout)
	first := rights()
	require.Greater(t, first, 60)
	r := runOn(t, address, "migrate", "roles", "--apply", "--prefix", prefix)
	assert.Contains(t, r.stdout, "schema effectonce: rights of "+prefix+"_publisher, "+prefix+"_relay, "+prefix+"_consumer, "+prefix+"_endpoint, "+prefix+"_operator\n")
	execSQL(t, conn, printed.stdout)
	assert.Equal(t, first, rights())
	assert.Contains(t, run(t, nil, "migrate", "roles", "--schema", "tenant_7").stdout, `"tenant_7".outbox_paused TO tenant_7_relay;`)

	for text, args := range map[string][]string{"want at most 49": {"--prefix", "Shop"}, "--database-url is missing": {"--apply"}, "give --apply": {"--json"}} {
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

// Property: a role whose members could do more than the schema's rights allow is refused, by
// --apply and by what is printed, with a remedy, and nothing is changed. Rows S7, S18 of guarantees.md.
func TestMigrateRolesRefusesMightyRoles(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	own, conn := pgtest.RolePrefix(t, address), connect(t, address)
	for i, c := range []struct{ made, says string }{
		{"CREATE ROLE PREFIX_relay SUPERUSER", "role PREFIX_relay exists and is SUPERUSER"},
		{"CREATE ROLE PREFIX_relay CREATEROLE", "role PREFIX_relay exists and is CREATEROLE"},
		{"CREATE ROLE PREFIX_publisher BYPASSRLS", "role PREFIX_publisher exists and is BYPASSRLS"},
		{"CREATE ROLE PREFIX_operator REPLICATION", "role PREFIX_operator exists and is REPLICATION"},
		{"CREATE ROLE PREFIX_consumer; CREATE ROLE PREFIX_super SUPERUSER; GRANT PREFIX_super TO PREFIX_consumer", "role PREFIX_consumer exists and is a member of PREFIX_super, which is SUPERUSER"},
		{"CREATE ROLE PREFIX_dba CREATEROLE; CREATE ROLE PREFIX_a; CREATE ROLE PREFIX_endpoint; GRANT PREFIX_dba TO PREFIX_a; GRANT PREFIX_a TO PREFIX_endpoint", "is a member of PREFIX_dba, which is CREATEROLE"},
		{"CREATE ROLE PREFIX_endpoint; ALTER SCHEMA effectonce OWNER TO PREFIX_endpoint", "role PREFIX_endpoint exists and owns the schema"},
	} {
		prefix := fmt.Sprintf("%s_%d", own, i)
		named := func(text string) string { return strings.ReplaceAll(text, "PREFIX", prefix) }
		execSQL(t, conn, named(c.made))
		rights := func() (acl string) {
			require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) || ' ' || string_agg(coalesce(relacl::text, ''), ' ' ORDER BY oid) FROM pg_class WHERE relnamespace = 'effectonce'::regnamespace`).Scan(&acl))
			return acl
		}
		before := rights()
		_, err := conn.PgConn().Exec(t.Context(), run(t, nil, "migrate", "roles", "--prefix", prefix).stdout).ReadAll()
		require.ErrorContains(t, err, named(c.says))
		execSQL(t, conn, "ROLLBACK")
		r := runOn(t, address, "migrate", "roles", "--apply", "--prefix", prefix)
		assert.Equal(t, 1, r.code, c.made)
		assert.Empty(t, r.stdout)
		if !strings.Contains(c.made, "OWNER") { // this program is refused before
			assert.Contains(t, r.stderr, named(c.says))
			assert.Contains(t, r.stderr, "--prefix", "a remedy")
		}
		assert.Equal(t, before, rights(), c.made)
		execSQL(t, conn, named("ALTER SCHEMA effectonce OWNER TO CURRENT_USER"))
	}
}

// Property: each command of an operator works with that role alone, and says nothing of rights;
// what is not an operator's is refused. Row S7 of guarantees.md.
func TestOperatorHasItsCommands(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	conn := connect(t, address)
	execSQL(t, conn, burySQL)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	requests(t, conn)
	execSQL(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset) VALUES ('billing', 'orders', 0, 0)")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_relays (relay) VALUES ('old')")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('old', 0)")
	var id string
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT id::text FROM effectonce.outbox ORDER BY seq LIMIT 1").Scan(&id))
	prefix := withRoles(t, address)
	operator := pgtest.Login(t, address, prefix, "operator")
	for _, line := range []string{
		"status --interval 0s", "positions", "explain " + id, "verify --group billing", "tail --from-beginning --limit 2", "doctor", "migrate status",
		"dead list", "dead show 1", "dead retry --reason too_large", "dead discard --topic payments --all-of-key --yes --why test", "dead discard 4 --why test",
		"parked list", "parked show " + idPrefix + "1", "parked retry --reason failed", "parked discard --reason undecodable --why test",
		"parked discard --topic payments --all-of-key --yes --why test", "actions list", "prune --dry-run",
		"keys list", "keys show in-doubt --payload", "keys retry in-doubt --call-did-not-happen --why test", "keys finish given-up --status 201 --forever --why test",
		"keys unlock locked --why test", "keys retry --all --operation charge --why test --yes", "keys reap",
		"relays list", "relays delete old --why test", "shards 2 --why test", "topics pause orders --why test --wait 0s", "topics list", "topics resume orders --why test",
		"consumer pause --group billing --topic orders --why test", "consumer resume --group billing --topic orders", "consumer id-rule",
		"consumer resume-at --group billing --topic orders --partition 0 --at latest --why test", "consumer resume-at --group billing --topic orders --partition 0 --cancel --why test",
		"replay --from 2000-01-01T00:00:00Z --to 2100-01-01T00:00:00Z --yes --topic " + topic,
	} {
		r := runKafka(t, operator, strings.Fields(line)...)
		for _, word := range []string{"permission", "denied", "rights that", "GRANT"} {
			assert.NotContains(t, r.stdout+r.stderr, word, line)
		}
		assert.NotEmpty(t, r.stdout+r.stderr, line)
		assert.NotEqual(t, 2, r.code, line)
		if command, _, _ := strings.Cut(line, " "); !slices.Contains([]string{"status", "positions", "explain", "verify", "doctor", "prune"}, command) { // which may find something
			assert.Zero(t, r.code, "%s: %s", line, r.stderr)
		}
	}
	// Who may read the tables, and nothing else, sees them without a word of rights.
	execSQL(t, conn, fmt.Sprintf(`CREATE ROLE %[1]s_reader; GRANT USAGE ON SCHEMA effectonce TO %[1]s_reader; GRANT SELECT ON ALL TABLES IN SCHEMA effectonce TO %[1]s_reader`, prefix))
	reader := pgtest.Login(t, address, prefix, "reader")
	for _, line := range []string{
		"status --interval 0s", "verify", "positions", "explain " + topic + "/0/0", "dead list", "parked list", "keys list", "actions list", "relays list", "topics list",
		"consumer id-rule", "tail --from-beginning --to-end", "migrate status",
	} {
		r := runKafka(t, reader, strings.Fields(line)...)
		assert.NotEqual(t, 2, r.code, line)
		for _, asks := range []string{"TRUNCATE", "GRANT", "grant ", "permission denied"} {
			assert.NotContains(t, r.stdout+r.stderr, asks, line)
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

// Property: the role of a relay is enough for "outbox-relay run" with every metric, and for status
// and doctor. Row S7 of guarantees.md.
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
			strings.Contains(body, "\neffectonce_outbox_table_bytes")
	})
	require.Zero(t, end(), stderr)
	assert.NotContains(t, stderr.String(), "SQLSTATE 42501")
	assert.NotContains(t, stderr.String(), "level=WARN")
	for _, line := range []string{"status", "doctor"} {
		r := runKafka(t, relay, line)
		assert.NotContains(t, r.stdout+r.stderr, "denied", line)
		assert.NotContains(t, r.stdout+r.stderr, "warn  rights", line)
	}
	assert.Contains(t, runKafka(t, relay, "status").stdout, "parked")
}

// latest is this program's schema version.
func latest(t *testing.T) int {
	t.Helper()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	return len(all)
}

// The way up, the look at it, and the way down, with their exit codes.
func TestMigrateUpStatusDown(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	r := runOn(t, address, "migrate", "status")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, `not installed: run "outbox-relay migrate up"`)
	assert.Equal(t, "missing", runOn(t, address, "migrate", "status", "--json").object(t)["state"])

	up := runOn(t, address, "migrate", "up", "--json").object(t)
	assert.Equal(t, map[string]any{"schema": "effectonce", "from": 0.0, "to": float64(latest(t))}, up)
	r = runOn(t, address, "migrate", "up")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "nothing to do")
	r = runOn(t, address, "migrate", "status")
	assert.Zero(t, r.code)

	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 200)")
	execSQL(t, conn, "INSERT INTO effectonce.fences VALUES ('s', 'r', 1)")
	r = run(t, map[string]string{"DATABASE_URL": address, "OUTBOX_YES": "true"}, "migrate", "down", "--to", "0")
	assert.Equal(t, 2, r.code, "consent must not come from the environment")
	assert.Contains(t, r.stderr, "would lose what the removed tables hold")
	assert.Regexp(t, `the schema has .*effectonce.outbox \(\d+ kB\)`, r.stderr)
	assert.Contains(t, r.stderr, "effectonce.fences (")
	assert.NotContains(t, r.stderr, "parked_messages")
	assert.Contains(t, r.stderr, "--yes")
	r = runOn(t, address, "migrate", "down", "--yes")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "--to is missing")
	r = runOn(t, address, "migrate", "down", "--to", strconv.Itoa(latest(t)), "--yes")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "nothing to do")
	require.NoError(t, migrations.Check(t.Context(), conn, migrations.Options{}))

	r = runOn(t, address, "migrate", "down", "--to", "0", "--yes")
	assert.Zero(t, r.code, r.stderr)
	require.ErrorIs(t, migrations.Check(t.Context(), conn, migrations.Options{}), migrations.ErrTooOld)
	r = runOn(t, address, "migrate", "down", "--to", "1", "--yes")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "goes forward")
}

// A database of a newer release that does not work with this program is left alone, with the
// remedy, by everything that would use it.
func TestNewerSchemaIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), "UPDATE effectonce.schema_version SET version = version + 7; UPDATE effectonce.schema_compatibility SET oldest = 1000")
	for _, args := range [][]string{{"migrate", "up"}, {"status"}, {"run", "--brokers", "127.0.0.1:1"}} {
		r := runOn(t, address, args...)
		assert.Equal(t, 1, r.code, args)
		assert.Contains(t, r.stderr, "database schema is too new", args)
		assert.Contains(t, r.stderr, "update this program", args)
		assert.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
	}
	r := runOn(t, address, "migrate", "status", "--json")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "new", r.object(t)["state"])
}

// The printed SQL does what "migrate up" does, so that either can continue after the other, and
// refuses to run on another version.
func TestPrintedMigrationsRun(t *testing.T) {
	t.Parallel()
	const schema = "another_1"
	address := pgtest.EmptyDatabase(t)
	conn := connect(t, address)
	printed := run(t, nil, "migrate", "print", "--schema", schema)
	require.Zero(t, printed.code)
	var one strings.Builder
	for version := range latest(t) {
		one.WriteString(run(t, nil, "migrate", "print", "--schema", schema, "--version", strconv.Itoa(version+1)).stdout)
	}
	assert.Equal(t, printed.stdout, one.String())
	_, err := conn.PgConn().Exec(t.Context(), printed.stdout).ReadAll()
	require.NoError(t, err)
	assert.Contains(t, runOn(t, address, "migrate", "up", "--schema", schema).stdout, "nothing to do")
	execSQL(t, conn, "INSERT INTO "+schema+".outbox (topic) VALUES ('t')")

	_, err = conn.PgConn().Exec(t.Context(), printed.stdout).ReadAll()
	require.ErrorContains(t, err, fmt.Sprintf("the schema has version %d, migration 1 needs version 0", latest(t)))
	execSQL(t, conn, "ROLLBACK")
	assert.Zero(t, runOn(t, address, "migrate", "status", "--schema", schema).code)
}
