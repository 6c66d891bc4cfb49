package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// fetchedFrom counts what the brokers sent of a topic.
type fetchedFrom struct {
	topic          string
	records, bytes atomic.Int64
}

func (f *fetchedFrom) OnFetchBatchRead(_ kgo.BrokerMetadata, topic string, _ int32, m kgo.FetchBatchMetrics) {
	if topic == f.topic {
		f.records.Add(int64(m.NumRecords))
		f.bytes.Add(int64(m.CompressedBytes))
	}
}

// journalOf is a progress topic that the test writes, and the relay that reads it.
type journalOf struct {
	*testing.T
	relay   *relay.Relay
	client  *kgo.Client
	admin   *kadm.Client
	fetched *fetchedFrom
	keys    []string // by shard
	last    []int64  // offset of the last committed entry, by shard; -1: none
	rows    []int64  // that it covers
}

func newJournalOf(t *testing.T, shards int16, fake *kfake.Cluster, configs map[string]*string) *journalOf {
	t.Helper()
	pool, fetched := pgtest.Pool(t), &fetchedFrom{topic: "progress"}

	j := &journalOf{T: t, fetched: fetched, client: kafkatest.ClientAt(t, fake.ListenAddrs(), kgo.DefaultProduceTopic("progress"), kgo.MaxBufferedRecords(100_000))}
	j.admin = kadm.NewClient(j.client)
	j.create(configs)
	j.relay = relayAt(t, pool, fake, relay.Config{ExactlyOnce: true, ProgressTopic: "progress", Shards: shards}, kgo.WithHooks(fetched))
	must(t, pool, `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', $1)`, shards)
	for shard := range shards {
		key, err := j.relay.JournalKey(t.Context(), shard)
		require.NoError(t, err)
		j.keys, j.last, j.rows = append(j.keys, key), append(j.last, -1), append(j.rows, -1)
	}
	return j
}

func (j *journalOf) create(configs map[string]*string) {
	j.Helper()
	_, err := j.admin.CreateTopic(j.Context(), 1, 1, configs, "progress")
	require.NoError(j, err)
}

// entry is as long as an entry of two snapshots with some open transactions.
func (j *journalOf) entry(shard int16, rows int64) *kgo.Record {
	tick := fmt.Sprintf(`{"tick":%d,"snapshot":"%d:%d:%d","seq_last":%d}`, rows, rows, rows+1, rows, rows)
	return &kgo.Record{Key: []byte(j.keys[shard]), Value: fmt.Appendf(nil,
		`{"system_identifier":7431298744512,"timeline":1,"epoch":1,"published":%d,"from":%s,"to":%s,"seq":%d,"floor":%d}`, rows, tick, tick, rows, rows)}
}

// write writes entries of shards in turn, without transactions of their own: what is read has the
// same form.
func (j *journalOf) write(entries int, shards ...int16) {
	j.Helper()
	records := make([]*kgo.Record, entries)
	for i := range records {
		shard := shards[i%len(shards)]
		j.rows[shard]++
		records[i] = j.entry(shard, j.rows[shard])
	}
	results := j.client.ProduceSync(j.Context(), records...)
	require.NoError(j, results.FirstErr())
	for i, r := range results {
		shard := shards[i%len(shards)]
		j.last[shard] = max(j.last[shard], r.Record.Offset)
	}
}

func (j *journalOf) end() int64 {
	j.Helper()
	ends, err := j.admin.ListEndOffsets(j.Context(), "progress")
	require.NoError(j, err)
	end, _ := ends.Lookup("progress", 0)
	return end.Offset
}

// takeover reads a shard, requires that it finds its last entry, and returns what that cost.
func (j *journalOf) takeover(shard int16, from *int64) (records, size int64) {
	j.Helper()
	j.fetched.records.Store(0)
	j.fetched.bytes.Store(0)
	rows, err := j.relay.ReadJournal(j.Context(), shard, from)
	require.NoError(j, err)
	require.Equal(j, j.rows[shard], rows, "shard %d from %v: not its last entry", shard, from)
	return j.fetched.records.Load(), j.fetched.bytes.Load()
}

// Property: what a takeover reads of the progress topic does not grow with it: after a day of
// transactions it is what it was after seconds, although nothing was compacted. Row O44 of
// guarantees.md.
func TestTakeoverReadsTheEndOfTheProgressTopic(t *testing.T) {
	longtest.Only(t, "400,000 records")
	t.Parallel()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1))
	j := newJournalOf(t, 3, fake, nil)
	j.write(3000, 0, 1)
	near := func() *int64 { // batches of records are sent as a whole
		j.write(2, 0, 1)
		from := j.last[0]
		for range 30 {
			j.write(10, 0, 1)
		}
		return &from
	}
	soon, soonBytes := j.takeover(0, near())
	require.LessOrEqual(t, soon, int64(302))

	for range 10 {
		j.write(40_000, 0, 1)
	}
	after, afterBytes := j.takeover(0, near())
	t.Logf("read: after 3,000 entries %d records, %d bytes; after 400,000 %d, %d", soon, soonBytes, after, afterBytes)
	require.LessOrEqual(t, after, int64(302))
	require.LessOrEqual(t, afterBytes, 2*soonBytes)
}

// Property: whatever offset the copy of progress in the database names, a takeover finds the last
// committed entry of its shard: in front of entries of others, behind aborted transactions, across
// the beginning of a transaction, in a topic that was compacted, or made anew since. Rows O30, O44
// of guarantees.md.
func TestTakeoverFindsTheLastEntryFromAnyOffset(t *testing.T) {
	t.Parallel()
	compact, small := "compact", "20000"
	each(t, map[string]map[string]*string{
		"kept": nil, "compacted": {"cleanup.policy": &compact, "segment.bytes": &small},
	}, func(t *testing.T, configs map[string]*string) {
		t.Helper()
		fake := kafkatest.Fake(t, kfake.NumBrokers(1))
		j := newJournalOf(t, 4, fake, configs) // shard 3 writes nothing
		seed := rand.Uint64()
		t.Log("seed", seed)
		random := rand.New(rand.NewPCG(seed, 1))
		writers := make([]*kgo.Client, 3)
		for i := range writers {
			writers[i] = kafkatest.ClientAt(t, fake.ListenAddrs(), kgo.DefaultProduceTopic("progress"), kgo.TransactionalID(j.keys[i]))
		}
		j.write(1, 2) // long ago
		j.write(6000, 0, 1)
		for range 60 {
			shard := int16(random.IntN(2))
			switch random.IntN(4) {
			case 0:
				j.write(1+random.IntN(50), shard)
			case 1: // others write while the transaction is open
				j.transact(writers[shard], shard, random.IntN(2) == 0, func() { j.write(5, 1-shard) })
			default:
				j.transact(writers[shard], shard, random.IntN(2) == 0, func() {})
			}
		}
		fake.Compact()
		end := j.end()
		left := len(kafkatest.ReadAllAt(t, fake.ListenAddrs(), "progress"))
		require.Equal(t, configs != nil, left < 1000, "the test's own premise: %d records", left)
		for range 25 {
			from := random.Int64N(end+200) - 100
			if random.IntN(2) == 0 {
				from = end - random.Int64N(300)
			}
			j.takeover(int16(random.IntN(4)), &from)
		}
		j.takeover(2, nil)

		// The offset is of the topic as it was before.
		before := j.last[0]
		_, err := j.admin.DeleteTopic(t.Context(), "progress")
		require.NoError(t, err)
		j.create(configs)
		j.client.PurgeTopicsFromClient("progress")
		j.rows = []int64{-1, -1, -1, -1}
		j.takeover(0, &before)
		j.write(10, 0)
		j.takeover(0, &before)
		j.write(int(before)+1000, 1)
		j.takeover(0, &before)
	})
}

// Property: the copy of progress in the database says where its record is in the progress topic. A shard
// without rows writes its progress again once a minute, so that what a takeover of it reads does not
// grow beside busy ones. Row O44 of guarantees.md.
func TestIdleShardStaysNearTheEndOfTheProgressTopic(t *testing.T) {
	longtest.Only(t, "a minute of real time decides")
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	insert(t, pool, "orders", "k", "1")
	runAt(t, pool, fake, relay.Config{ExactlyOnce: true})
	testwait.True(t, "the row is published", func() bool { return len(valuesAt(t, fake, "orders")) == 1 })
	testwait.True(t, "progress is written again, and copied", func() bool {
		var offsets []int64
		for _, record := range kafkatest.ReadAllAt(t, fake.ListenAddrs(), "effectonce-relay-progress") {
			offsets = append(offsets, record.Offset)
		}
		copied := one[int64](t, pool, `SELECT coalesce(max(journal_offset), -1) FROM effectonce.outbox_advances`)
		return len(offsets) == 2 && copied == offsets[1]
	})
	require.Equal(t, []string{"1"}, valuesAt(t, fake, "orders"))
}

// Property: a relay whose progress topic was deleted says so once, and continues from the database's copy.
func TestLostProgressTopicIsReported(t *testing.T) {
	t.Parallel()
	pool, fake, said := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders")), &lockedBuffer{}
	cfg := relay.Config{ExactlyOnce: true, Logger: slog.New(slog.NewTextHandler(said, nil))}
	for i := range 3 {
		insert(t, pool, "orders", "k", fmt.Sprint(i))
		drain(t, relayAt(t, pool, fake, cfg))
		require.Equal(t, i/2, strings.Count(said.String(), "lost this shard's progress"))
		if i == 1 {
			_, err := kafkaAdmin(t, fake).DeleteTopics(t.Context(), "effectonce-relay-progress")
			require.NoError(t, err)
		}
	}
	require.Equal(t, []string{"0", "1", "2"}, valuesAt(t, fake, "orders"))
}

func (j *journalOf) transact(client *kgo.Client, shard int16, commit bool, within func()) {
	j.Helper()
	require.NoError(j, client.BeginTransaction())
	record := j.entry(shard, j.rows[shard]+1)
	require.NoError(j, client.ProduceSync(context.WithoutCancel(j.Context()), record).FirstErr())
	within()
	require.NoError(j, client.EndTransaction(j.Context(), kgo.TransactionEndTry(commit)))
	if commit {
		j.rows[shard]++
		j.last[shard] = record.Offset
	}
}

// Property: the progress topic is made with settings that let the brokers forget what was passed. Where
// they refuse those, the relay waits for a topic that an operator creates. Row O44 of guarantees.md.
func TestProgressTopicIsMadeToBeCompacted(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	insert(t, pool, "orders", "k", "1")
	fake.ControlKey(int16(kmsg.CreateTopics), func(request kmsg.Request) (kmsg.Response, error, bool) {
		create := request.(*kmsg.CreateTopicsRequest)
		response := create.ResponseKind().(*kmsg.CreateTopicsResponse)
		topic := kmsg.NewCreateTopicsResponseTopic()
		topic.Topic, topic.ErrorCode = create.Topics[0].Topic, kerr.PolicyViolation.Code
		response.Topics = append(response.Topics, topic)
		return response, nil, true
	})
	r := relayAt(t, pool, fake, relay.Config{ExactlyOnce: true, ProgressTopic: "progress"})
	_, err := r.Drain(t.Context())
	require.ErrorContains(t, err, "create it yourself with one partition and cleanup.policy=compact")
	require.EqualValues(t, 1, drain(t, r))
	configs := fake.TopicInfo("progress").Configs
	require.Equal(t, "compact", *configs["cleanup.policy"])
	for name, want := range map[string]int64{
		"segment.bytes": relay.JournalSegmentBytes, "segment.ms": relay.JournalSegmentLasts.Milliseconds(),
		"delete.retention.ms": relay.JournalSegmentLasts.Milliseconds(),
	} {
		require.Equal(t, strconv.FormatInt(want, 10), *configs[name], name)
	}
}
