package doctor_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

var update = flag.Bool("update", false, "write definitions.txt anew")

// Property: the migrations of this release make exactly what Definitions compares with, on each
// version of PostgreSQL, in a schema of any name. With -update it writes what they make.
func TestDefinitions(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"effectonce", "select", "_x9"} {
		conn, opts := connect(t, pgtest.EmptyDatabase(t)), migrations.Options{Schema: schema}
		require.NoError(t, migrations.Up(t.Context(), conn, opts))
		exec(t, conn, "SET search_path = pg_catalog, pg_temp")
		if *update && schema == migrations.DefaultSchema {
			stored, err := doctor.StoredDefinitions(t.Context(), conn, schema)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile("definitions.txt", []byte(stored), 0o600))
			t.Log("written: run the test again")
			return
		}
		f := only(t, doctor.Definitions(t.Context(), conn, schema))
		assert.Equal(t, doctor.OK, f.Severity, "%s: %s", schema, f.Message)
		assert.Regexp(t, `^[1-9]\d\d+ definitions match this release; role \w+ owns them$`, f.Message)
	}
}

// Property: whatever is changed, taken away or added in the schema is found, with its name; what
// cannot do anything is not. Rows S18, S19 of guarantees.md.
func TestChangedDefinitionsAreFound(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn, prefix := connect(t, address), pgtest.RolePrefix(t, address)
	exec(t, conn, "SET search_path = pg_catalog, pg_temp")
	exec(t, conn, "CREATE ROLE "+prefix+"_mallory")
	const trigger = "CREATE FUNCTION public.spy() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER spy AFTER INSERT ON effectonce."
	for _, tc := range []struct {
		sql      string
		severity doctor.Severity
		want     string
	}{
		{"CREATE OR REPLACE FUNCTION effectonce.uuid_v7() RETURNS uuid LANGUAGE sql AS 'SELECT pg_catalog.gen_random_uuid()'", doctor.Fail, "body uuid_v7()"},
		{"ALTER FUNCTION effectonce.refuse_commit() RESET search_path", doctor.Fail, "function refuse_commit()"},
		{"ALTER FUNCTION effectonce.message_id(text, text) SECURITY DEFINER", doctor.Fail, "function message_id(scope text, id text)"},
		{"ALTER FUNCTION effectonce.uuid_v7() OWNER TO " + prefix + "_mallory", doctor.Fail, "function uuid_v7 (" + prefix + "_mallory)"},
		{"ALTER TABLE effectonce.consumer_positions OWNER TO " + prefix + "_mallory", doctor.Fail, "relation consumer_positions ("},
		{trigger + "processed_messages FOR EACH ROW EXECUTE FUNCTION public.spy()", doctor.Warn, "trigger spy on processed_messages"},
		{trigger + "schema_version FOR EACH ROW EXECUTE FUNCTION public.spy()", doctor.Warn, "trigger spy on schema_version"},
		{"ALTER TABLE effectonce.parked_messages DISABLE TRIGGER parked_promote", doctor.Fail, "trigger parked_promote on parked_messages"},
		{"ALTER TABLE effectonce.operator_actions ENABLE REPLICA TRIGGER operator_actions_stay", doctor.Fail, "trigger operator_actions_stay on operator_actions"},
		{"DROP TRIGGER operator_action_written ON effectonce.operator_actions", doctor.Fail, "trigger operator_action_written on operator_actions is missing"},
		{"CREATE RULE swallow AS ON INSERT TO effectonce.outbox DO INSTEAD NOTHING", doctor.Warn, "rule swallow on outbox"},
		{"ALTER TABLE effectonce.outbox_scheduled DISABLE ROW LEVEL SECURITY", doctor.Fail, "relation outbox_scheduled"},
		{"CREATE POLICY all_of_them ON effectonce.outbox_scheduled USING (true)", doctor.Warn, "policy all_of_them on outbox_scheduled"},
		{"CREATE POLICY shop ON effectonce.outbox_scheduled AS RESTRICTIVE FOR INSERT WITH CHECK (topic LIKE 'a%')", doctor.OK, "definitions match"},
		{"ALTER TABLE effectonce.outbox ENABLE ROW LEVEL SECURITY; CREATE POLICY shop ON effectonce.outbox FOR INSERT WITH CHECK (topic = 'a' OR topic LIKE 'b%')", doctor.OK, "definitions match"},
		{"CREATE POLICY spy ON effectonce.outbox FOR INSERT WITH CHECK (pg_catalog.length(topic) > 1)", doctor.Warn, "policy spy on outbox"},
		{"ALTER POLICY outbox_scheduled_own ON effectonce.outbox_scheduled USING (true)", doctor.Fail, "policy outbox_scheduled_own on outbox_scheduled"},
		{"ALTER TABLE effectonce.processed_forever DROP CONSTRAINT processed_forever_pkey", doctor.Fail, "constraint processed_forever.processed_forever_pkey is missing"},
		{"ALTER TABLE effectonce.idempotency_keys ALTER COLUMN created_at SET DEFAULT '2000-01-01'", doctor.Fail, "column idempotency_keys.created_at"},
		{"CREATE OR REPLACE VIEW effectonce.outbox_backlog AS SELECT * FROM (SELECT * FROM effectonce.outbox_backlog LIMIT 0) x", doctor.Fail, "view outbox_backlog"},
		{"CREATE UNIQUE INDEX one ON effectonce.outbox_0 (topic)", doctor.Warn, "index one"},
		{"CREATE INDEX mine ON effectonce.outbox_0 (topic)", doctor.OK, "definitions match"},
		{"DROP INDEX effectonce.parked_messages_due", doctor.Fail, "index parked_messages_due is missing"},
		{"CREATE FUNCTION effectonce.format(text, uuid) RETURNS text LANGUAGE sql AS 'SELECT 1'", doctor.Warn, "function format(text, uuid)"},
		{"CREATE TABLE effectonce.mine (id int)", doctor.Warn, "relation mine"},
		{"ALTER TABLE effectonce.outbox ADD COLUMN mine int", doctor.Warn, "column outbox.mine"},
		{"ALTER DOMAIN effectonce.key_name DROP CONSTRAINT is_empty", doctor.Fail, "type key_name"},
		{"ALTER TABLE effectonce.outbox VALIDATE CONSTRAINT outbox_row_is_out_of_bounds", doctor.OK, "definitions match"},
		{"GRANT SELECT ON effectonce.outbox TO " + prefix + "_mallory", doctor.OK, "definitions match"},
	} {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), tc.sql, pgx.QueryExecModeSimpleProtocol)
		if assert.NoError(t, err, tc.sql) {
			found := doctor.Definitions(t.Context(), tx, "effectonce")
			worst := found[0]
			assert.Equal(t, tc.severity, worst.Severity, "%s: %s", tc.sql, worst.Message)
			assert.Contains(t, worst.Message, tc.want, tc.sql)
		}
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// Property: a schema that was dumped and restored is that of the release: all expressions are read
// from what PostgreSQL prints.
func TestRestoredDefinitionsAreTheSame(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "SET search_path = pg_catalog, pg_temp")
	rows, err := conn.Query(t.Context(), `
SELECT format('ALTER TABLE %1$s DROP CONSTRAINT %2$I; ALTER TABLE %1$s ADD CONSTRAINT %2$I %3$s', c.conrelid::regclass, c.conname, pg_get_constraintdef(c.oid))
FROM pg_constraint c WHERE c.connamespace = 'effectonce'::regnamespace AND c.contype = 'c' AND c.conrelid <> 0 AND c.conislocal AND c.coninhcount = 0
UNION ALL SELECT format('CREATE OR REPLACE VIEW effectonce.%I AS %s', c.relname, pg_get_viewdef(c.oid)) FROM pg_class c WHERE c.relnamespace = 'effectonce'::regnamespace AND c.relkind = 'v'
UNION ALL SELECT format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT %s', a.attrelid::regclass, a.attname, pg_get_expr(d.adbin, d.adrelid))
  FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum JOIN pg_class c ON c.oid = d.adrelid
  WHERE c.relnamespace = 'effectonce'::regnamespace AND a.attgenerated = ''
UNION ALL SELECT format('ALTER POLICY %I ON %s USING (%s)', p.polname, p.polrelid::regclass, pg_get_expr(p.polqual, p.polrelid)) FROM pg_policy p
UNION ALL SELECT format('ALTER DOMAIN %1$s DROP CONSTRAINT %2$I; ALTER DOMAIN %1$s ADD CONSTRAINT %2$I %3$s', c.contypid::regtype, c.conname, pg_get_constraintdef(c.oid))
  FROM pg_constraint c WHERE c.connamespace = 'effectonce'::regnamespace AND c.contype = 'c' AND c.contypid <> 0`)
	require.NoError(t, err)
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Greater(t, len(statements), 100)
	exec(t, conn, strings.Join(statements, "; "))
	f := only(t, doctor.Definitions(t.Context(), conn, "effectonce"))
	assert.Equal(t, doctor.OK, f.Severity, f.Message)
}
