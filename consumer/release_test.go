package consumer_test

import (
	"context"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Property: a parked message that alone has more bytes than a release takes at once is released,
// and the messages behind it follow.
func TestReleaseOfALargeMessage(t *testing.T) {
	t.Parallel()
	const size = consumer.ReleaseBytesMax + 1
	var fixed atomic.Bool
	h := newHarness(t, 1)
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !fixed.Load() {
			return consumer.Permanent(errBad)
		}
		_, err := tx.Exec(ctx, `INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), strconv.Itoa(len(msg.Value)))
		return err
	}), nil)
	h.produceKeyed("a:bad", "a:1")
	h.waitHandled(2)
	h.exec(`UPDATE effectonce.parked_messages SET payload = convert_to(repeat('x', ` + strconv.Itoa(size) + `), 'UTF8') WHERE payload = 'a:bad'`)
	fixed.Store(true)
	h.retry()
	h.waitEffects(2)
	h.wait("nothing is parked", func() bool { return len(h.parked()) == 0 })
	require.NoError(t, stop())
	require.Equal(t, []string{strconv.Itoa(size), "3"}, h.values())
}

// Property: a released message is claimed again if its claim was forgotten: a redelivery that comes
// after it has no second effect. Row C15 of guarantees.md.
func TestReleasedMessageIsClaimedAgain(t *testing.T) {
	t.Parallel()
	var fixed atomic.Bool
	handler := failing(&fixed)
	h := newHarness(t, 1)
	stop := h.run(handler, nil)
	h.produceKeyed("a:bad")
	h.waitHandled(1)
	h.exec(`DELETE FROM effectonce.processed_messages`)
	fixed.Store(true)
	h.retry()
	h.untilEffects(1, stop)
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.processed_messages`))

	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 0`)
	h.untilHandled(1, h.run(handler, nil))
	require.Equal(t, []string{"a:bad"}, h.values())
}

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
	balancers := map[string]kgo.GroupBalancer{"eager": kgo.RangeBalancer(), "cooperative": kgo.CooperativeStickyBalancer()}
	each(t, balancers, func(t *testing.T, h *harness, _ string, balancer kgo.GroupBalancer) {
		t.Helper()
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
		h.kafka = membership(asked)
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			close(begun)
			<-release
			return effect(ctx, tx, msg)
		}), count)
		h.produce("1", "2")
		<-begun
		ended := make(chan error, 1)
		go func() { ended <- stop() }()
		h.kafka = membership(other)
		h.run(consumer.Each(effect), func(cfg *consumer.Config) {
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

// Property: with workers, messages that share a transaction with a failing one do not wait for its
// attempts, unless they have its key; those keep their order.
func TestFailingMessageHoldsUpNoOtherKeyOfItsTransaction(t *testing.T) {
	t.Parallel()
	each(t, workerOrders, func(t *testing.T, h *harness, _ string, order consumer.Order) {
		t.Helper()
		h.produceKeyed("bad:1", "a:1", "bad:2", "b:1", "c:1", "bad:3")
		var seen list
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			seen.add(string(msg.Value))
			if string(msg.Value) == "bad:1" && seen.count("bad:1") < 4 {
				return errBad
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) { c.Order, c.Workers = order, 1 })
		h.wait("effects", func() bool { return h.number(`SELECT count(*) FROM effects`) == 6 })
		require.NoError(t, stop())
		calls := seen.all()
		second := slices.Index(calls[1:], "bad:1") + 1
		for _, other := range []string{"a:1", "b:1", "c:1"} {
			require.Less(t, slices.Index(calls, other), second, "%v", calls)
		}
		if order == consumer.OrderByKey {
			values := h.values()
			require.Less(t, slices.Index(values, "bad:1"), slices.Index(values, "bad:2"))
			require.Less(t, slices.Index(values, "bad:2"), slices.Index(values, "bad:3"))
		}
	})
}

// Property: a parked message that an operator's transaction locks waits for it, and not longer; others
// that are due, and new ones, are handled meanwhile. However long failed messages pause.
func TestLockedParkedMessageHoldsUpOnlyItself(t *testing.T) {
	t.Parallel()
	for name, order := range orders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var fixed atomic.Bool
			h := newHarness(t, 1)
			stop := h.run(failing(&fixed), func(c *consumer.Config) { order(c); c.RetryMin, c.RetryMax = time.Hour, time.Hour })
			h.produceKeyed("a:bad", "b:bad")
			h.waitParked("permanent", "permanent")
			fixed.Store(true)
			h.exec(`UPDATE effectonce.parked_messages SET state = 'retry', released_at = NULL, retry_at = clock_timestamp() + interval '1 s'`)
			tx, err := h.pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `SELECT FROM effectonce.parked_messages WHERE key = 'a' FOR UPDATE`)
			require.NoError(t, err)
			h.waitEffects(1)
			h.produceKeyed("c:1", "d:1")
			h.waitEffects(3)
			require.NotContains(t, h.values(), "a:bad")
			require.NoError(t, tx.Rollback(t.Context()))
			h.untilEffects(4, stop)
		})
	}
}

// Property: a clean stop is no attempt at parked messages: not at those that had not begun, nor at the one
// that it ended.
func TestStopIsNoAttemptAtParkedMessages(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("a", "b", "c")
	var repaired atomic.Bool
	begun := make(chan struct{}, 3)
	stop := h.run(consumer.Each(func(ctx context.Context, _ pgx.Tx, _ *consumer.Message) error {
		if !repaired.Load() {
			return consumer.Permanent(errBad)
		}
		begun <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax, c.DrainMax = 1, 1, 10*time.Millisecond })
	h.waitParked("permanent", "permanent", "permanent")
	repaired.Store(true)
	h.retry()
	testwait.Chan(t, "a handler", begun)
	require.NoError(t, stop())
	require.Equal(t, 3, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'retry' AND attempts = 0`))
}

// Property: what waited behind a message that is retried runs in transactions of the usual size: other
// keys, a pause and a stop do not wait for all of it.
func TestReleasedBacklogLetsOthersPass(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	const n = 200 // more than the first transaction, whose size is that of transactions which park
	var repaired atomic.Bool
	h.produceKeyed(versions(1, 0, n)...)
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !repaired.Load() {
			return consumer.Permanent(errBad)
		}
		if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.005)`); err != nil {
			return err
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.ParkShareMax, c.BatchTimeMax = 1, 100*time.Millisecond })
	h.wait("parked", func() bool { return len(h.parked()) == n })
	repaired.Store(true)
	h.retry()
	h.wait("it begins", func() bool { return h.number(`SELECT count(*) FROM effects`) > 0 })
	h.produceKeyed("other:0")
	h.untilEffects(n+1, stop)
	require.Less(t, h.number(`SELECT count(*) FROM effects WHERE n < (SELECT n FROM effects WHERE value = 'other:0')`), n-10)
}
