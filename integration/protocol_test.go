package integration_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

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

// Property: a static member that restarts within its session gets its partitions back, and no other
// member's partitions move; nothing is redelivered. Row C42 of guarantees.md.
func TestStaticMemberKeepsItsPartitions(t *testing.T) {
	longtest.Only(t, "three processes, and what each logs")
	t.Parallel()
	ctx := t.Context()
	c, pool := consuming(t, child{SessionTimeout: 30 * time.Second}, 4)
	member := func(name string) *process {
		c.Instance = name
		return start(t, c)
	}
	a, b := member("a"), member("b")
	assigned := func(p *process) int { return strings.Count(p.log.String(), "partition assigned") }
	eventually(t, "both have partitions", func() (bool, any) {
		n := count(ctx, t, pool, `SELECT count(DISTINCT owner) FROM effectonce.consumer_positions WHERE NOT released`)
		return n == 2, n
	})
	producedAt(t, c.Brokers, pool, c.Topic, "a", 8, 100, 0)
	handled(ctx, t, pool)
	before := assigned(b)
	require.NoError(t, a.terminate())
	producedAt(t, c.Brokers, pool, c.Topic, "b", 8, 100, 0)
	again := member("a")
	handled(ctx, t, pool)
	require.Equal(t, 2, assigned(again))
	require.Equal(t, before, assigned(b), "the other one was left alone")
	for _, p := range []*process{again, b} {
		require.NoError(t, p.terminate())
		require.Contains(t, p.log.String(), "duplicates=0")
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
	db := open(t, c.URL)
	createWorkload(t, db)
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
