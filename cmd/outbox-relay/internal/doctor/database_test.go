package doctor_test

import (
	"context"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// What would cost exactly-once after a crash is a failure, what costs only the last moment a
// warning.
func TestDurabilityIsChecked(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	exec(t, conn, "SET synchronous_commit = off")
	findings := doctor.Durability(t.Context(), conn)
	last := findings[len(findings)-1]
	says(t, last, doctor.Warn, "synchronous_commit is off")

	// The server that tests share does not sync, unless it is an external one.
	var fsync string
	require.NoError(t, conn.QueryRow(t.Context(), "SHOW fsync").Scan(&fsync))
	assert.Equal(t, fsync == "on", doctor.Well(findings))
	if fsync == "off" {
		assert.Contains(t, findings[0].Message, "fsync is off")
	}
}

// A database that refuses writes is found before the relay is started on it (row O25).
func TestReadOnlyDatabaseIsFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "SET default_transaction_read_only = on")
	findings := doctor.Server(t.Context(), conn)
	require.Len(t, findings, 2)
	assert.Equal(t, doctor.OK, findings[0].Severity)
	says(t, findings[1], doctor.Fail, "default_transaction_read_only")
}

// The version of the tables is compared with that of the program, both ways.
func TestSchemaVersionIsChecked(t *testing.T) {
	t.Parallel()
	none := connect(t, pgtest.EmptyDatabase(t))
	assert.Contains(t, only(t, doctor.Schema(t.Context(), none, "effectonce")).Remedy, "migrate up")
	newer := connect(t, pgtest.Database(t))
	exec(t, newer, "UPDATE effectonce.schema_version SET version = version + 1")
	says(t, only(t, doctor.Schema(t.Context(), newer, "effectonce")), doctor.Warn, "and works with it", "update this program when you can")
	exec(t, newer, "UPDATE effectonce.schema_compatibility SET oldest = 1000")
	says(t, only(t, doctor.Schema(t.Context(), newer, "effectonce")), doctor.Fail, "", "update this program")
}

// A sequence cache would break the order of a key without any error; the remedy fixes it.
func TestSequenceCacheIsFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "ALTER SEQUENCE effectonce.outbox_seq_seq CACHE 10")
	f := only(t, doctor.Sequence(t.Context(), conn, "effectonce"))
	require.Equal(t, doctor.Fail, f.Severity)
	exec(t, conn, f.Remedy)
	require.Equal(t, doctor.OK, only(t, doctor.Sequence(t.Context(), conn, "effectonce")).Severity)
}

// The remedy of a check that runs out of time is more time.
func TestLateChecks(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	over, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	noAnswer := func(context.Context) (*pgx.Conn, error) { return nil, errors.New("no answer") }
	for _, late := range [][]doctor.Finding{
		doctor.Durability(over, conn), doctor.Pipeline(over, conn, "effectonce", 0), doctor.Pooler(over, noAnswer), doctor.Brokers(over, kadm.NewClient(kafkatest.Client(t)), "seed"),
	} {
		says(t, only(t, late), doctor.Fail, "", "raise --timeout")
	}
}

// A check that cannot look is a failure, not silence.
func TestCheckThatCannotLookFails(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	says(t, only(t, doctor.Sequence(t.Context(), conn, "effectonce")), doctor.Fail, "the check itself failed")
}

// Property: a consumer that is slow, or gone, is not well in status and doctor, with how late it
// is, whether a process holds its partitions and what to do; one at its end, one that an operator
// paused and one whose cause is stored are not said to be late.
func TestConsumersThatAreLateAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, registerSQL, "billing/orders", "billing", []string{"orders"}, "7 days")
	exec(t, conn, "UPDATE effectonce.consumers SET id_rule = 'standard'")
	exec(t, conn, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, owner, released, record_time, caught_up_at, updated_at) VALUES
		('billing', 'orders', 0, 7, 'host-1', false, clock_timestamp() - interval '10 minutes', NULL, clock_timestamp()),
		('billing', 'orders', 1, 7, 'host-1', true, clock_timestamp() - interval '2 days', clock_timestamp() - interval '20 hours', clock_timestamp()),
		('billing', 'orders', 2, 7, 'host-1', false, clock_timestamp() - interval '2 days', clock_timestamp(), clock_timestamp())`)
	status := func() *pipeline.Status {
		return readStatus(t, conn, pipeline.StatusOptions{LagAgeMax: 5 * time.Minute})
	}
	s := status()
	assert.Equal(t, []string{`consumer "billing/orders": 2 partitions behind, the oldest, orders/1, for 20h; 1 of them not held by any process: ` +
		`start a consumer of group billing, or find out why it does not get its partitions: "outbox-relay positions --group billing"`}, s.Problems)
	f := only(t, doctor.Pipeline(t.Context(), conn, "effectonce", 5*time.Minute))
	assert.Equal(t, []any{doctor.Fail, s.Problems[0]}, []any{f.Severity, f.Message})
	harmless(t, f)

	exec(t, conn, "DELETE FROM effectonce.consumer_positions WHERE partition = 0")
	assert.Contains(t, status().Problems[0], "1 partition behind, the oldest, orders/1, for 20h, held by no process: start a consumer")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET released = false")
	assert.Contains(t, status().Problems[0], "for 20h, held by host-1: the consumer is slow, hangs or died, or a transaction")
	assert.True(t, readStatus(t, conn, pipeline.StatusOptions{LagAgeMax: 30 * time.Hour}).Well)
	assert.True(t, readStatus(t, conn, pipeline.StatusOptions{}).Well)

	exec(t, conn, "INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why) VALUES ('billing', 'orders', 'ana', 'INC-12')")
	assert.Empty(t, status().Problems, "an operator paused it")
	exec(t, conn, "DELETE FROM effectonce.consumer_pauses")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET trouble = 'offset out of range' WHERE partition = 1")
	require.Len(t, status().Problems, 1)
	assert.Contains(t, status().Problems[0], "orders/1 halted for")
}

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
			says(t, worst, tc.severity, tc.want)
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
	for _, part := range []string{"relay", "operator"} {
		rows, err := conn.Query(t.Context(), `
WITH acls AS (
  SELECT nspname AS name, nspacl AS acl FROM pg_namespace WHERE nspname = 'effectonce'
  UNION ALL SELECT relname, relacl FROM pg_class WHERE relnamespace = 'effectonce'::regnamespace
  UNION ALL SELECT proname, proacl FROM pg_proc WHERE pronamespace = 'effectonce'::regnamespace
  UNION ALL SELECT relname || '.' || attname, attacl FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE c.relnamespace = 'effectonce'::regnamespace)
SELECT a.privilege_type || ' ' || name FROM acls CROSS JOIN LATERAL aclexplode(acl) a WHERE a.grantee = $1::text::regrole`, prefix+"_"+part)
		require.NoError(t, err)
		given, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		assert.ElementsMatch(t, doctor.RoleRights("effectonce", part), given, part)
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
