package relay_test

import (
	"testing"
	"time"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

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
