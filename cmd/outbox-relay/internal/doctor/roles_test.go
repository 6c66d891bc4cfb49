package doctor_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Property: the doctor asks for exactly the rights that the group roles of a relay and of an
// operator have, and distinguishes the two; a consumer's role is not enough for a relay. Row S7 of
// guarantees.md.
func TestRolesHaveWhatTheDoctorAsksFor(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn, prefix := connect(t, address), pgtest.RolePrefix(t, address)
	sql, err := migrations.Roles(migrations.Options{}, prefix)
	require.NoError(t, err)
	exec(t, conn, sql)
	relay, operator := doctor.RoleRights("effectonce")
	for part, asked := range map[string][]string{"relay": relay, "operator": operator} {
		rows, err := conn.Query(t.Context(), `
WITH acls AS (
  SELECT nspname AS name, nspacl AS acl FROM pg_namespace WHERE nspname = 'effectonce'
  UNION ALL SELECT relname, relacl FROM pg_class WHERE relnamespace = 'effectonce'::regnamespace
  UNION ALL SELECT proname || '()', proacl FROM pg_proc WHERE pronamespace = 'effectonce'::regnamespace AND prosecdef
  UNION ALL SELECT relname || '.' || attname, attacl FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE c.relnamespace = 'effectonce'::regnamespace)
SELECT a.privilege_type || ' ' || name FROM acls CROSS JOIN LATERAL aclexplode(acl) a WHERE a.grantee = $1::text::regrole`, prefix+"_"+part)
		require.NoError(t, err)
		given, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		assert.ElementsMatch(t, asked, given, part)
	}
	for part, want := range map[string]string{
		"relay": "the role may relay; an operator's role also needs", "operator": "the role is an operator's",
		"consumer": "the role lacks rights that the relay needs", "publisher": "the role lacks rights that the relay needs",
	} {
		exec(t, conn, "SET ROLE "+prefix+"_"+part)
		assert.Contains(t, only(t, doctor.Rights(t.Context(), conn, "effectonce")).Message, want, part)
		exec(t, conn, "RESET ROLE")
	}
}
