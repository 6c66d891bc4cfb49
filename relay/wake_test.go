package relay_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: a relay that listens polls the outbox when a program notifies it, also after its
// listening connection was lost: rows that were notified during that time are found when it listens
// again.
func TestNotifyEndsThePause(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{WakeOnNotify: true, Lease: 10 * time.Minute})
	relay.PollEvery(r, time.Hour)
	stop := starts(t, r)
	arrives := func(n int) {
		t.Helper()
		testwait.True(t, "the rows arrive", func() bool { return kafkatest.Count(t, topic) == n })
	}
	// The notification may come before the relay pauses, so it is sent more than once; the relay
	// would poll in an hour.
	notify := func() bool { return assert.NoError(t, outbox.Notify(ctx, pool)) }
	notified := func(n int) {
		t.Helper()
		testwait.True(t, "the rows arrive", func() bool { return notify() && kafkatest.Count(t, topic) == n })
	}
	insert(t, pool, topic, "k", "first")
	notified(1)
	insert(t, pool, topic, "k", "second")
	notified(2)

	insert(t, pool, topic, "k", "third")
	testwait.True(t, "its listening connection is ended", func() bool {
		return one[bool](t, pool, `SELECT coalesce(bool_and(pg_terminate_backend(pid)), false) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'`)
	})
	arrives(3) // without a notification
	stop()
}

// Property: a relay that is woken while it reads the outbox looks again at once: what it reads may
// have been there before.
func TestWakeDuringALookIsNotLost(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	tracer := newStalled(func() {})
	tracer.fetch.Store(true)
	r := newRelay(t, traced(t, pool, tracer), relay.Config{Lease: 10 * time.Minute})
	relay.PollEvery(r, time.Hour)
	stop := starts(t, r)
	<-tracer.waits // it has read nothing
	insert(t, pool, topic, "k", "1")
	r.Wake()
	close(tracer.release)
	testwait.True(t, "the row is published before the pause is over", func() bool { return kafkatest.Count(t, topic) == 1 })
	stop()
}
