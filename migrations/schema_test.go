package migrations_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// S1: a schema name is plain or it is refused, by every function that takes one.
func TestSchemaNamesArePlain(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"": "effectonce", "effectonce": "effectonce", "tenant_7": "tenant_7", "_": "_", "a": "a", "order": "order", "pgx": "pgx",
		strings.Repeat("a", 49): strings.Repeat("a", 49),
	} {
		resolved, err := migrations.Options{Schema: name}.Resolve()
		require.NoError(t, err, name)
		assert.Equal(t, want, resolved)
	}
	for _, name := range []string{
		`"we""ird; DROP TABLE x`, `we"ird`, "a.b", "a b", " a", "a ", "A", "ä", "1a", "-", "a-b", "$user", "a$", "a'b", "a;", "a\x00", "a\n",
		"pg_catalog", "pg_x", "a%sb", `a\b`, strings.Repeat("a", 50), strings.Repeat("a", 100_000),
	} {
		opts := migrations.Options{Schema: name}
		_, err := opts.Resolve()
		require.ErrorContains(t, err, "want at most 49 lower-case letters", "%.100q", name)
		_, err = migrations.All(opts)
		require.Error(t, err)
		// None of these gets as far as the connection, which is nil.
		require.Error(t, migrations.Up(t.Context(), nil, opts))
		require.Error(t, migrations.To(t.Context(), nil, opts, 0))
		require.Error(t, migrations.Check(t.Context(), nil, opts))
	}
}

// InSchema replaces whole words only, with the quoted name.
func TestInSchemaReplacesWholeWords(t *testing.T) {
	t.Parallel()
	const sql = "SELECT * FROM effectonce.outbox, effectonce_other.t, noeffectonce.t, EFFECTONCE.t -- effectonce"
	assert.Equal(t, sql, migrations.InSchema(sql, "effectonce"))
	assert.Equal(t, `SELECT * FROM "tenant_7".outbox, effectonce_other.t, noeffectonce.t, EFFECTONCE.t -- "tenant_7"`,
		migrations.InSchema(sql, "tenant_7"))
}

// Text that programs write has a limit in bytes, and the error names the column.
func TestTextHasItsLimits(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	for _, tc := range []struct {
		table, column, others string
		min, max              int
	}{
		{"outbox", "topic", "", 1, 249},
		{"outbox_progress", "relay", "shard => 0", 1, 255},
		{"outbox_progress", "owner", "relay => 'r', shard => 0", 0, 255},
		{"outbox_dead", "error", "relay => 'r', seq => 1, id => uuid_v7(), topic => 't', headers => '{}', created_at => now(), reason => 'refused', state => 'held'", 0, 2048},
		{"consumers", "name", "consumer_group => 'g', topics => '{}'", 1, 600},
		{"consumers", "consumer_group", "name => 'n', topics => '{}'", 1, 255},
		{"consumer_positions", "consumer_group", "topic => 't', partition => 0", 1, 255},
		{"consumer_positions", "topic", "consumer_group => 'g', partition => 0", 1, 249},
		{"consumer_positions", "owner", "consumer_group => 'g', topic => 't', partition => 0", 0, 255},
	} {
		columns, values := tc.column, "repeat('x', $1)"
		for _, other := range strings.Split(tc.others, ", ") {
			if column, value, ok := strings.Cut(other, " => "); ok {
				columns, values = columns+", "+column, values+", "+strings.ReplaceAll(value, "uuid_v7", "effectonce.uuid_v7")
			}
		}
		insert := func(length int) error {
			tx, err := conn.Begin(t.Context())
			require.NoError(t, err)
			defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
			_, err = tx.Exec(t.Context(), "INSERT INTO effectonce."+tc.table+" ("+columns+") VALUES ("+values+")", length)
			return err
		}
		where := tc.table + "." + tc.column
		require.NoError(t, insert(tc.min), where)
		require.NoError(t, insert(tc.max), where)
		refused := []int{tc.max + 1}
		if tc.min > 0 {
			refused = append(refused, tc.min-1)
		}
		for _, length := range refused {
			var pgErr *pgconn.PgError
			require.ErrorAs(t, insert(length), &pgErr, where)
			assert.Equal(t, "23514", pgErr.Code, where)
			assert.Contains(t, pgErr.ConstraintName, tc.column, where)
		}
	}
}

// A key's row accepts no value that the program could not read again.
func TestValuesOfKeysHaveTheirTypes(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	insert := func(column, value string) error {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		values := map[string]string{"scope": "'shop'", "operation": "'charge'", "key": "'k'", "fingerprint": "sha256('')", "state": "'finished'", "status": "NULL"}
		values[column] = value
		_, err = tx.Exec(t.Context(), fmt.Sprintf(`INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, status)
			VALUES (%s, %s, %s, %s, %s, %s)`, values["scope"], values["operation"], values["key"], values["fingerprint"], values["state"], values["status"]))
		return err
	}
	for _, tc := range []struct {
		column, good, bad, code string
	}{
		{"scope", "'t'", "''", "23514"},
		{"operation", "repeat('o', 255)", "''", "23514"},
		{"key", "repeat('k', 255)", "repeat('k', 256)", "22001"},
		{"key", "'k'", "NULL", "23502"},
		{"fingerprint", "decode(repeat('00', 32), 'hex')", "decode(repeat('00', 31), 'hex')", "23514"},
		{"state", "'indeterminate'", "'done'", "23514"},
		{"status", "0", "-1", "23514"},
		{"status", "999", "1000", "23514"},
	} {
		require.NoError(t, insert(tc.column, tc.good), tc.column)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, insert(tc.column, tc.bad), &pgErr, tc.column)
		assert.Equal(t, tc.code, pgErr.Code, tc.column)
	}
}

// A row inserted at any time has a UUIDv7 of that time by the database's clock, and two rows never
// have the same. The floor of a time is not above any ID of that time and above every earlier one.
func TestIDsMadeByTheDatabase(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	var versions, variants, distinct, between int
	err := conn.QueryRow(t.Context(), `
WITH made AS (
  SELECT clock_timestamp() AS before, effectonce.uuid_v7() AS id, clock_timestamp() AS after FROM generate_series(1, 10000))
SELECT count(*) FILTER (WHERE substr(id::text, 15, 1) = '7'), count(*) FILTER (WHERE substr(id::text, 20, 1) IN ('8', '9', 'a', 'b')),
  count(DISTINCT id), count(*) FILTER (WHERE id BETWEEN effectonce.uuid_floor(before - interval '1 ms') AND effectonce.uuid_floor(after + interval '2 ms'))
FROM made`).Scan(&versions, &variants, &distinct, &between)
	require.NoError(t, err)
	assert.Equal(t, []int{10000, 10000, 10000, 10000}, []int{versions, variants, distinct, between})

	floor := pgtest.Value[string](t, conn, "SELECT effectonce.uuid_floor('2024-09-08 22:00:46.366Z')::text")
	assert.Equal(t, "0191d3a7-5c1e-0000-0000-000000000000", floor)
}

// The partitions of processed_messages cover every ID without a gap, a day each around today, and
// none of them is the DEFAULT partition, which every new one would have to scan under an exclusive
// lock.
func TestPartitionsCoverEveryID(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	type partition struct{ Name, Bound string }
	partitions := pgtest.Rows(t, conn, pgx.RowToStructByPos[partition], `SELECT c.relname::text, pg_get_expr(c.relpartbound, c.oid)
		FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'effectonce.processed_messages'::regclass
		ORDER BY (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \(''?([^'')]*)'))[1] = 'MINVALUE' DESC, 2`)
	require.Len(t, partitions, 43)

	bound := regexp.MustCompile(`^FOR VALUES FROM \('?([^')]*)'?\) TO \('?([^')]*)'?\)$`)
	last := "MINVALUE"
	for _, p := range partitions {
		from := bound.FindStringSubmatch(p.Bound)
		require.NotNil(t, from, p)
		require.Equal(t, last, from[1], p)
		last = from[2]
		if day := strings.TrimPrefix(p.Name, "processed_messages_"); len(day) == 8 {
			var want, next string
			err := conn.QueryRow(t.Context(), `SELECT effectonce.uuid_floor($1::text::date::timestamp AT TIME ZONE 'UTC'),
				effectonce.uuid_floor(($1::text::date + 1)::timestamp AT TIME ZONE 'UTC')`, day).Scan(&want, &next)
			require.NoError(t, err)
			require.Equal(t, []string{want, next}, from[1:], p)
		}
	}
	assert.Equal(t, "MAXVALUE", last)
	ahead := pgtest.Count(t, conn, `SELECT max(substr(relname, 20))::date - (now() AT TIME ZONE 'UTC')::date FROM pg_class WHERE relname ~ '^processed_messages_[0-9]{8}$'`)
	assert.GreaterOrEqual(t, ahead, 30, "days ahead")
}

// Property: check_position lets only the holder of the position's epoch pass, and with p_known only
// while the database has what the caller saw stored. Until its transaction ends, no other holder
// can take the position.
func TestCheckPositionFencesFormerHolders(t *testing.T) {
	t.Parallel()
	ctx, address := t.Context(), pgtest.Database(t)
	conn, other := pgtest.Connect(t, address), pgtest.Connect(t, address)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, epoch, next_offset) VALUES ('g', 't', 0, 5, 10)`)
	for _, call := range []struct {
		args   string
		passes bool
	}{
		{`'g', 't', 0, 6, NULL`, false},
		{`'g', 'u', 0, 5, NULL`, false},
		{`'h', 't', 0, 5, NULL`, false},
		{`'g', 't', 0, 5, NULL`, true},
		{`'g', 't', 0, 5, 10`, true},
		{`'g', 't', 0, 5, 9`, true},
		{`'g', 't', 0, 5, 11`, false},
		{`'g', 't', 0, 4, NULL`, false},
		{`'g', 't', 0, 4, 10`, false},
		{`'g', 't', 1, 5, 10`, false},
	} {
		_, err := conn.Exec(ctx, `SELECT effectonce.check_position(`+call.args+`)`)
		if call.passes {
			require.NoError(t, err, call.args)
		} else {
			require.True(t, pgerr.Is(err, "EO001"), "%s: %v", call.args, err)
		}
	}
	pgtest.Exec(t, other, `SET lock_timeout = '100ms'`)
	for _, args := range []string{`'g', 't', 0, 5, NULL`, `'g', 't', 0, 5, 10`} {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `SELECT effectonce.check_position(`+args+`)`)
		require.NoError(t, err)
		_, err = other.Exec(ctx, `UPDATE effectonce.consumer_positions SET epoch = 6`)
		require.True(t, pgerr.LockConflict(err), "%v", err)
		require.NoError(t, tx.Rollback(ctx))
	}
}

// rights lists what roles of a prefix may do, on relations, columns, functions and the schema.
func rights(t *testing.T, conn *pgx.Conn, schema, prefix string) []string {
	t.Helper()
	return pgtest.Column[string](t, conn, `
WITH acls AS (
  SELECT 'the schema' AS on, nspacl AS acl FROM pg_namespace WHERE nspname = $1
  UNION ALL SELECT relname, relacl FROM pg_class WHERE relnamespace = to_regnamespace($1)
  UNION ALL SELECT relname || '.' || attname, attacl FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE c.relnamespace = to_regnamespace($1) AND NOT attisdropped
  UNION ALL SELECT proname, proacl FROM pg_proc WHERE pronamespace = to_regnamespace($1))
SELECT format('%s: %s on %s', substr(r.rolname, length($2) + 2), a.privilege_type, acls.on)
FROM acls CROSS JOIN LATERAL aclexplode(acl) a JOIN pg_roles r ON r.oid = a.grantee WHERE starts_with(r.rolname, $2 || '_') ORDER BY 1`, schema, prefix)
}

func bringRoles(t *testing.T, conn *pgx.Conn, opts migrations.Options, prefix string) []string {
	t.Helper()
	sql, err := migrations.Roles(opts, prefix)
	require.NoError(t, err)
	pgtest.Exec(t, conn, "BEGIN;"+sql+"COMMIT")
	schema, err := opts.Resolve()
	require.NoError(t, err)
	return rights(t, conn, schema, prefix)
}

// Property: a second run changes nothing, one after a migration restores lost rights, and rights
// that a role has beyond its own are revoked. Row S7 of guarantees.md.
func TestRolesMayBeRepeated(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn, prefix := pgtest.Connect(t, address), pgtest.RolePrefix(t, address)
	first := bringRoles(t, conn, migrations.Options{}, prefix)
	require.Greater(t, len(first), 80)
	for _, change := range []string{
		"SELECT",
		"DROP TABLE effectonce.fences; CREATE TABLE effectonce.fences (scope text, resource text, version bigint, content uuid)",
		fmt.Sprintf("GRANT DELETE ON effectonce.processed_messages TO %s_consumer; GRANT SELECT (payload) ON effectonce.outbox TO %[1]s_publisher", prefix),
		fmt.Sprintf("GRANT SELECT ON effectonce.processed_messages_past TO %s_relay; GRANT CREATE ON SCHEMA effectonce TO %[1]s_relay", prefix),
		fmt.Sprintf("GRANT UPDATE ON SEQUENCE effectonce.outbox_slot TO %s_publisher", prefix),
	} {
		pgtest.Exec(t, conn, change)
		require.Equal(t, first, bringRoles(t, conn, migrations.Options{}, prefix), change)
	}
}

// Property: an owner that is no superuser can create the roles, in any schema, also in one with the
// name of a role, and if functions are not executable by PUBLIC; and the roles have the same rights
// in each. Row S7 of guarantees.md.
func TestRolesNeedNoSuperuser(t *testing.T) {
	t.Parallel()
	var all [][]string
	for _, schema := range []string{"effectonce_relay", "user"} {
		address := pgtest.EmptyDatabase(t)
		conn, prefix := pgtest.Connect(t, address), pgtest.RolePrefix(t, address)
		owner := prefix + "_owner"
		pgtest.Exec(t, conn, fmt.Sprintf("CREATE ROLE %s CREATEROLE; GRANT CREATE ON DATABASE %s TO %[1]s; ALTER DEFAULT PRIVILEGES FOR ROLE %[1]s REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC",
			owner, pgx.Identifier{conn.Config().Database}.Sanitize()))
		pgtest.Exec(t, conn, "SET SESSION AUTHORIZATION "+owner)
		opts := migrations.Options{Schema: schema}
		require.NoError(t, migrations.Up(t.Context(), conn, opts))
		given := bringRoles(t, conn, opts, prefix)
		require.Equal(t, given, bringRoles(t, conn, opts, prefix))
		pgtest.Exec(t, conn, "RESET SESSION AUTHORIZATION")
		all = append(all, slices.DeleteFunc(given, func(line string) bool { return strings.HasPrefix(line, "owner: ") }))
	}
	require.Greater(t, len(all[0]), 80)
	assert.Equal(t, all[0], all[1])
}

// A prefix that is not a valid name is refused, with its bounds; an empty one is the schema's name.
func TestRolePrefixIsBounded(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"A", "a-b", "1a", "pg_a", `a"; DROP TABLE x; --`, strings.Repeat("a", 50), " "} {
		_, err := migrations.Roles(migrations.Options{}, prefix)
		require.ErrorContains(t, err, "want at most 49 lower-case letters, digits and underscores", prefix)
	}
	_, err := migrations.Roles(migrations.Options{Schema: "A"}, "a")
	require.ErrorContains(t, err, "schema")
	longest := strings.Repeat("a", 49)
	sql, err := migrations.Roles(migrations.Options{Schema: longest}, "")
	require.NoError(t, err)
	assert.Contains(t, sql, "'"+longest+"_publisher'")
	assert.NotContains(t, sql, "effectonce")
}

// Property: functions that run with the owner's rights are for no other role, and none is a trigger: with
// the types of another table's columns its owner would choose which functions run. Row S18 of guarantees.md.
func TestFunctionsOfTheOwner(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	pgtest.Exec(t, conn, "GRANT USAGE ON SCHEMA effectonce TO "+newRole(t, conn))
	wrong := pgtest.Column[bool](t, conn, `SELECT p.prorettype = 'trigger'::regtype OR has_function_privilege($1, p.oid, 'EXECUTE') FROM pg_proc p
		WHERE p.pronamespace = 'effectonce'::regnamespace AND p.prosecdef`, conn.Config().Database)
	require.Equal(t, []bool{false, false}, wrong)
}
