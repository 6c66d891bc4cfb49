package consumer_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// Property: no key, payload or header gets into a log, also not into one that has everything, when
// messages are handled, dropped as duplicates, or parked for what their handler, ID or size is. Row
// S4 of security.md.
func TestNothingOfAMessageIsLogged(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	const canary = "canary-4711"
	send := func(payload string, more ...kgo.RecordHeader) {
		h.produceRecord(&kgo.Record{
			Key: []byte(canary + payload[:3]), Value: []byte(canary + payload),
			Headers: append([]kgo.RecordHeader{{Key: canary + "-name", Value: []byte(canary + "-value")}}, more...),
		})
	}
	id := func(text string) kgo.RecordHeader { return kgo.RecordHeader{Key: "message-id", Value: []byte(text)} }
	send("fine", id("1"))
	send("fine", id("1"))                        // duplicate
	send("other", id("1"))                       // conflict
	send("odd", id("2"), id("3"))                // invalid
	send(strings.Repeat("large", 1000), id("4")) // too large
	send("broken", id("5"))                      // fails
	send("panics", id("6"))                      // panics
	send("last", id("7"), id("7"))
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		switch string(msg.Value) {
		case canary + "broken":
			return consumer.Permanent(errors.New("the handler's own text"))
		case canary + "panics":
			panic("the handler's own text")
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) {
		c.Dedup, c.MessageBytesMax, c.AttemptsMax = consumer.DedupByIDAndPayload, 2<<10, 2
		c.Logger = slog.New(slog.NewTextHandler(h.log, &slog.HandlerOptions{Level: slog.LevelDebug - 4}))
	})
	h.wait("all of them", func() bool { return h.position() == 8 })
	require.NoError(t, stop())
	require.GreaterOrEqual(t, len(h.parked()), 5, "the test's own premise")
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE reason = 'behind'`), "each was tried: a key of its own")
	require.Equal(t, 2, strings.Count(h.log.String(), "message cannot be handled and is parked"), "it fails, it panics")
	require.NotContains(t, h.log.String(), canary)
}
