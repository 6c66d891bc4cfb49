package migrations_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// rights lists what roles of a prefix may do, on relations, columns, functions and the schema.
func rights(t *testing.T, conn *pgx.Conn, schema, prefix string) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
WITH acls AS (
  SELECT 'the schema' AS on, nspacl AS acl FROM pg_namespace WHERE nspname = $1
  UNION ALL SELECT relname, relacl FROM pg_class WHERE relnamespace = to_regnamespace($1)
  UNION ALL SELECT relname || '.' || attname, attacl FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE c.relnamespace = to_regnamespace($1) AND NOT attisdropped
  UNION ALL SELECT proname, proacl FROM pg_proc WHERE pronamespace = to_regnamespace($1))
SELECT format('%s: %s on %s', substr(r.rolname, length($2) + 2), a.privilege_type, acls.on)
FROM acls CROSS JOIN LATERAL aclexplode(acl) a JOIN pg_roles r ON r.oid = a.grantee WHERE starts_with(r.rolname, $2 || '_') ORDER BY 1`, schema, prefix)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
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

// Property: functions that run with the owner's rights cannot be used as triggers of another table,
// whose types would choose which functions run. Row S18 of guarantees.md.
func TestFunctionsOfTheOwnerAreForNoOtherTable(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	role := fmt.Sprintf("effectonce_stranger_%d", conn.PgConn().PID())
	pgtest.Exec(t, conn, "CREATE ROLE "+role+"; GRANT USAGE ON SCHEMA effectonce TO "+role)
	defer pgtest.Exec(t, conn, "RESET SESSION AUTHORIZATION; DROP OWNED BY "+role+"; DROP ROLE "+role)
	rows, err := conn.Query(t.Context(), `SELECT p.oid::regprocedure::text, p.prorettype = 'trigger'::regtype FROM pg_proc p
		WHERE p.pronamespace = 'effectonce'::regnamespace AND p.prosecdef ORDER BY 1`)
	require.NoError(t, err)
	type function struct {
		name    string
		trigger bool
	}
	functions, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f function, err error) { return f, row.Scan(&f.name, &f.trigger) })
	require.NoError(t, err)
	require.Len(t, functions, 3)
	triggers := 0
	for _, f := range functions {
		var allowed bool
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT has_function_privilege($1, $2, 'EXECUTE')", role, f.name).Scan(&allowed))
		require.False(t, allowed, f.name)
		if !f.trigger {
			continue
		}
		triggers++
		// A role that was granted the right cannot either: the function checks which table's
		// trigger it is.
		_, err := conn.Exec(t.Context(), `CREATE TEMP TABLE own (relay text, topic text, key bytea, shard smallint, advance bigint);
			CREATE TRIGGER own AFTER DELETE ON own REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION `+f.name+`;
			CREATE TRIGGER own_row BEFORE INSERT ON own FOR EACH ROW EXECUTE FUNCTION `+f.name)
		require.NoError(t, err)
		_, err = conn.Exec(t.Context(), "DELETE FROM own; INSERT INTO own DEFAULT VALUES")
		require.ErrorContains(t, err, "alone", f.name)
		pgtest.Exec(t, conn, "DROP TABLE own")
	}
	require.Equal(t, 1, triggers)
}
