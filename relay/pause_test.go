package relay_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

var ana = relay.Operator{Who: "ana", Why: "test"}

// Property: a pause is confirmed only after every row that was read before it is acknowledged:
// while a broker keeps its answer back, the wait names the replica; afterwards no row of the topic
// comes, and other topics flow.
func TestPauseIsConfirmedBehindWhatIsInFlight(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders", "other"))
	produced, answer := make(chan struct{}), make(chan struct{})
	var once, end sync.Once
	release := func() { end.Do(func() { close(answer) }) }
	t.Cleanup(release)
	fake.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		once.Do(func() { close(produced) })
		fake.SleepControl(func() { <-answer })
		return nil, nil, false
	})
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, relay.Config{Lease: time.Minute, Owner: "the replica"})
	require.NoError(t, err)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(running) }()
	t.Cleanup(func() { release(); stop(); require.NoError(t, <-done) })

	insert(t, pool, "orders", "k", "before")
	<-produced
	changed, err := relay.Pause(ctx, pool, ana, 0, "orders")
	require.NoError(t, err)
	require.Equal(t, []string{"orders"}, changed)
	testwait.True(t, "the relay looked, and could confirm", func() bool {
		return one[bool](t, pool, `SELECT bool_or(obeys = '{}') FROM effectonce.outbox_replicas`)
	})
	var unconfirmed *relay.UnconfirmedError
	_, err = relay.Pause(ctx, pool, ana, 4*time.Second, "orders") // longer than from one look to the next
	require.ErrorAs(t, err, &unconfirmed)
	require.Equal(t, []string{"the replica"}, unconfirmed.Owners)

	release()
	_, err = relay.Pause(ctx, pool, ana, testwait.Bound, "orders")
	require.NoError(t, err)
	count := func(topic string) int { return len(kafkatest.ReadAllAt(t, fake.ListenAddrs(), topic)) }
	require.Equal(t, 1, count("orders"))
	insert(t, pool, "orders", "k", "after")
	insert(t, pool, "other", "k", "flows")
	testwait.True(t, "the other topic flows", func() bool { return count("other") == 1 && dead(t, pool) == 1 })
	require.Equal(t, 1, count("orders"))
	_, err = relay.Resume(ctx, pool, ana, "orders")
	require.NoError(t, err)
	testwait.True(t, "it is resumed", func() bool { return count("orders") == 2 })
}

// Property: when a wait says that the pause holds, no row of the topic comes any more, however many
// are being written, and whichever replicas share the shards.
func TestPauseHoldsWhenItIsConfirmed(t *testing.T) {
	longtest.Only(t, "nine looks of three replicas in real time")
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	for _, owner := range []string{"a", "b", "stands by"} {
		running(t, pool, relay.Config{Owner: owner, Shards: 2, PageRowsMax: 20, Lease: 30 * time.Second})
	}
	var writing sync.WaitGroup
	stop := make(chan struct{})
	end := sync.OnceFunc(func() { close(stop); writing.Wait() })
	defer end()
	writing.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT $1, k::text::bytea, 'v' FROM generate_series(1, 20) k`, topic); err != nil {
				t.Errorf("write: %v", err)
				return
			}
		}
	})
	for range 3 {
		before := kafkatest.Count(t, topic)
		testwait.True(t, "rows flow", func() bool { return kafkatest.Count(t, topic) > before })
		_, err := relay.Pause(ctx, pool, ana, testwait.Bound, topic)
		require.NoError(t, err)
		held, waiting := kafkatest.Count(t, topic), dead(t, pool)
		testwait.True(t, "rows wait", func() bool { return dead(t, pool) > waiting+100 })
		require.Equal(t, held, kafkatest.Count(t, topic), "rows came after the pause was confirmed")
		_, err = relay.Resume(ctx, pool, ana, topic)
		require.NoError(t, err)
		testwait.True(t, "it is resumed", func() bool {
			return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE reason = 'paused'`) == 0
		})
	}
}

// Property: without a replica that runs a pause is not confirmed, nor by one that does not say what
// it obeys, or obeys an earlier pause of the topic; a replica whose time is over is not asked.
func TestPauseIsConfirmedByAllThatRun(t *testing.T) {
	longtest.Only(t, "waits of real seconds")
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	// Some looks, also on a busy machine.
	wait := func() error {
		_, err := relay.Pause(ctx, pool, ana, 5*time.Second, "orders")
		return err
	}
	require.ErrorContains(t, wait(), "no replica of the relay runs")
	must(t, pool, `INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until) VALUES ('default', 'gone', clock_timestamp() - interval '1 second'), ('default', 'old', 'infinity'), ('another', 'x', 'infinity')`)
	require.ErrorContains(t, wait(), "not confirmed by old: it may still publish")
	must(t, pool, `UPDATE effectonce.outbox_replicas SET obeys = ARRAY(SELECT id FROM effectonce.outbox_paused) WHERE owner = 'old'`)
	require.NoError(t, wait())
	_, err := relay.Resume(ctx, pool, ana, "orders")
	require.NoError(t, err)
	require.ErrorContains(t, wait(), "not confirmed by old: it may still publish")
	must(t, pool, `DELETE FROM effectonce.outbox_replicas`)
	must(t, pool, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch) VALUES ('default', 0, 'frozen', 'infinity', 1)`)
	require.ErrorContains(t, wait(), "not confirmed by frozen (holds a lease, and is not alive)")
}
