package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
)

// requests counts what a client asks of the brokers.
type requests struct{ joins, heartbeats atomic.Int64 }

func (r *requests) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	switch {
	case err != nil:
	case key == kmsg.JoinGroup.Int16():
		r.joins.Add(1)
	case key == kmsg.Heartbeat.Int16():
		r.heartbeats.Add(1)
	}
}

// Property: a stop and a rebalance that coincide end cleanly: the batch in progress is finished and
// its offset committed before another member begins. That member gets nothing twice and does not
// treat it as a crash. Row C42 of guarantees.md.
func TestStopAndRebalanceTogether(t *testing.T) {
	t.Parallel()
	for name, balancer := range map[string]kgo.GroupBalancer{"eager": kgo.RangeBalancer(), "cooperative": kgo.CooperativeStickyBalancer()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			begun, release := make(chan struct{}), make(chan struct{})
			var fresh, again atomic.Int64
			count := func(cfg *consumer.Config) {
				cfg.BatchMax = 1
				cfg.Hooks.Processed = func(p consumer.Processed) { fresh.Add(int64(p.Fresh)); again.Add(int64(p.Duplicates)) }
			}
			asked, other := &requests{}, &requests{}
			membership := func(r *requests) []kgo.Opt {
				return []kgo.Opt{kgo.Balancers(balancer), kgo.HeartbeatInterval(100 * time.Millisecond), kgo.WithHooks(r)}
			}
			stop := h.runWith(h.pool, membership(asked), consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				close(begun)
				<-release
				return effect(ctx, tx, msg)
			}), count)
			h.produce("1", "2")
			<-begun
			ended := make(chan error, 1)
			go func() { ended <- stop() }()
			h.runWith(h.pool, membership(other), consumer.Each(effect), func(cfg *consumer.Config) {
				cfg.Hooks.Processed = func(p consumer.Processed) { again.Add(int64(p.Duplicates)) }
			})
			h.wait("the other joins", func() bool { return other.joins.Load() > 0 })
			heard := asked.heartbeats.Load()
			h.wait("the first hears of it", func() bool { return asked.heartbeats.Load() > heard+5 })
			close(release)
			require.NoError(t, <-ended)
			require.EqualValues(t, 1, fresh.Load(), "what was under way is finished")
			h.waitEffects(2)
			require.Zero(t, again.Load())
			require.NotContains(t, h.log.String(), "ended without finishing anything")
		})
	}
}
