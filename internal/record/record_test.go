package record_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/outbox"
)

// Property: a record's time is that of its row to the microsecond, whatever times the rows before
// it have.
func TestTimesOfAPage(t *testing.T) {
	t.Parallel()
	at := func(s string) time.Time {
		v, err := time.Parse(time.RFC3339Nano, s)
		assert.NoError(t, err)
		return v
	}
	times := []time.Time{
		at("0000-12-31T23:59:59.999999Z"), at("2026-03-01T00:00:00Z"), at("2026-03-01T00:00:00.000001Z"), at("2026-03-01T00:00:00.120Z"),
		at("2026-03-01T01:00:00.99999999+01:00"), at("2026-02-28T23:59:59.654321Z"), at("1969-12-31T23:59:59.999999Z"),
		at("1970-01-01T00:00:00.5Z"), time.UnixMicro(1 << 58),
	}
	maker := record.NewMaker(len(times))
	for _, want := range times {
		made := record.Make(maker, record.Row{CreatedAt: want}, []outbox.Header(nil))
		assert.Equal(t, want.UTC().Format("2006-01-02T15:04:05.000000Z"), string(made.Headers[1].Value))
	}
}

// Property: a record has the ID and the time of its row whatever headers the row has, and the
// others as they are; the reserved names are those that users know.
func TestReservedHeadersAreTheRows(t *testing.T) {
	t.Parallel()
	id, at := uuid.MustParse("01976f00-0000-7000-8000-000000000001"), time.Unix(0, 0)
	own := []outbox.Header{{Name: outbox.HeaderMessageID, Value: []byte("forged")}, {Name: "a", Value: []byte("b")}, {Name: outbox.HeaderOccurredAt, Value: []byte("forged")}}
	made := record.Make(record.NewMaker(1), record.Row{ID: id, CreatedAt: at}, own)
	assert.Equal(t, []kgo.RecordHeader{
		{Key: "message-id", Value: []byte(id.String())}, {Key: "occurred-at", Value: []byte("1970-01-01T00:00:00.000000Z")}, {Key: "a", Value: []byte("b")},
	}, made.Headers)
	assert.Equal(t, []string{outbox.HeaderMessageID, outbox.HeaderOccurredAt, outbox.HeaderPartition}, []string{record.HeaderMessageID, record.HeaderOccurredAt, record.HeaderPartition})
}

// Property: a row asks for one partition, from 0 on, or for none; its other headers stay as they
// are.
func TestTake(t *testing.T) {
	t.Parallel()
	other, asked := outbox.Header{Name: "a", Value: []byte("b")}, func(v string) outbox.Header {
		return outbox.Header{Name: outbox.HeaderPartition, Value: []byte(v)}
	}
	none := []outbox.Header{other}
	rest, partition, err := record.TakePartition(none)
	require.NoError(t, err)
	assert.Nil(t, partition)
	assert.Equal(t, none, rest)
	given := []outbox.Header{asked("12"), other}
	rest, partition, err = record.TakePartition(given)
	require.NoError(t, err)
	assert.EqualValues(t, 12, *partition)
	assert.Equal(t, none, rest)
	assert.Equal(t, []outbox.Header{asked("12"), other}, given, "the caller's slice stays")
	for _, wrong := range [][]outbox.Header{{asked("")}, {asked("-1")}, {asked("1.5")}, {asked("2147483648")}, {asked("1"), asked("1")}, {{Name: outbox.HeaderPartition}}} {
		_, _, err := record.TakePartition(wrong)
		assert.Error(t, err, "%s", wrong)
	}
}

// Property: what the client sees of the partitioner inside, also of its optional interfaces, is
// what it would see without the wrapper; records that are placed change nothing of it.
func TestWrapKeepsWhatItWraps(t *testing.T) {
	t.Parallel()
	for name, inner := range map[string]kgo.Partitioner{
		"sticky": kgo.StickyPartitioner(), "sticky by key": kgo.StickyKeyPartitioner(nil), "manual": kgo.ManualPartitioner(),
		"backup": kgo.LeastBackupPartitioner(), "uniform": kgo.UniformBytesPartitioner(1000, true, true, nil), "round robin": kgo.RoundRobinPartitioner(),
	} {
		plain, wrapped := inner.ForTopic("a"), record.WrapPartitioner(inner).ForTopic("a")
		_, plainBatch := plain.(kgo.TopicPartitionerOnNewBatch)
		_, wrappedBatch := wrapped.(kgo.TopicPartitionerOnNewBatch)
		assert.Equal(t, plainBatch, wrappedBatch, name)
		placed, other := &kgo.Record{Key: []byte("k")}, &kgo.Record{Key: []byte("k")}
		record.SetPartition(placed, 7)
		assert.True(t, wrapped.RequiresConsistency(placed), name)
		assert.Equal(t, plain.RequiresConsistency(other), wrapped.RequiresConsistency(other), name)
		byBackup := wrapped.(kgo.TopicBackupPartitioner)
		assert.Equal(t, 7, byBackup.PartitionByBackup(placed, 9, nil), name)
		if _, ok := plain.(kgo.TopicBackupPartitioner); !ok && name != "sticky" { // which draws
			other.Partition = 2 // of the manual one
			assert.Equal(t, plain.Partition(other, 9), byBackup.PartitionByBackup(other, 9, nil), name)
		}
	}
}

// Property: a batch that a placed record begins does not move the others to another partition.
func TestPlacedRecordsMoveNoOthers(t *testing.T) {
	t.Parallel()
	inner := &counting{}
	topic := record.WrapPartitioner(inner).ForTopic("a")
	placed := &kgo.Record{}
	record.SetPartition(placed, 3)
	require.Equal(t, 3, topic.(kgo.TopicBackupPartitioner).PartitionByBackup(placed, 9, nil))
	topic.(kgo.TopicPartitionerOnNewBatch).OnNewBatch()
	require.Zero(t, inner.batches)
	require.Zero(t, topic.(kgo.TopicBackupPartitioner).PartitionByBackup(&kgo.Record{}, 9, nil))
	topic.(kgo.TopicPartitionerOnNewBatch).OnNewBatch()
	require.Equal(t, 1, inner.batches)
}

type counting struct{ batches int }

func (c *counting) ForTopic(string) kgo.TopicPartitioner  { return c }
func (*counting) RequiresConsistency(*kgo.Record) bool    { return false }
func (*counting) Partition(*kgo.Record, int) (picked int) { return 0 }
func (c *counting) OnNewBatch()                           { c.batches++ }
