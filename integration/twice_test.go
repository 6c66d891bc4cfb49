package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: two members that both believe to own all partitions, for as long as it takes, have
// every effect once and in order, and they get on. Row C11 of guarantees.md.
//
// kfake is made to put the second one into a group of its own, of which it hears nothing: no real
// broker would.
func TestTwoMembersThatOwnTheSamePartitions(t *testing.T) {
	longtest.Only(t, "up to 200 rounds until it happens")
	t.Parallel()
	for name, order := range map[string]consumer.Order{"by partition": consumer.OrderByPartition, "by key": consumer.OrderByKey, "unordered": consumer.OrderUnordered} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ownTheSame(t, order)
		})
	}
}

func ownTheSame(t *testing.T, order consumer.Order) {
	t.Helper()
	ctx := t.Context()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1))
	apart(fake, "second")
	c := child{Role: "consumer", URL: pgtest.Database(t), Brokers: fake.ListenAddrs(), BatchMax: 10, Order: order, SessionTimeout: sessionTimeout}
	pool := open(t, c.URL)
	createWorkload(t, pool)
	c.Topic = kafkatest.TopicAt(t, c.Brokers, 2)
	c.Group = c.Topic
	var members []*process
	for _, name := range []string{"first", "second"} {
		c.Instance = name
		members = append(members, start(t, c))
	}
	takeovers := `SELECT coalesce(min(epoch), 0) FROM effectonce.consumer_positions`
	eventually(t, 30*time.Second, "both have taken each partition", func() (bool, any) {
		n := count(ctx, t, pool, takeovers)
		return n >= 2, n
	})
	rounds := 4
	if testing.Short() || order != consumer.OrderByPartition {
		t.Log("-short, or with workers: 1 round instead of 4")
		rounds = 1
	}
	// A holder that was replaced waits before it takes a partition back: there is something to do
	// until then.
	for round := 0; round < rounds || round < 200 && count(ctx, t, pool, takeovers) <= 2; round++ {
		producedAt(t, c.Brokers, pool, c.Topic, fmt.Sprintf("round%d-", round), 8, 50, 10)
		c.handledBy(ctx, t, pool, 60*time.Second)
	}
	require.Greater(t, count(ctx, t, pool, takeovers), 2, "they took partitions from each other")
	for _, m := range members {
		require.NoError(t, m.terminate())
	}
}

// apart puts a static member into a group of its own.
func apart(fake *kfake.Cluster, instance string) {
	const suffix = "-apart"
	is := func(name *string) bool { return name != nil && *name == instance }
	for _, key := range []kmsg.Key{kmsg.JoinGroup, kmsg.SyncGroup, kmsg.Heartbeat, kmsg.OffsetCommit} {
		fake.ControlKey(int16(key), func(request kmsg.Request) (kmsg.Response, error, bool) {
			fake.KeepControl()
			switch r := request.(type) {
			case *kmsg.JoinGroupRequest:
				if is(r.InstanceID) {
					r.Group += suffix
				}
			case *kmsg.SyncGroupRequest:
				if is(r.InstanceID) {
					r.Group += suffix
				}
			case *kmsg.HeartbeatRequest:
				if is(r.InstanceID) {
					r.Group += suffix
				}
			case *kmsg.OffsetCommitRequest:
				if is(r.InstanceID) {
					r.Group += suffix
				}
			}
			return nil, nil, false
		})
	}
}
