package relay_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: replicas divide the shards evenly, whichever replicas join and leave. The shards of a
// stopped replica move at once, long before its leases would have expired. Row O5 of guarantees.md.
func TestReplicasShareShards(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 3)
	const lease = 2 * testwait.Bound
	replica := func(owner string) (stop func()) {
		return running(t, pool, relay.Config{Owner: owner, Shards: 4, Lease: lease})
	}
	share := func(want string) {
		t.Helper()
		testwait.True(t, want, func() bool {
			shares := one[string](t, pool, `SELECT coalesce(string_agg(owner || ' ' || n, ', ' ORDER BY owner), '')
				FROM (SELECT owner, count(*) AS n FROM effectonce.outbox_progress_now WHERE owner IS NOT NULL GROUP BY owner) s`)
			return shares == want
		})
	}
	first := replica("a")
	share("a 4")
	second, third := replica("b"), replica("c")
	share("a 2, b 1, c 1")
	first()
	share("b 2, c 2")
	for i := range 40 {
		insert(t, pool, topic, fmt.Sprint("k", i%8), fmt.Sprint(i))
	}
	testwait.True(t, "all is published", func() bool { return kafkatest.Count(t, topic) >= 40 })
	for _, stop := range []func(){second, third} {
		stop()
	}
	require.Equal(t, 40, kafkatest.Count(t, topic), "nothing twice")
	for k := range 8 {
		for i, v := range keyed(t, topic, fmt.Sprint("k", k)) {
			require.Equal(t, fmt.Sprint(k+8*i), v)
		}
	}
}

// Property: a program that publishes and relays need not wait for the relay's next look.
func TestWakeEndsThePause(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{})
	relay.PollEvery(r, time.Hour)
	r.Wake() // before anybody waits
	insert(t, pool, topic, "k", "first")
	stop := starts(t, r)
	testwait.True(t, `kafkatest.Count(t, topic) == 1`, func() bool { return kafkatest.Count(t, topic) == 1 })
	insert(t, pool, topic, "k", "second")
	testwait.True(t, "the second row is published", func() bool {
		r.Wake()
		return kafkatest.Count(t, topic) == 2
	})
	stop()
}

// Property: a relay that an operator deleted while a replica stood by makes itself known again.
func TestDeletedRelayComesBack(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	running(t, pool, relay.Config{})
	insert(t, pool, topic, "k", "first")
	testwait.True(t, `kafkatest.Count(t, topic) == 1`, func() bool { return kafkatest.Count(t, topic) == 1 })
	_, err := pool.Exec(ctx, `WITH r AS (DELETE FROM effectonce.outbox_relays), s AS (DELETE FROM effectonce.outbox_replicas) DELETE FROM effectonce.outbox_progress`)
	require.NoError(t, err)
	testwait.True(t, `one[int](t, pool, 'SELECT count(*) FROM effectonce.outbox_relays') == 1`, func() bool { return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_relays`) == 1 })
	insert(t, pool, topic, "k", "second")
	testwait.True(t, `kafkatest.Count(t, topic) >= 2`, func() bool { return kafkatest.Count(t, topic) >= 2 })
}

// Property: a released lease stays free, also if its renewal was under way: otherwise no replica
// would publish the shard.
func TestLeaseGivenBackIsNotRenewed(t *testing.T) {
	t.Parallel()
	renewed, err := newRelay(t, pgtest.Pool(t), relay.Config{}).RenewsWhatItGaveBack(t.Context())
	require.NoError(t, err)
	require.False(t, renewed)
}

// lockedBuffer is what a relay may write to while a test reads it.
type lockedBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// Property: a relay on an old primary ends with that error.
func TestRelayOfAnOldPrimaryEndsWithItsError(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	drain(t, newRelay(t, pool, relay.Config{}))
	must(t, pool, `UPDATE effectonce.outbox_progress SET timeline = timeline + 1, lease_until = NULL`)
	r, ended := newRelay(t, pool, relay.Config{}), make(chan error, 1)
	go func() { ended <- r.Run(t.Context()) }()
	require.ErrorIs(t, testwait.Chan(t, "the relay refuses", ended), relay.ErrOldPrimary)
}
