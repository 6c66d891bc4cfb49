package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/internal/kafkatest"
)

// Property: a topic that is deleted and made anew under a running consumer is read from its
// beginning, also where the new one is longer than the old one was, so that the old position would
// be a valid one. Every effect of both is there once. Row C36 of guarantees.md.
func TestTopicMadeAnewUnderTheConsumer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]child{cooperative: {}, serverSide: {Protocol: serverSide}} {
		for _, versions := range []int{20, 200} {
			t.Run(fmt.Sprintf("%s/%d", name, versions), func(t *testing.T) {
				t.Parallel()
				ctx := t.Context()
				c, pool := consuming(t, c, 2)
				producedAt(t, c.Brokers, pool, c.Topic, "old", 4, 100, 0)
				m := start(t, c)
				handled(ctx, t, pool, 40*time.Second)
				recreate(t, c, 2)
				producedAt(t, c.Brokers, pool, c.Topic, "new", 4, versions, 10)
				handled(ctx, t, pool, 60*time.Second)
				require.NoError(t, m.terminate())
				require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble IS NOT NULL`))
			})
		}
	}
}

// recreate deletes the topic of a consumer and makes it anew.
func recreate(t *testing.T, c child, partitions int32) {
	t.Helper()
	ctx := t.Context()
	admin := kadm.NewClient(kafkatest.ClientAt(t, c.Brokers))
	deleted, err := admin.DeleteTopic(ctx, c.Topic)
	require.NoError(t, errors.Join(err, deleted.Err))
	kafkatest.Gone(t, c.Brokers, c.Topic) // else a producer could find the old one
	eventually(t, 30*time.Second, "the topic is made anew", func() (bool, any) {
		made, err := admin.CreateTopic(ctx, partitions, 1, nil, c.Topic)
		return err == nil && made.Err == nil, errors.Join(err, made.Err)
	})
}

// Property: partitions that are added while records come are found, and nothing of what is written
// before or after is lost or has its effect twice. The order of a key that moves is not promised.
// Row C37 of guarantees.md.
func TestPartitionsAddedUnderLoad(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]child{cooperative: {}, serverSide: {Protocol: serverSide}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			c, pool := consuming(t, c, 3)
			members := []*process{start(t, c), start(t, c)}
			for part := range 10 {
				producedAt(t, c.Brokers, pool, c.Topic, fmt.Sprintf("part%d-", part), 20, 10, 10)
				if part == 4 {
					added, err := kadm.NewClient(kafkatest.ClientAt(t, c.Brokers)).UpdatePartitions(ctx, 6, c.Topic)
					require.NoError(t, errors.Join(err, added.Error()))
				}
			}
			later := 0
			eventually(t, 60*time.Second, "a new partition is filled", func() (bool, any) { // a producer hears of it late
				filled, err := filledPartitions(ctx, t, c)
				if filled <= 3 {
					producedAt(t, c.Brokers, pool, c.Topic, fmt.Sprintf("later%d-", later), 20, 1, 0) //nolint:contextcheck // the test's
					later++
				}
				return filled > 3, fmt.Sprint(filled, err)
			})
			allHandled(ctx, t, pool, 60*time.Second)
			positions := func() (bool, any) {
				n := count(ctx, t, pool, `SELECT count(*) FROM effectonce.consumer_positions`)
				return n == 6, n
			}
			eventually(t, 60*time.Second, "the new partitions are taken, also empty ones", positions)
			for _, m := range members {
				require.NoError(t, m.terminate())
			}
			requireOnce(ctx, t, pool)
			all, n := positions()
			require.True(t, all, n)
		})
	}
}

// filledPartitions counts partitions with records. A partition that is new may not have a leader
// yet, which is an error.
func filledPartitions(ctx context.Context, t *testing.T, c child) (n int, err error) {
	t.Helper()
	ends, err := kadm.NewClient(kafkatest.ClientAt(t, c.Brokers)).ListEndOffsets(ctx, c.Topic)
	ends.Each(func(end kadm.ListedOffset) {
		if end.Offset > 0 {
			n++
		}
	})
	return n, err
}

// Property: when Kafka forgets the group's offsets, and an operator resets them to the end or to
// the beginning, between two runs, the database's position counts, unless the operator's is
// earlier: then the claims drop the redelivered messages. Row C35 of guarantees.md.
func TestForgottenAndResetOffsets(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, pool := consuming(t, child{}, 2)
	admin := kadm.NewClient(kafkatest.ClientAt(t, c.Brokers))
	change := map[string]func() error{
		"forgotten": func() error {
			deleted, err := admin.DeleteGroup(ctx, c.Group)
			return errors.Join(err, deleted.Err)
		},
		"end":   func() error { return commitAt(ctx, admin, c, 1<<40) },
		"start": func() error { return commitAt(ctx, admin, c, 0) },
	}
	for _, name := range []string{"end", "start", "forgotten"} {
		producedAt(t, c.Brokers, pool, c.Topic, name, 3, 20, 0)
		m := start(t, c)
		handled(ctx, t, pool, 40*time.Second)
		require.NoError(t, m.terminate())
		eventually(t, 30*time.Second, "the offsets are changed: "+name, func() (bool, any) {
			err := change[name]() // refused while the group is not yet empty
			return err == nil, err
		})
	}
	m := start(t, c)
	producedAt(t, c.Brokers, pool, c.Topic, "last", 3, 20, 0)
	handled(ctx, t, pool, 40*time.Second)
	require.NoError(t, m.terminate())
}

func commitAt(ctx context.Context, admin *kadm.Client, c child, at int64) error {
	ends, err := admin.ListEndOffsets(ctx, c.Topic)
	if err != nil {
		return err
	}
	offsets := kadm.Offsets{}
	ends.Each(func(end kadm.ListedOffset) {
		offsets.Add(kadm.Offset{Topic: c.Topic, Partition: end.Partition, At: min(at, end.Offset), LeaderEpoch: -1})
	})
	return admin.CommitAllOffsets(ctx, c.Group, offsets)
}
