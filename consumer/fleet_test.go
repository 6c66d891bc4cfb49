package consumer_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
)

// Property: a key that is retried slowly delays only itself: with workers all other keys are
// handled, also where more keys are retried than there are workers, and more of its messages arrive
// than one worker's share. Row C14 of guarantees.md.
func TestSlowRetriesStopOnlyTheirKeys(t *testing.T) {
	t.Parallel()
	for name, order := range map[string]consumer.Order{"by key": consumer.OrderByKey, "unordered": consumer.OrderUnordered} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			const slow, others = 6, 30
			var repaired atomic.Bool
			begun, goOn := make(chan struct{}, slow), make(chan struct{})
			release := sync.OnceFunc(func() { close(goOn) })
			defer release()
			stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if strings.HasSuffix(string(msg.Value), "bad") {
					if !repaired.Load() {
						return consumer.Permanent(errBad)
					}
					select {
					case begun <- struct{}{}:
					default: // tried again
					}
					<-goOn
				}
				return effect(ctx, tx, msg)
			}), func(c *consumer.Config) { parallel(order)(c); c.ParkShareMax = 1 })
			var bad, late []string
			for i := range slow {
				bad = append(bad, fmt.Sprintf("s%d:bad", i))
				late = append(late, fmt.Sprintf("s%d:1", i), fmt.Sprintf("s%d:2", i))
			}
			h.produceKeyed(bad...)
			h.waitParked(slices.Repeat([]string{"permanent"}, slow)...)
			repaired.Store(true)
			h.retry()
			<-begun
			for i := range others {
				late = append(late, fmt.Sprintf("k%d:1", i))
			}
			h.produceKeyed(late...)
			h.wait("other keys", func() bool { return h.number(`SELECT count(*) FROM effects WHERE value LIKE 'k%'`) == others })
			if order == consumer.OrderByKey {
				require.Equal(t, others, h.number(`SELECT count(*) FROM effects`), "what is behind a parked message waits")
			}
			release()
			h.waitEffects(others + 3*slow)
			require.NoError(t, stop())
			for i := range slow {
				key := fmt.Sprintf("s%d", i)
				if order == consumer.OrderByKey {
					require.Equal(t, []string{key + ":bad", key + ":1", key + ":2"}, of(key, strings.Join(h.values(), " ")))
				}
			}
		})
	}
}

// Property: a key whose handler is slow does not stop the others, as long as the waiting messages
// are within the bounds.
func TestSlowKeyStopsNoOther(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "slow:0" {
			<-goOn
		}
		return effect(ctx, tx, msg)
	}), parallel(consumer.OrderByKey))
	h.produceKeyed("slow:0")
	var more []string
	for i := range 25 {
		more = append(more, fmt.Sprintf("slow:%d", i+1), fmt.Sprintf("k%d:1", i))
	}
	h.produceKeyed(more...)
	h.wait("other keys", func() bool { return h.number(`SELECT count(*) FROM effects WHERE value LIKE 'k%'`) == 25 })
	require.Equal(t, 25, h.number(`SELECT count(*) FROM effects`))
	release()
	h.waitEffects(51)
	require.NoError(t, stop())
	require.Zero(t, inversions(h))
}

// Property: without order, messages that are done after a slow one are not kept in memory, and the
// position waits for the slow one.
func TestUnorderedKeepsNothingThatIsDone(t *testing.T) {
	longtest.Only(t, "it waits for the garbage collector")
	t.Parallel()
	h := newHarness(t, 1)
	const n, size = 2000, 50 << 10
	client := kafkatest.Client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()))
	defer client.Close()
	body := strings.Repeat("x", size)
	for first := 0; first < n; first += 100 {
		var records []*kgo.Record
		for i := range 100 {
			records = append(records, &kgo.Record{Topic: h.topic, Key: []byte("k"), Value: fmt.Appendf(nil, "%d %s", first+i, body), Headers: []kgo.RecordHeader{{Key: "message-id", Value: fmt.Appendf(nil, "%d", first+i)}}})
		}
		require.NoError(t, client.ProduceSync(t.Context(), records...).FirstErr())
	}
	type seen struct {
		msg   weak.Pointer[consumer.Message]
		value weak.Pointer[byte]
	}
	var mu sync.Mutex
	var all []seen
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		mu.Lock()
		all = append(all, seen{weak.Make(msg), weak.Make(&msg.Value[0])})
		mu.Unlock()
		if msg.Offset == 0 {
			select {
			case <-goOn:
			case <-ctx.Done():
			}
		}
		_, err := tx.Exec(ctx, `INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), fmt.Sprint(msg.Offset))
		return err
	}), func(c *consumer.Config) {
		c.Order, c.Workers, c.BatchMax, c.HandlerTimeout, c.IdleTimeout = consumer.OrderUnordered, 4, 2, 5*time.Minute, 6*time.Minute
	})
	h.wait("what is behind the slow one", func() bool { return h.number(`SELECT count(*) FROM effects`) >= n-2 })
	kept := func() (msgs, values int) {
		runtime.GC()
		mu.Lock()
		defer mu.Unlock()
		for _, s := range all {
			if s.msg.Value() != nil {
				msgs++
			}
			if s.value.Value() != nil {
				values++
			}
		}
		return msgs, values
	}
	h.wait("little is kept", func() bool {
		msgs, values := kept()
		return msgs <= 10 && values <= 10
	})
	require.Less(t, h.position(), 1)
	release()
	h.wait("position", func() bool { return h.position() == n })
	require.NoError(t, stop())
	require.Equal(t, n, h.number(`SELECT count(DISTINCT value) FROM effects`))
}
