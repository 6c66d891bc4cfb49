package integration_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: with the policies of docs/how-to/secure.md a publisher publishes to its topics and to
// no other, by whatever statement, at once or later; a role without a policy publishes nothing; the
// relay still reads and moves all rows. A handler's refused publish is reported by its partition.
// Row S7 of guarantees.md.
func TestPolicyLimitsTopicsOfAPublisher(t *testing.T) {
	t.Parallel()
	ctx, p := t.Context(), newParts(t)
	orders, payments := kafkatest.Topic(t, 1), kafkatest.Topic(t, 1)
	named := strings.NewReplacer("PREFIX", p.prefix, "ORDERS", orders, "PAYMENTS", payments).Replace
	_, err := p.owner.Exec(ctx, named(`
CREATE ROLE PREFIX_shop; CREATE ROLE PREFIX_bank; GRANT PREFIX_publisher TO PREFIX_shop, PREFIX_bank;
ALTER TABLE effectonce.outbox ENABLE ROW LEVEL SECURITY;
CREATE POLICY relays ON effectonce.outbox TO PREFIX_relay, PREFIX_operator USING (true) WITH CHECK (true);
CREATE POLICY publishers ON effectonce.outbox FOR INSERT TO PREFIX_bank WITH CHECK (true);
CREATE POLICY shop ON effectonce.outbox FOR INSERT TO PREFIX_shop, PREFIX_consumer WITH CHECK (topic = 'ORDERS' OR topic LIKE 'bills.%');
CREATE POLICY shop ON effectonce.outbox_scheduled AS RESTRICTIVE FOR INSERT TO PREFIX_shop WITH CHECK (topic = 'ORDERS' OR topic LIKE 'bills.%')`))
	require.NoError(t, err)
	shop, bank := p.as(t, "shop"), p.as(t, "bank")
	publish := func(pool *pgxpool.Pool, m outbox.Message) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Publish(ctx, tx, m) })
	}
	soon, later := time.Now().Add(time.Millisecond), time.Now().Add(time.Hour)
	for _, m := range []outbox.Message{{Topic: payments}, {Topic: "bills"}, {Topic: payments, DeliverAt: later}} {
		var pgErr *pgconn.PgError
		require.ErrorAs(t, publish(shop, m), &pgErr)
		require.Equal(t, "42501", pgErr.Code)
	}
	_, err = shop.CopyFrom(ctx, pgx.Identifier{"effectonce", "outbox"}, []string{"topic"}, pgx.CopyFromRows([][]any{{orders}, {payments}}))
	require.ErrorContains(t, err, "row-level security")
	for sql, code := range map[string]string{
		"INSERT INTO effectonce.outbox (topic) VALUES ('PAYMENTS')":                                       "42501",
		"INSERT INTO effectonce.outbox (topic) VALUES ('ORDERS'), ('PAYMENTS')":                           "42501",
		"SET LOCAL ROLE PREFIX_publisher; INSERT INTO effectonce.outbox (topic) VALUES ('ORDERS')":        "42501",
		"INSERT INTO effectonce.outbox_0 (topic) VALUES ('PAYMENTS')":                                     "42501",
		"SET LOCAL row_security = off; INSERT INTO effectonce.outbox (topic) VALUES ('PAYMENTS')":         "42501",
		"INSERT INTO effectonce.outbox_scheduled (topic, due_at) VALUES ('PAYMENTS', clock_timestamp())":  "42501",
		"SELECT FROM effectonce.outbox":                                                                   "42501",
		"INSERT INTO effectonce.outbox (topic) VALUES ('bills.x')":                                        "allowed",
		"INSERT INTO effectonce.outbox_scheduled (topic, due_at) VALUES ('bills.x', clock_timestamp())":   "allowed",
		"DELETE FROM effectonce.outbox_scheduled WHERE id = '01976f00-0000-7000-8000-000000000001'::uuid": "allowed",
	} {
		require.Equal(t, code, try(t, shop, named(sql)), sql)
	}
	require.Equal(t, "42501", try(t, p.as(t, "publisher"), named("INSERT INTO effectonce.outbox (topic) VALUES ('ORDERS')")))

	require.NoError(t, publish(shop, outbox.Message{Topic: orders, Payload: []byte("good")}))
	require.NoError(t, publish(shop, outbox.Message{Topic: orders, Payload: []byte("bad")}))
	require.NoError(t, publish(shop, outbox.Message{Topic: orders, Payload: []byte("good"), DeliverAt: soon}))
	require.NoError(t, publish(bank, outbox.Message{Topic: payments}))
	stop := running(t, p.as(t, "relay"), kafkatest.Brokers(t), relay.Config{Keep: 100 * time.Millisecond, PollMax: 5 * time.Millisecond})
	c, err := consumer.New(p.as(t, "consumer"), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)},
		consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			topic := "bills.x"
			if string(msg.Value) == "bad" {
				topic = payments
			}
			return outbox.Publish(ctx, tx, outbox.Message{Topic: topic})
		}), consumer.Config{Group: orders, Topics: []string{orders}, RetryMin: time.Millisecond, RetryMax: time.Millisecond, AttemptsMax: 2})
	require.NoError(t, err)
	consuming, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(consuming) }()
	eventually(t, "rows of all publishers are published, and later moved", func() (bool, any) {
		n, m := kafkatest.Count(t, orders), kafkatest.Count(t, payments)
		return n == 3 && m == 1, []int{n, m}
	})
	eventually(t, "the partition reports the refusal", func() (bool, any) {
		var trouble *string
		require.NoError(t, p.owner.QueryRow(ctx, `SELECT pg_catalog.max(trouble) FROM effectonce.consumer_positions`).Scan(&trouble))
		return trouble != nil && strings.Contains(*trouble, "row-level security"), trouble
	})
	end()
	require.NoError(t, <-done)
	stop()
}
