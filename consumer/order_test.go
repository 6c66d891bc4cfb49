package consumer_test

import (
	"context"
	"fmt"
	"math/rand/v2"
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
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
)

func parallel(order consumer.Order) func(*consumer.Config) {
	return func(c *consumer.Config) { c.Order, c.Workers, c.BatchMax = order, 4, 7 }
}

// Property: with several workers in a partition every message has its effect once, those of a key
// in order (unless Unordered), whatever the handlers' times; a message that fails is parked and,
// with ByKey, its key waits; the position ends after all messages. Row C14 of guarantees.md.
func TestWorkersInsideAPartition(t *testing.T) {
	t.Parallel()
	each(t, workerOrders, func(t *testing.T, h *harness, _ string, order consumer.Order) {
		t.Helper()
		const keys, perKey = 9, 40
		h.produceKeyed(versions(keys, 0, perKey)...)
		var repaired atomic.Bool
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if string(msg.Value) == "k3:10" && !repaired.Load() {
				return consumer.Permanent(errBad)
			}
			_, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, rand.Float64()*0.003)
			if err != nil {
				return err
			}
			return effect(ctx, tx, msg)
		}), parallel(order))
		h.waitHandled(keys * perKey)
		behind := 0
		if order == consumer.OrderByKey {
			behind = perKey - 11
		}
		require.Equal(t, behind, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'behind'`))
		require.Equal(t, keys*perKey-behind-1, h.number(`SELECT count(*) FROM effects`))
		repaired.Store(true)
		h.retry()
		h.untilEffects(keys*perKey, stop)
		require.Equal(t, keys*perKey, h.number(`SELECT count(DISTINCT value) FROM effects`))
		if order == consumer.OrderByKey {
			require.Zero(t, inversions(h))
		}
	})
}

// inversions counts effects that come before an earlier version of their key.
func inversions(h *harness) int {
	return h.number(`SELECT count(*) FROM (SELECT split_part(value, ':', 2)::int AS version,
		lag(split_part(value, ':', 2)::int) OVER (PARTITION BY split_part(value, ':', 1) ORDER BY n) AS before FROM effects) e WHERE before > version`)
}

// Property: workers stop and start again and again without losing, doubling or reordering an
// effect; the stored position never passes a message that is not done.
func TestWorkersOutliveRestarts(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	const keys, perKey = 8, 100
	h.produceKeyed(versions(keys, 0, perKey)...)
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if _, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, rand.Float64()*0.004); err != nil {
			return err
		}
		return effect(ctx, tx, msg)
	})
	for done := 0; done < keys*perKey; {
		stop := h.run(handler, func(c *consumer.Config) { parallel(consumer.OrderByKey)(c); c.DrainMax = time.Millisecond })
		h.wait("some effects", func() bool {
			n := h.number(`SELECT count(*) FROM effects`)
			return n >= done+60 || n == keys*perKey
		})
		require.NoError(t, stop())
		// In this order: a COMMIT that was under way when Run returned may still arrive.
		position := h.position()
		done = h.number(`SELECT count(*) FROM effects`)
		require.LessOrEqual(t, position, done)
	}
	require.Equal(t, keys*perKey, h.number(`SELECT count(DISTINCT value) FROM effects`))
	require.Equal(t, keys*perKey, h.number(`SELECT count(*) FROM effects`))
	require.Zero(t, inversions(h))
	require.NotContains(t, h.log.String(), "level=ERROR", "stopping is no error")
}

// transaction writes values to the topic in a Kafka transaction, and returns once its control
// record is written: a coordinator answers before that.
func (h *harness) transaction(end kgo.TransactionEndTry, values ...string) {
	h.t.Helper()
	behind := h.end() + len(values) + 1
	client := kafkatest.Client(h.t, kgo.TransactionalID(h.topic))
	defer client.Close()
	require.NoError(h.t, client.BeginTransaction())
	for _, value := range values {
		record := &kgo.Record{Topic: h.topic, Key: []byte("k"), Value: []byte(value), Headers: headers("message-id=" + value)}
		require.NoError(h.t, client.ProduceSync(h.t.Context(), record).FirstErr())
	}
	require.NoError(h.t, client.EndTransaction(h.t.Context(), end))
	h.wait("the control record", func() bool { return h.end() >= behind })
}

// end is where partition 0 ends.
func (h *harness) end() int {
	h.t.Helper()
	ends, err := kadm.NewClient(kafkatest.Client(h.t)).ListEndOffsets(h.t.Context(), h.topic)
	require.NoError(h.t, err)
	end, _ := ends.Lookup(h.topic, 0)
	return int(end.Offset)
}

const haltedSQL = `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%were deleted%'`

// Property: control records move the position, with the next message, soon, or at the end: then
// retention that removes everything halts nothing. Records that were deleted before they were
// consumed halt the partition as always, even if there were only control records: nothing shows
// that any more.
func TestControlRecordsMoveThePosition(t *testing.T) {
	t.Parallel()
	each(t, allOrders, func(t *testing.T, h *harness, _ string, settings func(*consumer.Config)) {
		t.Helper()
		h.tune = func(c *consumer.Consumer) { consumer.IdleEvery(c, 50*time.Millisecond) }
		stop := h.run(consumer.Each(effect), settings)
		h.transaction(kgo.TryCommit, "k:1", "k:2")
		h.waitHandled(h.end())
		h.transaction(kgo.TryAbort, "k:x", "k:y")
		require.Equal(t, 6, h.end(), "the test's own premise: two messages and a control record each")
		h.untilHandled(6, stop)
		deleteRecords(t, h.topic, 6)
		stop = h.run(consumer.Each(effect), settings)
		h.transaction(kgo.TryCommit, "k:3")
		h.waitEffects(3)
		h.untilHandled(8, stop)
		require.Zero(t, h.number(haltedSQL))

		h.transaction(kgo.TryAbort, "k:z")
		deleteRecords(t, h.topic, 10)
		stop = h.run(consumer.Each(effect), settings)
		h.wait("halts", func() bool { return h.number(haltedSQL) == 1 })
		require.NoError(t, stop())
		require.ElementsMatch(t, []string{"k:1", "k:2", "k:3"}, h.values())
	})
}

// Property: control records after a message in progress do not move the position past it.
func TestControlRecordsDoNotPassAMessageInWork(t *testing.T) {
	t.Parallel()
	each(t, allOrders, func(t *testing.T, h *harness, name string, settings func(*consumer.Config)) {
		t.Helper()
		h.tune = func(c *consumer.Consumer) { consumer.IdleEvery(c, 10*time.Millisecond) }
		begun, goOn := make(chan struct{}, 1), make(chan struct{})
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if string(msg.Value) == "slow" {
				select {
				case begun <- struct{}{}:
				default: // tried again
				}
				<-goOn
			}
			return effect(ctx, tx, msg)
		}), settings)
		h.transaction(kgo.TryCommit, "slow")
		<-begun
		h.transaction(kgo.TryAbort, "k:x")
		h.transaction(kgo.TryAbort, "k:y")
		h.produceRecords(&kgo.Record{Key: []byte("other"), Value: []byte("k:2")})
		if name != "by partition" {
			h.waitEffects(1)
		}
		require.Less(t, h.position(), 1)
		close(goOn)
		h.untilHandled(h.end(), stop)
		require.Len(t, h.values(), 2)
	})
}

// Property: a key that is retried slowly delays only itself: with workers all other keys are
// handled, also where more keys are retried than there are workers, and more of its messages arrive
// than one worker's share. Row C14 of guarantees.md.
func TestSlowRetriesStopOnlyTheirKeys(t *testing.T) {
	t.Parallel()
	each(t, workerOrders, func(t *testing.T, h *harness, _ string, order consumer.Order) {
		t.Helper()
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
		h.untilEffects(others+3*slow, stop)
		for i := range slow {
			key := fmt.Sprintf("s%d", i)
			if order == consumer.OrderByKey {
				require.Equal(t, []string{key + ":bad", key + ":1", key + ":2"}, of(key, strings.Join(h.values(), " ")))
			}
		}
	})
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
	h.untilEffects(51, stop)
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
	var mu sync.Mutex
	var all []weak.Pointer[byte]
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		mu.Lock()
		all = append(all, weak.Make(&msg.Value[0]))
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
	h.wait("little is kept", func() bool {
		runtime.GC()
		mu.Lock()
		defer mu.Unlock()
		kept := 0
		for _, value := range all {
			if value.Value() != nil {
				kept++
			}
		}
		return kept <= 10
	})
	require.Less(t, h.position(), 1)
	release()
	h.untilHandled(n, stop)
	require.Equal(t, n, h.number(`SELECT count(DISTINCT value) FROM effects`))
}

// Property: with OrderByPartition a message that is tried again in place comes before every later
// message of its partition, whatever their keys; with OrderByKey only its key waits.
func TestRetriesInPlaceKeepTheOrder(t *testing.T) {
	t.Parallel()
	each(t, orders, func(t *testing.T, h *harness, name string, order func(*consumer.Config)) {
		t.Helper()
		var tries, late atomic.Int32
		h.produceKeyed("a:1", "a:bad", "b:1", "a:2", "c:1")
		h.untilEffects(5, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			done := 0
			if err := tx.QueryRow(ctx, `SELECT count(*) FROM effects WHERE value = 'a:bad'`).Scan(&done); err != nil {
				return err
			}
			switch value := string(msg.Value); {
			case value == "a:bad" && tries.Add(1) < 4:
				return errBad
			case done == 0 && (value == "a:2" || name == "by partition" && value != "a:1" && value != "a:bad"):
				late.Add(1)
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) {
			order(c)
			c.RetryMin, c.RetryMax = 20*time.Millisecond, 100*time.Millisecond
		}))
		require.Zero(t, late.Load(), "messages ran before an earlier one")
		require.Empty(t, h.parked())
	})
}
