package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// producedAt puts messages of several keys, in version order, into a topic, the share of duplicates
// among them under the same ID at another offset. It stores the expected result in the database.
func producedAt(t *testing.T, brokers []string, pool *pgxpool.Pool, topic, name string, keys, versions, duplicateEvery int) {
	t.Helper()
	ctx := t.Context()
	client := kafkatest.ClientAt(t, brokers, kgo.UnknownTopicRetries(50)) // a topic that was just made anew
	var records []*kgo.Record
	for version := 1; version <= versions; version++ {
		for k := range keys {
			key := fmt.Sprintf("%s%d", name, k)
			body, err := json.Marshal(event{key, version})
			require.NoError(t, err)
			id, err := uuid.NewV7()
			require.NoError(t, err)
			record := func() *kgo.Record {
				return &kgo.Record{Topic: topic, Key: []byte(key), Value: body, Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id.String())}}}
			}
			records = append(records, record())
			if duplicateEvery > 0 && len(records)%duplicateEvery == 0 {
				records = append(records, record())
			}
		}
	}
	require.NoError(t, client.ProduceSync(ctx, records...).FirstErr())
	_, err := pool.Exec(ctx, `INSERT INTO versions SELECT $3 || n, $2 FROM generate_series(0, $1 - 1) n`, keys, versions, name)
	require.NoError(t, err)
}

// handled waits until every message has its effect, and judges the effects.
func handled(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	allHandled(ctx, t, pool)
	requireEffects(ctx, t, pool)
}

// handledBy is handled, by the order that a consumer keeps.
func (c child) handledBy(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	allHandled(ctx, t, pool)
	c.requireEffects(ctx, t, pool)
}

func (c child) requireEffects(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if c.Order == consumer.OrderUnordered {
		requireOnce(ctx, t, pool)
		return
	}
	requireEffects(ctx, t, pool)
}

func allHandled(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, "every message has its effect", effectsOfAll(ctx, t, pool))
}

func effectsOfAll(ctx context.Context, t *testing.T, pool *pgxpool.Pool) func() (bool, any) {
	t.Helper()
	want := count(ctx, t, pool, `SELECT sum(version) FROM versions`)
	return func() (bool, any) {
		n := count(ctx, t, pool, `SELECT count(*) FROM (SELECT DISTINCT key, version FROM effects) d`)
		return n == want, fmt.Sprintf("%d of %d", n, want)
	}
}

// Property: a consumer that is killed at any point between two durable steps, and started again,
// has every effect once and in order, also what it publishes, for each handler shape. Rows C1, C2,
// C3, C22 of guarantees.md.
func TestConsumerKilledAtEachPointHasEffectsOnce(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.ConsumerClaimed, crashpoint.ConsumerHandled, crashpoint.ConsumerCommitting,
		crashpoint.ConsumerCommitted, crashpoint.ConsumerMarked,
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			either(t, "each", "queued", func(t *testing.T, queued bool) {
				t.Helper()
				if queued != (point == crashpoint.ConsumerCommitted) || point == crashpoint.ConsumerHandled || point == crashpoint.ConsumerMarked {
					longtest.Only(t, "ten pairs of processes; the others are those at which something can be lost")
				}
				ctx := t.Context()
				c, pool := consuming(t, child{Forward: kafkatest.Topic(t, 1), Queued: queued, BatchMax: 40, CrashAt: point, CrashAfter: 2}, 2)
				producedAt(t, c.Brokers, pool, c.Topic, "k", 5, 60, 10)
				first := start(t, c)
				eventually(t, "the consumer reaches its crash point", func() (bool, any) { return first.ended(), first.log })
				require.ErrorContains(t, first.err, "killed")

				c.CrashAt = ""
				second := start(t, c)
				handled(ctx, t, pool)
				require.NoError(t, second.terminate())
				// What the handler published is there once for each effect, under distinct derived
				// IDs.
				require.Equal(t, count(ctx, t, pool, `SELECT count(*) FROM effects`), count(ctx, t, pool, `SELECT count(DISTINCT id) FROM effectonce.outbox`))
				require.Equal(t, count(ctx, t, pool, `SELECT count(*) FROM effects`), count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox`))
			})
		})
	}
}

// workersOrders are the orders with workers inside a partition.
var workersOrders = map[string]consumer.Order{"by key": consumer.OrderByKey, "unordered": consumer.OrderUnordered}

// Property: a consumer that freezes inside its transaction, with claims held, is replaced, and when
// it wakes up it changes nothing: neither its effects nor its position count. It holds for every
// way in which a group shares partitions, and where the frozen one holds the only server connection
// of a pooler. Rows C9 of guarantees.md, C10, C13.
func TestFrozenConsumerIsReplacedAndHarmlessWhenItWakes(t *testing.T) {
	t.Parallel()
	const eleven = "eleven pairs of processes; the one in the handler is enough"
	for _, point := range []string{crashpoint.ConsumerClaimed, crashpoint.ConsumerHandled, crashpoint.ConsumerCommitting, crashpoint.ConsumerCommitted} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			if point != crashpoint.ConsumerHandled {
				longtest.Only(t, eleven)
			}
			freeze(t, child{FreezeAt: point})
		})
	}
	for name, order := range workersOrders {
		t.Run(name, func(t *testing.T) {
			longtest.Only(t, eleven)
			t.Parallel()
			freeze(t, child{FreezeAt: crashpoint.ConsumerHandled, Order: order})
		})
	}
	for _, protocol := range []string{eager, sticky, serverSide} {
		t.Run(protocol, func(t *testing.T) {
			longtest.Only(t, eleven)
			t.Parallel()
			freeze(t, child{FreezeAt: crashpoint.ConsumerHandled, Protocol: protocol})
		})
	}
	t.Run("static, replaced under another name", func(t *testing.T) {
		longtest.Only(t, eleven)
		t.Parallel()
		freeze(t, child{FreezeAt: crashpoint.ConsumerHandled, Instance: "zombie"})
	})
	t.Run("through PgBouncer", func(t *testing.T) {
		longtest.Only(t, eleven)
		t.Parallel()
		freeze(t, child{FreezeAt: crashpoint.ConsumerHandled}, "default_pool_size = 1")
	})
}

// freeze lets one consumer freeze and another take over; with settings of PgBouncer both are behind
// one.
func freeze(t *testing.T, c child, pooled ...string) {
	t.Helper()
	ctx := t.Context()
	c.IdleTimeout = time.Second
	c, pool := consuming(t, c, 1)
	if pooled != nil {
		c.URL = newPooler(t, c.URL, pooled...).url(describeOnly)
	}
	producedAt(t, c.Brokers, pool, c.Topic, "k", 3, 50, 0)
	zombie := start(t, c)
	eventually(t, "the consumer freezes", func() (bool, any) { return frozen(zombie), zombie.log })
	c.FreezeAt = ""
	if c.Instance != "" {
		c.Instance = "heir"
	}
	heir := start(t, c)
	c.handledBy(ctx, t, pool)
	zombie.signal(syscall.SIGCONT)
	require.NoError(t, zombie.terminate())
	require.NoError(t, heir.terminate())
	c.requireEffects(ctx, t, pool)
}

// frozen reports whether a process is stopped by a signal.
func frozen(p *process) bool {
	state, err := processState(p.cmd.Process.Pid)
	return err == nil && state == 'T'
}

// Property: while members come and go, are killed or stopped cleanly, every effect happens once and
// each key's effects stay in order, also with several workers in each partition, and whatever the
// group's protocol. Rows C12, C13, C14, C42 of guarantees.md.
func TestEffectsOnceWhileTheGroupRebalances(t *testing.T) {
	longtest.Only(t, "rebalances at random moments, with six protocols")
	t.Parallel()
	cases := map[string]child{
		"by key": {Order: consumer.OrderByKey}, "unordered": {Order: consumer.OrderUnordered}, "static": {Instance: "member"}, "static, KIP-848": {Instance: "member", Protocol: serverSide},
	}
	for _, protocol := range []string{cooperative, eager, sticky, serverSide} {
		cases[protocol] = child{Protocol: protocol}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.Instance != "" && c.Protocol == serverSide && kafkatest.Kafka(t).Fake != nil {
				t.Skip("LOUD SKIP: kfake never gives away the partitions of a static member that stopped and does not come back; Kafka does")
			}
			rebalance(t, c)
		})
	}
}

func rebalance(t *testing.T, c child) {
	t.Helper()
	ctx := t.Context()
	c.IdleTimeout = 2 * time.Second
	c, pool := consuming(t, c, 4)
	versions, rounds := 1500, 6
	producedAt(t, c.Brokers, pool, c.Topic, "k", 8, versions, 20)
	started, static := 0, c.Instance
	join := func() *process {
		if static != "" {
			c.Instance = fmt.Sprintf("%s-%d", static, started%3) // that of the member that ended last
		}
		started++
		return start(t, c)
	}
	members := []*process{join(), join()}
	for round := range rounds {
		before := count(ctx, t, pool, `SELECT count(*) FROM effects`)
		members = append(members, join())
		eventually(t, "effects go on", func() (bool, any) {
			n := count(ctx, t, pool, `SELECT count(*) FROM effects`)
			return n > before || n == 8*versions, n
		})
		if round%2 == 0 {
			members[0].kill()
		} else {
			require.NoError(t, members[0].terminate())
		}
		members = members[1:]
	}
	c.handledBy(ctx, t, pool)
	for _, m := range members {
		require.NoError(t, m.terminate())
	}
}

// sessionTimeout is Kafka's least, unless a broker is set otherwise.
const sessionTimeout = 6 * time.Second

// brokersFor returns brokers that speak a protocol, with the session timeout of the tests: where
// the broker assigns partitions, its own settings count, and a dead member would keep its
// partitions for 45 s.
func brokersFor(t *testing.T, protocol string) []string {
	t.Helper()
	if protocol != serverSide {
		return kafkatest.Brokers(t)
	}
	assigning.once.Do(func() {
		milliseconds := fmt.Sprint(sessionTimeout.Milliseconds())
		settings := map[string]string{
			"group.consumer.session.timeout.ms": milliseconds, "group.consumer.min.session.timeout.ms": milliseconds,
			"group.consumer.heartbeat.interval.ms": "1000", "group.consumer.min.heartbeat.interval.ms": "1000",
		}
		// Others use it when this test is over; the end of the tests stops it.
		assigning.kafka, assigning.err = servers.StartKafka(context.WithoutCancel(t.Context()), servers.KafkaOptions{
			Own: true, Settings: settings,
			Fake: []kfake.Opt{kfake.BrokerConfigs(map[string]string{
				"group.consumer.session.timeout.ms": milliseconds, "group.consumer.heartbeat.interval.ms": "1000",
			})},
		})
	})
	require.NoError(t, assigning.err)
	return assigning.kafka.Brokers
}

var assigning struct {
	once  sync.Once
	kafka *servers.Kafka
	err   error
}

// Property: the protocol that is asked for is the one that is spoken; without this the tests of the
// others would prove nothing.
func TestProtocolIsTheOneAskedFor(t *testing.T) {
	t.Parallel()
	// As the brokers call them.
	for protocol, assignor := range map[string]string{cooperative: "cooperative-sticky", eager: "range", sticky: "sticky", serverSide: "uniform"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			c, _ := consuming(t, child{Protocol: protocol}, 2)
			client := kafkatest.ClientAt(t, c.Brokers)
			m := start(t, c)
			eventually(t, "the group's partitions are assigned", func() (bool, any) {
				found, err := assignorOf(t.Context(), client, c.Group, protocol) // an error at first: the cluster is new
				return found == assignor, fmt.Sprint(found, err)
			})
			require.NoError(t, m.terminate())
		})
	}
}

// Property: two members under one static name, of which one was frozen, do not both count: every
// effect happens once, and the member that is fenced off stops cleanly at a stop. Rows C10, C11 of
// guarantees.md.
func TestStaticNameThatIsTakenTwice(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, pool := consuming(t, child{Instance: "twin", FreezeAt: crashpoint.ConsumerHandled, IdleTimeout: time.Second}, 2)
	producedAt(t, c.Brokers, pool, c.Topic, "a", 4, 100, 0)
	zombie := start(t, c)
	eventually(t, "the first one freezes", func() (bool, any) { return frozen(zombie), zombie.log })
	c.FreezeAt = ""
	heir := start(t, c)
	handled(ctx, t, pool)
	zombie.signal(syscall.SIGCONT)
	producedAt(t, c.Brokers, pool, c.Topic, "b", 4, 100, 0)
	handled(ctx, t, pool)
	require.NoError(t, zombie.terminate())
	producedAt(t, c.Brokers, pool, c.Topic, "c", 4, 100, 0)
	handled(ctx, t, pool)
	require.NoError(t, heir.terminate())
}

// consuming prepares a database and a topic for a child that consumes.
func consuming(t *testing.T, c child, partitions int) (child, *pgxpool.Pool) {
	t.Helper()
	c.URL = pgtest.Database(t)
	db := openWorkload(t, c.URL)
	c.Brokers = brokersFor(t, c.Protocol)
	c.Topic = kafkatest.TopicAt(t, c.Brokers, partitions)
	c.Role, c.Group = "consumer", c.Topic
	if c.SessionTimeout == 0 {
		c.SessionTimeout = sessionTimeout
	}
	if c.BatchMax == 0 {
		c.BatchMax = 20
	}
	return c, db
}

// assignorOf returns the name of what assigns a group's partitions, empty while there is none.
func assignorOf(ctx context.Context, client *kgo.Client, group, protocol string) (string, error) {
	admin := kadm.NewClient(client)
	if protocol == serverSide {
		described, err := admin.DescribeConsumerGroups(ctx, group)
		return described[group].AssignorName, err
	}
	described, err := admin.DescribeGroups(ctx, group)
	return described[group].Protocol, err
}
