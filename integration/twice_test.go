package integration_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: two members that both believe to own all partitions, for as long as it takes, have
// every effect once and in order, and they get on. Row C11 of guarantees.md.
func TestTwoMembersThatOwnTheSamePartitions(t *testing.T) {
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
	brokers := kafkatest.Brokers(t)
	if len(brokers) > 1 {
		brokers = kafkatest.Fake(t, kfake.NumBrokers(1)).ListenAddrs()
	}
	c := child{Role: "consumer", URL: pgtest.Database(t), Brokers: brokers, BatchMax: 10, Order: order, SessionTimeout: sessionTimeout}
	pool := open(t, c.URL)
	createWorkload(t, pool)
	c.Topic = kafkatest.TopicAt(t, c.Brokers, 2)
	c.Group = c.Topic + "-one"
	var members []*process
	for _, apart := range []string{"", c.Topic + "-two"} {
		c.Apart = apart
		members = append(members, start(t, c))
	}
	takeovers := `SELECT coalesce(min(epoch), 0) FROM effectonce.consumer_positions`
	eventually(t, 30*time.Second, "both have taken each partition", func() (bool, any) {
		n := count(ctx, t, pool, takeovers)
		return n >= 2, n
	})
	rounds := 4
	if !*long || order != consumer.OrderByPartition {
		t.Log("without -long, or with workers: 1 round instead of 4")
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

// apart has brokers take a member of a group for one of another group, of which it hears nothing,
// while the database knows one group. Both names have one length. Nothing that is sent in these
// requests but the group has this name in it. It needs one broker: the coordinator of the one group
// is asked about the other.
func apart(group, other string) kgo.Opt {
	return kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &apartConn{conn, []byte(group), []byte(other)}, nil
	})
}

type apartConn struct {
	net.Conn

	group, other []byte
}

// Write sees requests as the client writes them: length, then key.
func (c *apartConn) Write(request []byte) (int, error) {
	groups := []kmsg.Key{kmsg.JoinGroup, kmsg.SyncGroup, kmsg.Heartbeat, kmsg.OffsetCommit}
	if len(request) > 6 && slices.Contains(groups, kmsg.Key(int16(binary.BigEndian.Uint16(request[4:])))) {
		request = bytes.ReplaceAll(request, c.group, c.other) // a copy
	}
	return c.Conn.Write(request)
}
