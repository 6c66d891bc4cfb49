package consumer_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// Property: with workers, messages that share a transaction with a failing one do not wait for its
// attempts, unless they have its key; those keep their order.
func TestFailingMessageHoldsUpNoOtherKeyOfItsTransaction(t *testing.T) {
	t.Parallel()
	for name, order := range map[string]consumer.Order{"by key": consumer.OrderByKey, "unordered": consumer.OrderUnordered} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceKeyed("bad:1", "a:1", "bad:2", "b:1", "c:1", "bad:3")
			var mu sync.Mutex
			var calls []string
			stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, string(msg.Value))
				tries := 0
				for _, call := range calls {
					if call == "bad:1" {
						tries++
					}
				}
				if string(msg.Value) == "bad:1" && tries < 4 {
					return errBad
				}
				return effect(ctx, tx, msg)
			}), func(c *consumer.Config) { c.Order, c.Workers = order, 1 })
			h.wait("effects", func() bool { return h.number(`SELECT count(*) FROM effects`) == 6 })
			require.NoError(t, stop())
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
}

// Property: a header of a producer that has the name under which headers are stored raw is a header
// like any other: the message is retried, and so are other parked messages.
func TestHeaderNamedAsOursIsRetried(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	for _, value := range []string{"x", `[["YQ==","Yg=="]]`} {
		h.produceRecord(&kgo.Record{Value: []byte("bad"), Timestamp: time.Now(), Headers: []kgo.RecordHeader{{Key: "effectonce-raw-headers", Value: []byte(value)}}})
	}
	fails := true
	var mu sync.Mutex
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if fails {
			return consumer.Permanent(errBad)
		}
		return effect(ctx, tx, msg)
	}), parkAll)
	h.wait("parked", func() bool { return len(h.parked()) == 2 })
	mu.Lock()
	fails = false
	mu.Unlock()
	h.retry()
	h.waitEffects(2)
	require.NoError(t, stop())
}
