package relay_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// Property: no key, payload or header of a row gets into a log, also not into one that has
// everything, whatever becomes of the row. Row S4 of security.md.
func TestNothingOfARowIsLogged(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, topic, unknown, log := pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "4096"), kafkatest.UnusedTopic(t), &lockedBuffer{}
		const canary = "canary-4711"
		for i, of := range []string{topic, topic, unknown, topic} {
			size := 10
			if i == 1 {
				size = 10_000
			}
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ($1, convert_to($2 || $3, 'UTF8'), convert_to($2 || $4, 'UTF8'), jsonb_build_object($2, $2))`,
				of, canary, fmt.Sprint(i), incompressible(size))
		}
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly, Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug - 4}))})
		starts(t, r)
		await(t, "one is too large, one has no topic", func() bool { return dead(t, pool) == 2 })
		await(t, "the others", func() bool { return len(values(t, topic)) == 2 })
		require.Contains(t, strings.ToLower(log.String()), "dead", "the test's own premise")
		require.NotContains(t, log.String(), canary)
	})
}
