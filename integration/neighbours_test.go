package integration_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// neighbours are the roles that share a database, each with a login of its own. A stranger is a
// login without any right.
var neighbours = []string{"publisher", "relay", "consumer", "endpoint", "operator", "stranger"}

// newNeighbours is a schema with rows and the roles.
func newNeighbours(t *testing.T) parts {
	t.Helper()
	p := newParts(t)
	_, err := p.owner.Exec(t.Context(), "CREATE ROLE "+p.prefix+"_stranger;"+secretRows)
	require.NoError(t, err)
	return p
}

// secretRows have the word secret where a neighbour could read it.
const secretRows = `
INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', 'k', 'secret' FROM generate_series(1, 3);
INSERT INTO effectonce.outbox_scheduled (due_at, topic, payload) VALUES (now() + interval '1 day', 'orders', 'secret');
INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('victim', 'victim', '{orders}');
INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint) SELECT effectonce.uuid_v7(), id, 0 FROM effectonce.consumers;
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset) VALUES ('victim', 'orders', 0, 7);
INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, payload, reason, error, state)
  SELECT id, gen_random_uuid(), 'orders', 0, 3, 'k', 'secret', 'failed', 'x', 'parked' FROM effectonce.consumers;
INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
  VALUES ('default', 1, gen_random_uuid(), 'orders', 'k', 'secret', '{}', now(), 'refused', 'x', 'held');
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, status, body, finished_at, expires_at)
  VALUES ('tenant', 'charge', 'k', sha256('x'), 'finished', 200, 'secret', now(), now() + interval '1 day');
INSERT INTO effectonce.operator_actions (who, what, why) VALUES ('alice', 'parked.retry', 'secret');
INSERT INTO effectonce.fences (scope, resource, version) VALUES ('s', 'r', 1);`

// try runs statements in a transaction that is rolled back, and returns the SQLSTATE of what
// failed.
func try(t *testing.T, pool *pgxpool.Pool, sql string) string {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
	// What waits for a lock got past the check of rights.
	_, err = tx.Exec(t.Context(), "SET LOCAL lock_timeout = '20s'; SET LOCAL statement_timeout = '1min'; "+sql)
	if err == nil {
		return "allowed"
	}
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr, sql)
	return pgErr.Code
}

// Property: what each role may do with each table is what is written here. A right that a role gets has to be added here, and to docs/security.md. Rows
// S7, S18 of guarantees.md.
func TestNeighboursRightsOnTables(t *testing.T) {
	t.Parallel()
	// By table: roles that may do something to all of its columns, or to some (in small letters).
	// S SELECT, I INSERT, U UPDATE, D DELETE, T TRUNCATE.
	want := map[string]string{
		"consumer_pauses":      "relay S, consumer S, operator SIUD",
		"consumer_positions":   "relay S, consumer SIU, operator Su",
		"consumers":            "relay S, consumer SIU, operator Su",
		"fences":               "consumer SIU, operator S",
		"idempotency_keys":     "relay s, endpoint SIUD, operator SuD",
		"maintenance":          "relay S, consumer S, operator S",
		"operator_actions":     "consumer i, operator Si",
		"outbox":               "publisher i, relay SIU, consumer i, endpoint i, operator Si",
		"outbox_0":             "relay ST, operator S",
		"outbox_1":             "relay ST, operator S",
		"outbox_2":             "relay ST, operator S",
		"outbox_3":             "relay ST, operator S",
		"outbox_advances":      "relay SID, operator SID",
		"outbox_backlog":       "publisher S, relay S, consumer S, endpoint S, operator S",
		"outbox_dead":          "relay SIUD, operator Su",
		"outbox_locks":         "relay SU, operator S",
		"outbox_paused":        "relay S, operator SIUD",
		"outbox_progress":      "relay SIU, operator SIuD",
		"outbox_progress_now":  "relay S, operator S",
		"outbox_relays":        "relay SIU, operator SuD",
		"outbox_replicas":      "relay SIUD, operator SD",
		"outbox_scheduled":     "publisher siD, relay SUD, consumer siD, endpoint siD, operator S",
		"outbox_slots":         "relay SU, operator S",
		"outbox_ticks":         "relay SID, operator S",
		"parked_messages":      "relay s, consumer SIUD, operator SUD",
		"pending_requests":     "endpoint SIUD, operator S",
		"processed_forever":    "consumer SI, operator S",
		"processed_messages":   "consumer SI, operator S",
		"schema_compatibility": "publisher S, relay S, consumer S, endpoint S, operator S",
		"schema_version":       "publisher S, relay S, consumer S, endpoint S, operator S",
		"partitions of claims": "",
	}
	p := newNeighbours(t)
	rows, err := p.owner.Query(t.Context(), `
SELECT CASE WHEN c.relname LIKE 'processed\_messages\_%' THEN 'partitions of claims' ELSE c.relname END AS relation, string_agg(DISTINCT r.part || ' ' || a.rights, ', ' ORDER BY r.part || ' ' || a.rights)
FROM pg_class c CROSS JOIN unnest($2::text[]) AS r (part)
CROSS JOIN LATERAL (SELECT string_agg(CASE
    WHEN has_table_privilege($1 || '_' || r.part, c.oid, p.name) THEN left(p.name, 1)
    WHEN p.name IN ('SELECT', 'INSERT', 'UPDATE') AND has_any_column_privilege($1 || '_' || r.part, c.oid, p.name) THEN lower(left(p.name, 1))
    WHEN p.name IN ('REFERENCES', 'TRIGGER') AND has_table_privilege($1 || '_' || r.part, c.oid, p.name) THEN '!' END, '' ORDER BY p.place) AS rights
  FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) WITH ORDINALITY AS p (name, place)) a
WHERE c.relnamespace = 'effectonce'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')
GROUP BY 1`, p.prefix, neighbours)
	require.NoError(t, err)
	got := map[string]string{}
	var relation string
	var rights *string
	_, err = pgx.ForEachRow(rows, []any{&relation, &rights}, func() error {
		got[relation] = ""
		if rights != nil {
			parts := strings.Split(*rights, ", ")
			slices.SortFunc(parts, func(a, b string) int {
				return slices.Index(neighbours, strings.Fields(a)[0]) - slices.Index(neighbours, strings.Fields(b)[0])
			})
			got[relation] = strings.Join(parts, ", ")
		}
		return nil
	})
	require.NoError(t, err)
	assert.Equal(t, want, got)
}

// Property: nothing of the list works for the roles that it names. What needs a right on a whole
// table is in TestNeighboursRightsOnTables. Rows S7, S8, S18 of
// guarantees.md.
func TestNeighboursForbiddenStatements(t *testing.T) {
	t.Parallel()
	type attempt struct{ roles, sql, code string }
	const (
		all     = "publisher relay consumer endpoint operator stranger"
		writers = "publisher consumer endpoint"
		denied  = "42501"
		refused = "23514"
	)
	attempts := []attempt{
		// The schema and its functions.
		{all, "CREATE TABLE effectonce.mine ()", denied},
		{all, "CREATE FUNCTION effectonce.mine() RETURNS int LANGUAGE sql RETURN 1", denied},
		{all, "ALTER TABLE effectonce.outbox DISABLE TRIGGER ALL", denied},
		{all, "ALTER TABLE effectonce.operator_actions DISABLE TRIGGER ALL", denied},
		{all, "CREATE TRIGGER mine BEFORE INSERT ON effectonce.outbox FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()", denied},
		{all, "CREATE RULE mine AS ON INSERT TO effectonce.schema_version DO INSTEAD NOTHING", denied},
		{all, "CREATE POLICY mine ON effectonce.outbox_scheduled USING (true)", denied},
		{all, "ALTER TABLE effectonce.outbox_scheduled DISABLE ROW LEVEL SECURITY", denied},
		{all, "DROP SCHEMA effectonce CASCADE", denied},
		{all, "ALTER SCHEMA effectonce RENAME TO mine", denied},
		{all, "CREATE OR REPLACE FUNCTION effectonce.uuid_v7() RETURNS uuid LANGUAGE sql RETURN NULL::uuid", denied},
		{all, "ALTER FUNCTION effectonce.refuse_commit() RESET ALL", denied},
		{all, "SET ROLE effectonce_operator_none", "22023"},
		// Sequences.
		{all, "SELECT setval('effectonce.outbox_seq_seq', 1)", denied},
		{all, "SELECT nextval('effectonce.outbox_seq_seq')", denied},
		{"publisher consumer endpoint operator stranger", "SELECT setval('effectonce.outbox_slot', 1)", denied},
		{"publisher consumer endpoint operator stranger", "SELECT nextval('effectonce.outbox_slot')", denied},
		{"publisher relay consumer endpoint stranger", "SELECT effectonce.repair_outbox_sequences()", denied},
		{all, "SELECT effectonce.renumber_outbox(0, 0, NULL)", denied},
		// Outbox: another's rows, the columns that order them, the slots behind the table.
		{writers, "INSERT INTO effectonce.outbox (topic, txid) VALUES ('t', '1')", denied},
		{writers, "INSERT INTO effectonce.outbox (topic, seq) OVERRIDING SYSTEM VALUE VALUES ('t', 1)", denied},
		{writers, "INSERT INTO effectonce.outbox (topic, slot) VALUES ('t', 1)", denied},
		{writers, "INSERT INTO effectonce.outbox (topic) VALUES ('t') RETURNING seq", denied},
		{writers, "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', 'infinity')", refused},
		{writers, "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', '-infinity')", refused},
		{writers, "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', '294000-01-01')", refused},
		{writers, "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', '4000-01-01 BC')", refused},
		{writers, "INSERT INTO effectonce.outbox (topic, payload) VALUES ('t', convert_to(repeat('x', 100000001), 'UTF8'))", refused},
		{writers, "INSERT INTO effectonce.outbox (topic, key) VALUES ('t', convert_to(repeat('x', 1048577), 'UTF8'))", refused},
		{writers, `INSERT INTO effectonce.outbox (topic, headers) VALUES ('t', jsonb_build_object('h', repeat('x', 4194305)))`, refused},
		{writers, "INSERT INTO effectonce.outbox_scheduled (topic, due_at) VALUES ('t', 'infinity')", refused},
		{writers, "INSERT INTO effectonce.outbox_scheduled (topic, due_at) VALUES ('t', '-infinity')", refused},
		{writers, "INSERT INTO effectonce.outbox_scheduled (topic, due_at, payload) VALUES ('t', now(), convert_to(repeat('x', 100000001), 'UTF8'))", refused},
		{writers, "INSERT INTO effectonce.outbox_scheduled (topic, due_at, publisher) VALUES ('t', now(), 'relay')", denied},
		{writers, "SELECT payload FROM effectonce.outbox_scheduled", denied},
		// Relays: what consumers and endpoints keep.
		{"relay", "SELECT payload FROM effectonce.parked_messages", denied},
		{"relay", "SELECT error FROM effectonce.parked_messages", denied},
		{"relay", "SELECT body FROM effectonce.idempotency_keys", denied},
		{"relay", "SELECT key FROM effectonce.idempotency_keys", denied},
		{"relay", "SELECT state FROM effectonce.idempotency_keys FOR UPDATE", denied},
		// Consumers: claims are forever, the log is the database's.
		{"consumer", "INSERT INTO effectonce.operator_actions (who, what, why, db_role) VALUES ('x', 'x', 'x', 'postgres')", denied},
		{"consumer", `INSERT INTO effectonce.operator_actions (who, what, why, "when") VALUES ('x', 'x', 'x', '2000-01-01')`, denied},
		{"consumer", "CREATE TABLE effectonce.processed_messages_20990101 PARTITION OF effectonce.processed_messages FOR VALUES FROM ('00000000-0000-0000-0000-000000000000') TO ('00000000-0000-0000-0000-000000000001')", denied},
		// Operators: what waits for a person, and no history.
		{"operator", "INSERT INTO effectonce.outbox (topic, txid) VALUES ('t', '1')", denied}, // replay inserts the other columns
		{"operator", "UPDATE effectonce.idempotency_keys SET key = 'y'", denied},
		{"operator", "UPDATE effectonce.idempotency_keys SET fingerprint = sha256('y')", denied},
		{"operator", "UPDATE effectonce.idempotency_keys SET request = 'y'", denied},
		{"operator", "UPDATE effectonce.idempotency_keys SET data = 'y'", denied},
		{"operator", "UPDATE effectonce.idempotency_keys SET phases = '{}'", denied},
		{"operator", "UPDATE effectonce.idempotency_keys SET locked_by = 'y'", denied},
		{"operator", "INSERT INTO effectonce.operator_actions (who, what, why, db_role) VALUES ('x', 'x', 'x', 'postgres')", denied},
		{"operator", `INSERT INTO effectonce.operator_actions (who, what, why, "when") VALUES ('x', 'x', 'x', '2000-01-01')`, denied},
		{"operator", "UPDATE effectonce.consumer_positions SET next_offset = 0", denied},
		{"operator", "UPDATE effectonce.consumers SET dedup_window = '1 second'", denied},
	}
	p := newNeighbours(t)
	pools := map[string]*pgxpool.Pool{}
	for _, part := range neighbours {
		pools[part] = p.as(t, part)
	}
	for _, a := range attempts {
		for _, part := range strings.Fields(a.roles) {
			assert.Equal(t, a.code, try(t, pools[part], a.sql), "%s: %.200s", part, a.sql)
		}
	}
}

// Property: publishers do not see, take back, replace or suppress one another's messages for later,
// whatever ID they give.
func TestNeighboursMessagesForLater(t *testing.T) {
	t.Parallel()
	p := newNeighbours(t)
	ctx := t.Context()
	_, err := p.owner.Exec(ctx, "CREATE ROLE "+p.prefix+"_thief; GRANT "+p.prefix+"_publisher TO "+p.prefix+"_thief")
	require.NoError(t, err)
	victim, thief := p.as(t, "publisher"), p.as(t, "thief")
	id, due := uuid.Must(uuid.NewV7()), time.Now().Add(time.Hour)
	schedule := func(pool *pgxpool.Pool, payload string) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			return outbox.Publish(ctx, tx, outbox.Message{ID: id, Topic: "orders", Payload: []byte(payload), DeliverAt: due})
		}))
	}
	schedule(thief, "forged") // the ID is known, and taken first
	schedule(victim, "true")
	require.Equal(t, 1, count(ctx, t, thief, `SELECT count(*) FROM effectonce.outbox_scheduled`), "a thief sees its own")
	var taken bool
	require.NoError(t, pgx.BeginFunc(ctx, thief, func(tx pgx.Tx) (err error) {
		taken, err = outbox.Cancel(ctx, tx, id)
		return err
	}))
	require.True(t, taken, "its own")
	require.NoError(t, pgx.BeginFunc(ctx, thief, func(tx pgx.Tx) (err error) {
		taken, err = outbox.Cancel(ctx, tx, id)
		return err
	}))
	require.False(t, taken)
	_, err = thief.Exec(ctx, `DELETE FROM effectonce.outbox_scheduled`)
	require.NoError(t, err)
	require.Equal(t, 1, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_scheduled WHERE payload = 'true'`))
	require.Equal(t, 1, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_scheduled WHERE payload = 'secret'`))
	require.NoError(t, pgx.BeginFunc(ctx, victim, func(tx pgx.Tx) (err error) {
		taken, err = outbox.Cancel(ctx, tx, id)
		return err
	}))
	require.True(t, taken)
}

// Property: a login without any right that takes every advisory lock that an effectonce program
// ever used keeps neither a migration, nor a repair, nor the promotion of messages for later.
func TestNeighboursAdvisoryLocks(t *testing.T) {
	t.Parallel()
	p := newParts(t)
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	_, err := p.owner.Exec(ctx, "CREATE ROLE "+p.prefix+"_stranger")
	require.NoError(t, err)
	stranger, err := p.as(t, "stranger").Acquire(ctx)
	require.NoError(t, err)
	defer stranger.Release()
	var outboxID, scheduledID int64
	require.NoError(t, p.owner.QueryRow(ctx, `SELECT 'effectonce.outbox'::regclass::oid::bigint, 'effectonce.outbox_scheduled'::regclass::oid::bigint`).Scan(&outboxID, &scheduledID))
	_, err = stranger.Exec(ctx, `SELECT pg_advisory_lock(9628173550095224), pg_advisory_lock(hashtextextended('effectonce migrations', 0)),
		pg_advisory_lock(hashtextextended('effectonce ownschema', 0)), pg_advisory_lock(hashtextextended('outbox stamps', $1)), pg_advisory_lock(hashtextextended('outbox promote', $2))`,
		outboxID, scheduledID)
	require.NoError(t, err)

	conn, err := pgx.Connect(ctx, p.address)
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	limited, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	require.NoError(t, migrations.To(limited, conn, migrations.Options{}, len(all)-1))
	require.NoError(t, migrations.Up(limited, conn, migrations.Options{}))
	sql, err := migrations.Roles(migrations.Options{}, p.prefix)
	require.NoError(t, err)
	_, err = conn.Exec(limited, "BEGIN;"+sql+"COMMIT")
	require.NoError(t, err)

	stop := running(t, p.as(t, "relay"), kafkatest.Brokers(t), relay.Config{PollMax: 5 * time.Millisecond})
	require.NoError(t, pgx.BeginFunc(ctx, p.as(t, "publisher"), func(tx pgx.Tx) error {
		return outbox.Publish(ctx, tx, outbox.Message{Topic: topic, Payload: []byte("x"), DeliverAt: time.Now().Add(time.Second)})
	}))
	eventually(t, "the message for later is published", func() (bool, any) { got := kafkatest.Count(t, topic); return got == 1, got })
	stop()
	_, err = conn.Exec(limited, "SELECT setval('effectonce.outbox_seq_seq', 1); UPDATE effectonce.outbox_advances SET floor = 100")
	require.NoError(t, err)
	var repaired bool
	require.NoError(t, conn.QueryRow(limited, "SELECT repaired FROM effectonce.repair_outbox_sequences()").Scan(&repaired))
	require.True(t, repaired)
}

// Property: who did something, when, and as which role is written by the database.
func TestNeighboursAudit(t *testing.T) {
	t.Parallel()
	p := newNeighbours(t)
	ctx, operator := t.Context(), p.as(t, "operator")
	_, err := operator.Exec(ctx, `INSERT INTO effectonce.operator_actions (what, why) VALUES ('parked.retry', 'forged')`)
	require.NoError(t, err)
	// What it may give besides is nothing of that, and the owner's own statements are no dump
	// either.
	_, err = p.owner.Exec(ctx, `INSERT INTO effectonce.operator_actions (what, why, who, db_role, "when") VALUES ('parked.retry', 'late', 'ana', 'bob', '2000-01-01')`)
	require.NoError(t, err)
	require.Zero(t, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.operator_actions WHERE why = 'late' AND (who = 'ana' OR db_role = 'bob' OR "when" < now() - interval '1 hour' OR stated <> 'ana')`))
	var who, role string
	var age time.Duration
	require.NoError(t, p.owner.QueryRow(ctx, `SELECT who, db_role, clock_timestamp() - "when" FROM effectonce.operator_actions WHERE why = 'forged'`).Scan(&who, &role, &age))
	login := p.prefix + "_login_operator"
	require.Equal(t, login, who)
	require.Equal(t, login, role)
	require.Less(t, age, time.Hour)
	for _, sql := range []string{
		`UPDATE effectonce.operator_actions SET why = 'x'`, `DELETE FROM effectonce.operator_actions`, `TRUNCATE effectonce.operator_actions`,
	} {
		_, err := p.owner.Exec(ctx, sql)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, "append-only, also for the owner")
	}
}
