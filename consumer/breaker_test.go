package consumer_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
)

// Property: a share of 1 never pauses, whatever happens to the messages: 150 of 150 are parked, or
// dead letters.
func TestParkShareOfOneNeverPauses(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]consumer.OnFailure{"park": consumer.OnFailurePark, "dead letter": consumer.OnFailureDeadLetter} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceAll(make([]string, 150)...)
			stop := h.run(consumer.Each(func(context.Context, pgx.Tx, *consumer.Message) error { return consumer.Permanent(errBad) }),
				func(c *consumer.Config) {
					c.ParkShareMax, c.OnFailure = 1, policy
					if policy == consumer.OnFailureDeadLetter {
						c.DeadLetterTopic = "letters"
					}
				})
			h.wait("position", func() bool { return h.position() == 150 })
			require.NoError(t, stop())
			require.Equal(t, 150, h.number(`SELECT (SELECT count(*) FROM effectonce.parked_messages) + (SELECT count(*) FROM effectonce.outbox)`))
			require.NotContains(t, h.log.String(), "pauses")
		})
	}
}

// Property: failures count for the last messages and for ten minutes: on a quiet partition those of
// an old outage do not pause later messages, and a flood pauses at the configured share.
func TestBreakerForgetsInTimeAndInMessages(t *testing.T) {
	t.Parallel()
	b := consumer.NewBreaker(0.05)
	for range 5 {
		require.True(t, b.Park())
	}
	require.False(t, b.Park(), "the sixth of the last hundred")
	b.Now = 9 * time.Minute
	require.False(t, b.Park(), "not yet forgotten")
	b.Now = 11 * time.Minute
	require.True(t, b.Park(), "no message came meanwhile, but the failures are old")

	b = consumer.NewBreaker(0.05)
	for range 5 {
		require.True(t, b.Park())
	}
	b.Handled(94)
	require.False(t, b.Park(), "99 messages")
	b.Handled(2)
	require.True(t, b.Park(), "the first failure is more than a hundred messages ago")

	b = consumer.NewBreaker(0.01)
	require.True(t, b.Park(), "one may always be parked")
	require.False(t, b.Park())
}
