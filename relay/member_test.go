package relay_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// Property: replicas divide the shards evenly, whoever comes and goes; the shards of one that is stopped move at once,
// long before its leases would have run out; and another number of shards is taken on while rows flow. Row O5.
func TestReplicasShareShards(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 3)
	const lease = 30 * time.Second
	replica := func(owner string) (stop func()) {
		r := newRelay(t, pool, relay.Config{Owner: owner, Shards: 4, Lease: lease}) //nolint:contextcheck // the test's
		running, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- r.Run(running) }()
		return func() {
			cancel()
			require.NoError(t, <-done)
		}
	}
	share := func(want string) {
		t.Helper()
		shares := ""
		require.Eventually(t, func() bool {
			shares = one[string](t, pool, `SELECT coalesce(string_agg(owner || ' ' || n, ', ' ORDER BY owner), '')
				FROM (SELECT owner, count(*) AS n FROM effectonce.outbox_progress WHERE owner IS NOT NULL GROUP BY owner) s`)
			return shares == want
		}, lease/2, 20*time.Millisecond, "%s", want)
	}
	first := replica("a")
	share("a 4")
	second, third := replica("b"), replica("c")
	share("a 2, b 1, c 1")
	first()
	share("b 2, c 2")
	first = replica("a")
	share("a 2, b 1, c 1")
	for i := range 40 {
		insert(t, pool, topic, fmt.Sprint("k", i%8), fmt.Sprint(i))
	}
	_, err := relay.SetShards(ctx, pool, "", "default", "ana", "test", 6)
	require.NoError(t, err)
	for i := 40; i < 80; i++ {
		insert(t, pool, topic, fmt.Sprint("k", i%8), fmt.Sprint(i))
	}
	share("a 2, b 2, c 2")
	_, err = relay.SetShards(ctx, pool, "", "default", "ana", "test", 1)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_progress`) == 1 }, lease/2, 20*time.Millisecond)
	share("a 1")
	require.Eventually(t, func() bool { return kafkatest.Count(t, topic) >= 80 }, 20*time.Second, 20*time.Millisecond)
	for _, stop := range []func(){first, second, third} {
		stop()
	}
	require.Equal(t, 80, kafkatest.Count(t, topic), "nothing twice")
	for k := range 8 {
		for i, v := range keyed(t, topic, fmt.Sprint("k", k)) {
			require.Equal(t, fmt.Sprint(k+8*i), v)
		}
	}
	_, err = relay.SetShards(ctx, pool, "", "never", "ana", "test", 1)
	require.ErrorIs(t, err, relay.ErrUnknownRelay)
	_, err = relay.SetShards(ctx, pool, "", "default", "ana", "test", 257)
	require.ErrorContains(t, err, "want 1 to 256")
}

// Property: a program that publishes and relays need not wait for the relay's next look.
func TestWakeEndsThePause(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{PollMin: time.Minute, PollMax: time.Minute})
	r.Wake() // before anybody waits
	insert(t, pool, topic, "k", "first")
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(running) }()
	require.Eventually(t, func() bool { return kafkatest.Count(t, topic) == 1 }, 20*time.Second, 10*time.Millisecond)
	insert(t, pool, topic, "k", "second")
	require.Eventually(t, func() bool {
		r.Wake()
		return kafkatest.Count(t, topic) == 2
	}, 20*time.Second, 10*time.Millisecond)
	stop()
	require.NoError(t, <-done)
}

// Property: a relay that an operator deleted while a replica stood by makes itself known again.
func TestDeletedRelayComesBack(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	running(t, pool, relay.Config{})
	insert(t, pool, topic, "k", "first")
	require.Eventually(t, func() bool { return kafkatest.Count(t, topic) == 1 }, 20*time.Second, 10*time.Millisecond)
	_, err := pool.Exec(ctx, `WITH r AS (DELETE FROM effectonce.outbox_relays), s AS (DELETE FROM effectonce.outbox_replicas) DELETE FROM effectonce.outbox_progress`)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_relays`) == 1 }, 20*time.Second, 10*time.Millisecond)
	insert(t, pool, topic, "k", "second")
	require.Eventually(t, func() bool { return kafkatest.Count(t, topic) >= 2 }, 20*time.Second, 10*time.Millisecond)
}

// Property: a lease that was given back stays free, also where its renewal was on the way: nobody would publish the shard.
func TestLeaseGivenBackIsNotRenewed(t *testing.T) {
	t.Parallel()
	renewed, err := newRelay(t, pgtest.Pool(t), relay.Config{}).RenewsWhatItGaveBack(t.Context())
	require.NoError(t, err)
	require.False(t, renewed)
}
