package relay_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// Property: with SkipDead a row that is itself wrong holds no other row, in its page, in later ones
// and after a retry that failed, and none of them is lost or doubled. Rows that waited behind one
// are released. Rows of a missing topic still wait in their order. Row O10 of guarantees.md.
func TestSkippedDeadRowHoldsNobody(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic, missing := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "5000"), kafkatest.UnusedTopic(t)
		large := strings.Repeat("x", 6000)
		retry := func(keys string) {
			_, err := pool.Exec(ctx, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'too_large' AND convert_from(key, 'UTF8') LIKE $1`, keys)
			require.NoError(t, err)
		}
		for _, key := range []string{"k", "retried"} {
			insert(t, pool, topic, key, "0")
			insert(t, pool, topic, key, large)
			insert(t, pool, topic, key, "1")
		}
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		require.Equal(t, []string{"0"}, keyed(t, topic, "k"), "it holds its key by default")

		reasons := map[relay.Reason]int{}
		skipping := newRelay(t, pool, relay.Config{ExactlyOnce: exactly, SkipDead: true, Hooks: relay.Hooks{Dead: func(_ string, reason relay.Reason) { reasons[reason]++ }}})
		retry("retried")
		drain(t, skipping)
		require.Equal(t, []string{"0", "1"}, keyed(t, topic, "k"), "what waited goes on")
		require.Equal(t, []string{"0", "1"}, keyed(t, topic, "retried"), "also beside a retry that fails")
		insert(t, pool, missing, "k", "a")
		insert(t, pool, topic, "k", "2")
		insert(t, pool, missing, "k", "b")
		insert(t, pool, topic, "k", large+"y")
		insert(t, pool, topic, "k", "3")
		drain(t, skipping)
		insert(t, pool, topic, "k", "4")
		retry("%")
		drain(t, skipping)
		require.Equal(t, []string{"0", "1", "2", "3", "4"}, keyed(t, topic, "k"))
		require.Equal(t, map[relay.Reason]int{relay.ReasonTooLarge: 1, relay.ReasonUnknownTopic: 1, relay.ReasonBehind: 1}, reasons, "only rows of a missing topic wait in their order")
		require.Equal(t, 3, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE reason = 'too_large' AND state = 'held'`))

		kafkatest.Configure(t, topic, "max.message.bytes", "10000")
		retry("%")
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly, SkipDead: true}))
		require.Equal(t, []string{"0", "1", "2", "3", "4", large, large + "y"}, keyed(t, topic, "k"))
		require.Equal(t, 2, dead(t, pool))
	})
}
