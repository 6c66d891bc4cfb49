package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// denials collects the statements that a pool was not allowed to run, even if their errors were
// ignored.
type denials struct {
	asked atomic.Int64 // statements and batches
	mu    sync.Mutex
	all   []string
}

type statementKey struct{}

func (d *denials) note(sql string, err error) {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "42501" {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.all = append(d.all, pgErr.Message+": "+sql)
	}
}

func (d *denials) list() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]string(nil), d.all...)
}

func (d *denials) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	d.asked.Add(1)
	return context.WithValue(ctx, statementKey{}, query.SQL)
}

func (d *denials) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, end pgx.TraceQueryEndData) {
	sql, _ := ctx.Value(statementKey{}).(string)
	d.note(sql, end.Err)
}

func (d *denials) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	d.asked.Add(1)
	return ctx
}

func (d *denials) TraceBatchQuery(_ context.Context, _ *pgx.Conn, query pgx.TraceBatchQueryData) {
	d.note(query.SQL, query.Err)
}

func (d *denials) TraceBatchEnd(_ context.Context, _ *pgx.Conn, end pgx.TraceBatchEndData) {
	d.note("a batch", end.Err)
}

// parts is a database with the group roles, and opens pools of their members.
type parts struct {
	address, prefix string
	owner           *pgxpool.Pool
	denied          *denials
}

func newParts(t *testing.T) parts {
	t.Helper()
	return partsIn(t, pgtest.Database(t))
}

func partsIn(t *testing.T, address string) parts {
	t.Helper()
	p := parts{address: address, denied: &denials{}}
	p.prefix, p.owner = pgtest.RolePrefix(t, p.address), open(t, p.address)
	sql, err := migrations.Roles(migrations.Options{}, p.prefix)
	require.NoError(t, err)
	_, err = p.owner.Exec(t.Context(), sql)
	require.NoError(t, err)
	return p
}

// as opens a pool of a login that is a member of one group role.
func (p parts) as(t *testing.T, part string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(pgtest.Login(t, p.address, p.prefix, part))
	require.NoError(t, err)
	config.MaxConns, config.ConnConfig.Tracer = 10, p.denied
	return pgtest.PoolOf(t, config)
}

// paper is a handler of money: fenced, with an effect and a message of its own. What is bad fails
// for good until it is fixed, and what is flaky the first time.
type paper struct {
	results  string // topic
	fences   *dedup.Claims
	repaired atomic.Bool
	flaked   atomic.Bool
}

func (p *paper) handle(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
	value := string(msg.Value)
	switch {
	case strings.HasPrefix(value, "bad") && !p.repaired.Load():
		return consumer.Permanent(errors.New("no such account"))
	case strings.HasPrefix(value, "flaky") && !p.flaked.Swap(true):
		return errors.New("the ledger is away")
	}
	if _, err := p.fences.Fence(ctx, tx, "test", value, 1); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO app_effects (value) VALUES ($1)`, value); err != nil {
		return err
	}
	return outbox.Publish(ctx, tx, outbox.Message{Topic: p.results, Key: msg.Key, Payload: msg.Value})
}

// Property: if the database hides its identity, as some hosted ones do, a relay logs that and
// works: it renews its lease, and publishes rows that arrive after many idle polls. Row O25 of
// guarantees.md.
func TestRelayWithoutTheServersIdentity(t *testing.T) {
	t.Parallel()
	ctx, p, topic := t.Context(), newParts(t), kafkatest.Topic(t, 1)
	_, err := p.owner.Exec(ctx, `REVOKE EXECUTE ON FUNCTION pg_walfile_name(pg_lsn), pg_current_wal_lsn() FROM PUBLIC`)
	require.NoError(t, err)
	var log lockedBuffer
	r, err := relay.New(p.as(t, "relay"), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)},
		relay.Config{PollMax: 5 * time.Millisecond, Lease: 30 * time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	stop := runs(t, r)
	for i := range 3 {
		eventually(t, "a lease is taken and renewed", func() (bool, any) {
			return count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_progress_now WHERE lease_until > clock_timestamp() + interval '20 seconds'`) == 1, log.String()
		})
		before := p.denied.asked.Load()
		eventually(t, "a hundred looks", func() (bool, any) { n := p.denied.asked.Load() - before; return n > 100, n })
		_, err = p.owner.Exec(ctx, `INSERT INTO effectonce.outbox (topic) VALUES ($1)`, topic)
		require.NoError(t, err)
		eventually(t, "the row is published", func() (bool, any) { return kafkatest.Count(t, topic) == i+1, log.String() })
	}
	stop()
	require.Contains(t, log.String(), "the server's run is hidden")
	require.NotContains(t, log.String(), "does not answer")
}

// Property: publisher, relay and consumer work with the rights of their role alone, from the insert
// to the effect, with retries, parking, fences and messages of their own, and to the truncation of
// what is published and the release of leases; nothing is even tried that is not allowed. Row S7 of
// guarantees.md.
func TestPartsWorkWithTheirRoles(t *testing.T) {
	t.Parallel()
	partsWork(t, newParts(t))
}

// Property: the same, from the migration on, in a database where a login without rights planted
// functions and operators that fit better than PostgreSQL's own: none of them is run, which for all
// but their owner is an error. Row S18 of guarantees.md.
func TestPartsWorkAmongHostileOverloads(t *testing.T) {
	t.Parallel()
	address := hostileDatabase(t)
	require.NoError(t, migrations.Up(t.Context(), pgtest.Connect(t, address), migrations.Options{}))
	partsWork(t, partsIn(t, address))
}

func partsWork(t *testing.T, p parts) {
	t.Helper()
	ctx := t.Context()
	topic, results := kafkatest.Topic(t, 2), kafkatest.Topic(t, 1)
	_, err := p.owner.Exec(ctx, `CREATE TABLE app_effects (value text); GRANT INSERT ON app_effects TO `+p.prefix+`_consumer`)
	require.NoError(t, err)
	brokers := kgo.SeedBrokers(kafkatest.Brokers(t)...)
	var log lockedBuffer
	logger := slog.New(slog.NewTextHandler(&log, nil))

	relayPool, consumerPool, publisher := p.as(t, "relay"), p.as(t, "consumer"), p.as(t, "publisher")
	r, err := relay.New(relayPool, []kgo.Opt{brokers}, relay.Config{Keep: 100 * time.Millisecond, Lease: 5 * time.Second, Shards: 2, Logger: logger})
	require.NoError(t, err)
	fences, err := dedup.New(dedup.Config{})
	require.NoError(t, err)
	handler := &paper{results: results, fences: fences}
	c, err := consumer.New(consumerPool, []kgo.Opt{brokers}, consumer.Each(handler.handle),
		consumer.Config{Group: topic, Topics: []string{topic}, RetryMin: time.Millisecond, RetryMax: 50 * time.Millisecond, Logger: logger})
	require.NoError(t, err)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 2)
	go func() { done <- r.Run(running) }()
	go func() { done <- c.Run(running) }()

	n := 0
	publish := func(values ...string) {
		t.Helper()
		for _, value := range values {
			require.NoError(t, pgx.BeginFunc(ctx, publisher, func(tx pgx.Tx) error {
				return outbox.Publish(ctx, tx, outbox.Message{Topic: topic, Key: []byte(value), Payload: []byte(value)})
			}))
			n++
		}
	}
	publish("good", "bad", "flaky")
	_, err = publisher.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('no-such-topic-' || $1, 'k', 'v')`, topic)
	require.NoError(t, err)
	within := func(what, sql string, want int) {
		t.Helper()
		eventually(t, what, func() (bool, any) {
			got := count(ctx, t, p.owner, sql)
			return got >= want, fmt.Sprint(got, p.denied.list(), log.String())
		})
	}
	within("parked", `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked'`, 1)
	within("effects", `SELECT count(*) FROM app_effects`, 2)
	within("a dead row", `SELECT count(*) FROM effectonce.outbox_dead`, 1)
	handler.repaired.Store(true)
	_, err = p.as(t, "operator").Exec(ctx, `UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp(), released_at = NULL`)
	require.NoError(t, err)
	within("the parked message is handled", `SELECT count(*) FROM app_effects`, 3)
	eventually(t, "each slot is emptied", func() (bool, any) {
		publish(fmt.Sprint("more-", n))
		slots := count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_slots WHERE truncated_at IS NOT NULL`)
		return slots == 4, fmt.Sprint(slots, log.String())
	})
	within("all effects", `SELECT count(*) FROM app_effects`, n)
	eventually(t, "all results", func() (bool, any) { got := kafkatest.Count(t, results); return got >= n, got })
	stop()
	require.NoError(t, <-done)
	require.NoError(t, <-done)

	require.Equal(t, n, count(ctx, t, p.owner, `SELECT pg_catalog.count(DISTINCT value) FROM app_effects`))
	require.Equal(t, n, count(ctx, t, p.owner, `SELECT count(*) FROM app_effects`))
	require.Equal(t, 2, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_progress_now WHERE owner IS NULL AND published > 0`), "leases are given back")
	require.Zero(t, count(ctx, t, p.owner, `SELECT count(*) FROM effectonce.outbox_replicas`))

	// The upkeep of claims is not the consumer's, and trying it does not keep the owner from it.
	var own []string
	for _, denied := range p.denied.list() {
		if !strings.Contains(denied, "dedup.lease") { // what KeepUp tries once
			own = append(own, denied)
		}
	}
	assert.Empty(t, own)
	claims, err := dedup.New(dedup.Config{})
	require.NoError(t, err)
	_, err = claims.Maintain(ctx, consumerPool, dedup.MaintainOptions{Owner: "consumer"})
	require.ErrorContains(t, err, "permission denied for table maintenance")
	report, err := claims.Maintain(ctx, p.owner, dedup.MaintainOptions{Owner: "owner"})
	require.NoError(t, err)
	assert.False(t, report.Elsewhere)
}

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
	eventually(t, "the message that publishes to a refused topic is parked, and no other", func() (bool, any) {
		rows, err := p.owner.Query(ctx, `SELECT reason || ': ' || error FROM effectonce.parked_messages`)
		require.NoError(t, err)
		parked, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return len(parked) == 1 && strings.HasPrefix(parked[0], "failed: ") && strings.Contains(parked[0], "row-level security"), parked
	})
	end()
	require.NoError(t, <-done)
	stop()
}
