package consumer_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
)

// bomb produces a record of a few kilobytes that inflates to size bytes.
func (h *harness) bomb(codec kgo.CompressionCodec, size int) {
	h.t.Helper()
	client := kafkatest.Client(h.t, kgo.ProducerBatchCompression(codec), kgo.ProducerBatchMaxBytes(1<<30), kgo.BrokerMaxWriteBytes(1<<30), kgo.MaxBufferedBytes(2<<30),
		kgo.RecordPartitioner(kgo.ManualPartitioner()))
	require.NoError(h.t, client.ProduceSync(h.t.Context(), &kgo.Record{Topic: h.topic, Value: make([]byte, size)}).FirstErr())
	client.Close()
	runtime.GC()
}

// Property: a batch that inflates beyond the bound costs no more memory than that, whatever its
// codec; the records before it are handled; its partition halts, reports that in its state, its row
// and the log, with what to do; the others continue, in the same session. An operator's order skips
// it.
func TestBatchThatInflatesHaltsItsPartition(t *testing.T) { //nolint:paralleltest // it measures the memory of the process
	longtest.Only(t, "it measures the heap")
	for name, codec := range map[string]kgo.CompressionCodec{ //nolint:paralleltest // see above
		"gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	} {
		t.Run(name, func(t *testing.T) {
			size := 300 << 20
			if kafkatest.Kafka(t).Fake == nil {
				size = 80 << 20 // a broker with a small heap cannot take more of snappy, which it inflates in one piece
			}
			h := newHarness(t, 2)
			kafkatest.Configure(t, h.topic, "max.message.bytes", "100000000")
			for i := range 50 {
				h.produceEach(0, fmt.Sprint("before ", i))
			}
			h.bomb(codec, size)
			h.produceEach(0, "behind")
			h.produceEach(1, "other")
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			c := h.make(consumer.Each(effect), func(cfg *consumer.Config) { cfg.MessageBytesMax = 1 << 20 })
			consumer.LookEvery(c, 20*time.Second) // above what inflating takes on a slow machine
			_, stop := h.begin(t.Context(), c)
			h.waitEffects(51)
			found := h.waitState(c, consumer.StateHalted)
			runtime.ReadMemStats(&after)
			// gzip's buffer doubles until it meets the bound, so a meeting takes four times as much
			// in all. The batch is met behind others, alone, and by fetches that were on their way;
			// the race detector keeps buffers from being used again.
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(8*4*64<<20), "of what was allocated in all")
			for _, said := range []string{"the batch at offset 50 inflates to more than 67108864 bytes", "MessageBytesMax", "resume-at --group " + h.topic, "--at 51 "} {
				require.Contains(t, found.Err, said)
				// The state changes first, then the log and the row follow.
				h.wait("the log", func() bool { return strings.Contains(h.log.String(), said) })
				h.waitNumber(1, `SELECT count(*) FROM effectonce.consumer_positions WHERE partition = 0 AND position($1 IN trouble) > 0`, said)
			}
			require.Equal(t, 50, h.position())
			h.produceEach(1, "still")
			h.waitEffects(52)
			require.Zero(t, h.logged("do not arrive: rejoining"))
			require.Zero(t, h.number(`SELECT count(*) FROM effectonce.parked_messages`))

			h.resumeAt(51)
			h.waitEffects(53)
			h.waitState(c, consumer.StateRunning)
			require.Equal(t, 1, h.number(`SELECT count(*) FROM effects WHERE value = 'behind'`))
			require.NoError(t, stop())
		})
	}
}

// Property: with a bound that takes it, the batch is read: its message is parked by its own bound.
func TestBatchIsReadWithALargerBound(t *testing.T) { //nolint:paralleltest // it takes much memory
	h := newHarness(t, 1)
	kafkatest.Configure(t, h.topic, "max.message.bytes", "100000000")
	h.bomb(kgo.ZstdCompression(), 65<<20)
	h.produceEach(0, "behind")
	h.kafka = []kgo.Opt{kgo.MaxDecompressBatchBytes(80 << 20)}
	stop := h.run(consumer.Each(effect), func(cfg *consumer.Config) { cfg.MessageBytesMax = 1 << 20 })
	h.waitParked("too_large")
	h.untilEffects(1, stop)
}

// damagedFetch answers a fetch with sound batches of records, and a damaged one behind them.
func damagedFetch(fetch *kmsg.FetchRequest, sound []byte) *kmsg.FetchResponse {
	response := fetch.ResponseKind().(*kmsg.FetchResponse)
	batch := make([]byte, 80)
	binary.BigEndian.PutUint32(batch[8:], uint32(len(batch)-12))
	batch[16] = 2 // of a sum that is wrong
	for _, topic := range fetch.Topics {
		partition := kmsg.NewFetchResponseTopicPartition()
		partition.HighWatermark, partition.LastStableOffset, partition.RecordBatches = 2, 2, append(slices.Clone(sound), batch...)
		response.Topics = append(response.Topics, kmsg.FetchResponseTopic{Topic: topic.Topic, TopicID: topic.TopicID, Partitions: []kmsg.FetchResponseTopicPartition{partition}})
	}
	return response
}

// Property: the partition of records that stay damaged halts, and none is skipped.
func TestDamagedRecordsHaltTheirPartition(t *testing.T) {
	t.Parallel()
	h, fake := newFaked(t, 1)
	h.produce("first")
	var damaged atomic.Int32
	answer(fake, func(fetch *kmsg.FetchRequest) kmsg.Response {
		if len(fetch.Topics) == 0 {
			return nil
		}
		damaged.Add(1)
		return damagedFetch(fetch, nil)
	})
	c, stop := h.start(consumer.Each(effect), nil)
	found := h.waitState(c, consumer.StateHalted)
	require.Contains(t, found.Err, "cannot be read")
	require.Contains(t, found.Err, "crc")
	require.Zero(t, h.number(`SELECT count(*) FROM effects`))
	require.LessOrEqual(t, damaged.Load(), int32(20), "it does not ask without a pause")
	require.NoError(t, stop())
}

// Property: however often records are damaged in transit, their partition does not halt if each can
// be read again.
func TestDamageInTransitNeverHalts(t *testing.T) {
	t.Parallel()
	h, fake := newFaked(t, 1)
	var damaged atomic.Int64 // the offsets before it were damaged, each in its first fetch
	answer(fake, func(fetch *kmsg.FetchRequest) kmsg.Response {
		if len(fetch.Topics) == 0 || fetch.Topics[0].Partitions[0].FetchOffset < damaged.Load() {
			return nil
		}
		damaged.Store(fetch.Topics[0].Partitions[0].FetchOffset + 1)
		return damagedFetch(fetch, nil)
	})
	stop := h.run(consumer.Each(effect), nil)
	const records = 6
	for i := range records {
		h.produce(fmt.Sprint(i))
		h.waitEffects(i + 1)
	}
	require.GreaterOrEqual(t, damaged.Load(), int64(records))
	require.Zero(t, h.logged("partition halts"))
	require.NoError(t, stop())
}

// Property: sound records that arrive together with damaged ones are handled before their partition
// halts.
func TestRecordsBeforeDamagedOnesAreHandled(t *testing.T) {
	t.Parallel()
	h, fake := newFaked(t, 1)
	h.produce("sound")
	var sound atomic.Pointer[[]byte]
	answer(fake, func(fetch *kmsg.FetchRequest) kmsg.Response {
		batches := sound.Load()
		if len(fetch.Topics) == 0 || batches == nil {
			return nil
		}
		if fetch.Topics[0].Partitions[0].FetchOffset > 0 {
			return damagedFetch(fetch, nil)
		}
		return damagedFetch(fetch, *batches)
	})
	request := kmsg.NewPtrFetchRequest()
	request.MaxBytes, request.MaxWaitMillis = 1<<20, 100
	request.Topics = []kmsg.FetchRequestTopic{{Topic: h.topic, TopicID: fake.TopicInfo(h.topic).TopicID, Partitions: []kmsg.FetchRequestTopicPartition{kmsg.NewFetchRequestTopicPartition()}}}
	request.Topics[0].Partitions[0].PartitionMaxBytes = 1 << 20
	response, err := request.RequestWith(t.Context(), kafkatest.ClientAt(t, h.brokers))
	require.NoError(t, err)
	batches := response.Topics[0].Partitions[0].RecordBatches
	require.NotEmpty(t, batches)
	sound.Store(&batches)

	c, stop := h.start(consumer.Each(effect), nil)
	found := h.waitState(c, consumer.StateHalted)
	require.Contains(t, found.Err, "crc")
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effects WHERE value = 'sound'`))
	require.Equal(t, 1, h.position())
	require.NoError(t, stop())
}

// Property: a certificate that cannot be verified while a new leader is asked is no damage: nothing
// halts, and the partition continues when the certificate is right.
func TestWrongCertificatesAreNotDamage(t *testing.T) {
	t.Parallel()
	h, fake := newFaked(t, 1)
	h.produce("first")
	known := fake.ListenAddrs()
	var refused atomic.Int32
	var wrong atomic.Bool
	wrong.Store(true)
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		if wrong.Load() && !slices.Contains(known, address) {
			refused.Add(1)
			return nil, &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	h.kafka = []kgo.Opt{kgo.Dialer(dial), kgo.MetadataMinAge(50 * time.Millisecond)}
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	node, _, err := fake.AddNode(-1, 0)
	require.NoError(t, err)
	require.NoError(t, fake.MoveTopicPartition(h.topic, 0, node))
	h.wait("the log", func() bool {
		return refused.Load() > 3 && h.logged("fetch failed; will retry") > 0 && h.logged("certificate") > 0
	})
	wrong.Store(false)
	h.produce("second")
	h.waitEffects(2)
	require.Zero(t, h.logged("cannot be read"))
	require.NoError(t, stop())
}
