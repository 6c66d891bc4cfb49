package integration_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// listed are databases with two publishing logins, shop and bank, members of a role of their own,
// which is a member of the publisher's.
func (p parts) listed(t *testing.T) (shop, bank *pgxpool.Pool) {
	t.Helper()
	_, err := p.owner.Exec(t.Context(), p.named("CREATE ROLE PREFIX_shop; CREATE ROLE PREFIX_bank; GRANT PREFIX_publisher TO PREFIX_shop, PREFIX_bank"))
	require.NoError(t, err)
	return p.as(t, "shop"), p.as(t, "bank")
}

func (p parts) named(sql string) string { return strings.ReplaceAll(sql, "PREFIX", p.prefix) }

// list sets the topics of a role, as the owner does it.
func (p parts) list(t *testing.T, role, topics string) {
	t.Helper()
	_, err := p.owner.Exec(t.Context(), `INSERT INTO effectonce.outbox_publishers (role, topics) VALUES ($1, $2::text::text[]) ON CONFLICT (role) DO UPDATE SET topics = excluded.topics`,
		p.prefix+"_"+role, topics)
	require.NoError(t, err)
}

// looked counts the triggers that look at topics: of the outbox, its four slots, and messages for
// later.
func (p parts) looked(t *testing.T) int {
	t.Helper()
	return count(t.Context(), t, p.owner, `SELECT count(*) FROM pg_trigger WHERE tgname = 'outbox_topic_allowed' AND tgenabled = 'O'`)
}

func publish(t *testing.T, pool *pgxpool.Pool, m outbox.Message) error {
	t.Helper()
	return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return outbox.Publish(t.Context(), tx, m) })
}

// Property: a role that is listed publishes to its topics and to no other, by whatever statement,
// at once or later, and whatever role it takes; one that is not listed is not limited, and neither
// are the relay, the owner and functions of another owner. A refusal says which role, which topic,
// and who changes the list, and leaves nothing behind. Row S7 of guarantees.md.
func TestPublishersTopicsAreLimited(t *testing.T) {
	t.Parallel()
	p := newNeighbours(t)
	ctx := t.Context()
	shop, bank := p.listed(t)
	before := count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox`)
	require.Zero(t, p.looked(t), "no list, no look")
	p.list(t, "shop", "{orders,bills.*}")
	p.list(t, "shop", "{orders,bills.*}")
	require.Equal(t, 6, p.looked(t))

	later := time.Now().Add(time.Hour)
	for _, topic := range []string{"payments", "bills", "order", "ordersx", "Orders", "bill.x"} {
		for name, m := range map[string]outbox.Message{
			"at once": {Topic: topic}, "later": {Topic: topic, DeliverAt: later}, "to several": {Topic: "orders", AlsoTo: []string{topic}},
			"several later": {Topic: "orders", AlsoTo: []string{topic}, DeliverAt: later},
		} {
			var pgErr *pgconn.PgError
			require.ErrorAs(t, publish(t, shop, m), &pgErr, "%s %s", topic, name)
			require.Equal(t, "42501", pgErr.Code)
			require.Equal(t, p.named("role PREFIX_login_shop may not publish to topic "+topic), pgErr.Message)
			require.Contains(t, pgErr.Hint, "publishers limit")
		}
	}
	_, err := shop.CopyFrom(ctx, pgx.Identifier{"effectonce", "outbox"}, []string{"topic"}, pgx.CopyFromRows([][]any{{"orders"}, {"payments"}}))
	require.ErrorContains(t, err, "may not publish to topic payments")
	for _, sql := range []string{
		"INSERT INTO effectonce.outbox (topic) VALUES ('payments')", "INSERT INTO effectonce.outbox (topic) VALUES ('orders'), ('payments')",
		"INSERT INTO effectonce.outbox (topic) VALUES (repeat('x', 1000000))",
		"SET LOCAL ROLE PREFIX_shop; INSERT INTO effectonce.outbox (topic) VALUES ('payments')",
		"SET LOCAL ROLE PREFIX_publisher; INSERT INTO effectonce.outbox (topic) VALUES ('payments')",
		"SET LOCAL ROLE PREFIX_publisher; INSERT INTO effectonce.outbox_scheduled (topic, due_at) VALUES ('payments', now())",
		"SET LOCAL session_replication_role = replica",
		"ALTER TABLE effectonce.outbox DISABLE TRIGGER outbox_topic_allowed", "DROP TRIGGER outbox_topic_allowed ON effectonce.outbox",
		"CREATE OR REPLACE FUNCTION effectonce.outbox_topic_allowed() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
	} {
		require.Equal(t, "42501", try(t, shop, p.named(sql)), sql)
	}
	require.Equal(t, "23502", try(t, shop, "INSERT INTO effectonce.outbox (topic) VALUES (NULL)"))
	require.Equal(t, before, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox`))
	for _, m := range []outbox.Message{{Topic: "orders"}, {Topic: "bills.x"}, {Topic: "bills.", DeliverAt: later}, {Topic: "orders", AlsoTo: []string{"bills.y"}}} {
		require.NoError(t, publish(t, shop, m))
	}
	_, err = p.owner.Exec(ctx, p.named("GRANT UPDATE ON effectonce.outbox_scheduled TO PREFIX_shop"))
	require.NoError(t, err)
	require.Equal(t, "42501", try(t, shop, "UPDATE effectonce.outbox_scheduled SET topic = 'payments' WHERE topic = 'bills.'"))
	require.Equal(t, "allowed", try(t, shop, "UPDATE effectonce.outbox_scheduled SET due_at = now() WHERE topic = 'bills.'"))
	for _, pool := range []*pgxpool.Pool{bank, p.as(t, "publisher"), p.as(t, "consumer"), p.as(t, "endpoint"), p.owner} {
		require.NoError(t, publish(t, pool, outbox.Message{Topic: "payments"}))
		require.NoError(t, publish(t, pool, outbox.Message{Topic: "payments", DeliverAt: later}))
	}

	// A login of several listed roles has the topics of all, and after SET ROLE those of one.
	p.list(t, "bank", "{payments}")
	_, err = p.owner.Exec(ctx, p.named("CREATE ROLE PREFIX_both; GRANT PREFIX_shop, PREFIX_bank TO PREFIX_both; GRANT PREFIX_shop TO PREFIX_relay"))
	require.NoError(t, err)
	both := p.as(t, "both")
	for _, topic := range []string{"orders", "payments"} {
		require.NoError(t, publish(t, both, outbox.Message{Topic: topic}))
	}
	for sql, code := range map[string]string{
		"INSERT INTO effectonce.outbox (topic) VALUES ('other')":                                    "42501",
		"SET LOCAL ROLE PREFIX_shop; INSERT INTO effectonce.outbox (topic) VALUES ('payments')":     "42501",
		"SET LOCAL ROLE PREFIX_bank; INSERT INTO effectonce.outbox (topic) VALUES ('orders')":       "42501",
		"SET LOCAL ROLE PREFIX_bank; INSERT INTO effectonce.outbox (topic) VALUES ('payments')":     "allowed",
		"SET LOCAL ROLE PREFIX_publisher; INSERT INTO effectonce.outbox (topic) VALUES ('orders')":  "allowed",
		"SET LOCAL ROLE PREFIX_publisher; INSERT INTO effectonce.outbox (topic) VALUES ('charges')": "42501",
	} {
		require.Equal(t, code, try(t, both, p.named(sql)), sql)
	}
	require.Equal(t, "allowed", try(t, p.as(t, "relay"), "INSERT INTO effectonce.outbox (topic) VALUES ('payments')"), "it publishes for others")

	// A function with the rights of its owner publishes what its owner may.
	_, err = p.owner.Exec(ctx, p.named(`CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO PUBLIC;
		CREATE FUNCTION app.audit() RETURNS void LANGUAGE sql SECURITY DEFINER AS 'INSERT INTO effectonce.outbox (topic) VALUES (''audit'')'`))
	require.NoError(t, err)
	require.Equal(t, "allowed", try(t, shop, "SELECT app.audit()"))
	_, err = p.owner.Exec(ctx, p.named(`GRANT CREATE ON SCHEMA app TO PREFIX_bank; ALTER FUNCTION app.audit() OWNER TO PREFIX_bank`))
	require.NoError(t, err)
	require.Equal(t, "42501", try(t, shop, "SELECT app.audit()"))
	_, err = p.owner.Exec(ctx, "DROP SCHEMA app CASCADE")
	require.NoError(t, err)

	// The group's role, with no topic: who has no list of its own publishes nothing.
	_, err = p.owner.Exec(ctx, p.named("CREATE ROLE PREFIX_late; GRANT PREFIX_publisher TO PREFIX_late"))
	require.NoError(t, err)
	p.list(t, "publisher", "{}")
	require.Equal(t, "42501", try(t, p.as(t, "late"), "INSERT INTO effectonce.outbox (topic) VALUES ('orders')"))
	require.Equal(t, "allowed", try(t, shop, "INSERT INTO effectonce.outbox (topic) VALUES ('orders')"))
	require.Equal(t, "42501", try(t, shop, "INSERT INTO effectonce.outbox (topic) VALUES ('payments')"))
	p.list(t, "publisher", "{*}")
	require.Equal(t, "allowed", try(t, shop, "INSERT INTO effectonce.outbox (topic) VALUES ('payments')"))

	_, err = p.owner.Exec(ctx, "DELETE FROM effectonce.outbox_publishers")
	require.NoError(t, err)
	require.Zero(t, p.looked(t))
	require.NoError(t, publish(t, shop, outbox.Message{Topic: "payments"}))
	require.Equal(t, "42501", try(t, shop, "SELECT FROM effectonce.outbox_publishers"))
}

// Property: only the owner changes a list, and a list that would limit no role is refused. Rows S7
// of guarantees.md, S18.
func TestPublishersListsAreTheOwners(t *testing.T) {
	t.Parallel()
	p := newNeighbours(t)
	ctx := t.Context()
	shop, _ := p.listed(t)
	p.list(t, "shop", "{orders}")
	pools := map[string]*pgxpool.Pool{"shop": shop}
	for _, part := range neighbours {
		pools[part] = p.as(t, part)
	}
	for part, pool := range pools {
		for _, sql := range []string{
			"INSERT INTO effectonce.outbox_publishers VALUES ('x', '{}')", "UPDATE effectonce.outbox_publishers SET topics = '{*}'",
			"DELETE FROM effectonce.outbox_publishers", "TRUNCATE effectonce.outbox_publishers", "SELECT FROM effectonce.outbox_publishers FOR UPDATE",
			"LOCK TABLE effectonce.outbox_publishers IN SHARE MODE", "DROP TRIGGER outbox_publishers_changed ON effectonce.outbox_publishers",
		} {
			require.Equal(t, "42501", try(t, pool, sql), "%s: %s", part, sql)
		}
	}
	require.Equal(t, "42501", try(t, pools["stranger"], "SELECT FROM effectonce.outbox_publishers"))
	for sql, code := range map[string]string{
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_nobody', '{}')":                                            "42704",
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_relay', '{}')":                                             "22023",
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_bank', '{a b/c}')":                                         "23514",
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_bank', '{a*b}')":                                           "23514",
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_bank', '{**}')":                                            "23514",
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_bank', '{a,NULL}')":                                        "23514",
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_bank', '{{a},{b}}')":                                       "23514",
		"INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_bank', NULL)":                                              "23502",
		"INSERT INTO effectonce.outbox_publishers SELECT 'PREFIX_bank', array_agg('t' || i) FROM generate_series(1, 1001) i": "23514",
	} {
		require.Equal(t, code, try(t, p.owner, p.named(sql)), sql)
	}

	// A dropped role limits no other role, and does not keep another role from publishing.
	_, err := p.owner.Exec(ctx, p.named("CREATE ROLE PREFIX_gone; INSERT INTO effectonce.outbox_publishers VALUES ('PREFIX_gone', '{}'); DROP ROLE PREFIX_gone"))
	require.NoError(t, err)
	require.Equal(t, "allowed", try(t, shop, "INSERT INTO effectonce.outbox (topic) VALUES ('orders')"))

	conn, err := pgx.Connect(ctx, p.address)
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	require.NoError(t, migrations.To(ctx, conn, migrations.Options{}, 7), "a way back with lists")
	require.Zero(t, p.looked(t))
	require.Equal(t, "allowed", try(t, p.owner, "INSERT INTO effectonce.outbox (topic) VALUES ('payments')"))
	require.NoError(t, migrations.Up(ctx, conn, migrations.Options{}))
}

// Property: a publisher that gives the ID and topic of another's message for later, due at once,
// neither brings that message forward nor holds it up: each is moved when it is due. Row S7 of
// guarantees.md.
func TestPublishersMessagesForLaterKeepTheirTime(t *testing.T) {
	t.Parallel()
	ctx, p, topic := t.Context(), newParts(t), kafkatest.Topic(t, 1)
	victim, thief := p.listed(t)
	id, later := uuid.Must(uuid.NewV7()), time.Now().Add(time.Hour)
	require.NoError(t, publish(t, victim, outbox.Message{ID: id, Topic: topic, Payload: []byte("true"), DeliverAt: later}))
	require.NoError(t, publish(t, thief, outbox.Message{ID: id, Topic: topic, Payload: []byte("forged"), DeliverAt: time.Now().Add(time.Millisecond)}))
	stop := running(t, p.as(t, "relay"), kafkatest.Brokers(t), relay.Config{PollMax: 5 * time.Millisecond})
	eventually(t, "what is due is moved", func() (bool, any) {
		n := count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_scheduled WHERE due_at < clock_timestamp()`)
		return n == 0, n
	})
	require.Equal(t, 1, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_scheduled WHERE payload = 'true'`))
	require.Equal(t, 1, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox`))
	require.True(t, cancelled(t, victim, id))
	stop()
}

func cancelled(t *testing.T, pool *pgxpool.Pool, id uuid.UUID) (was bool) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		was, err = outbox.Cancel(t.Context(), tx, id)
		return err
	}))
	return was
}
