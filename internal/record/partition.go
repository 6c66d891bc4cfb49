package record

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
)

// TakePartition returns the headers without the one that asks for a partition, and that partition:
// nil if there is none.
func TakePartition[H Header](headers []H) (rest []H, partition *int32, err error) {
	at := slices.IndexFunc(headers, asksForPartition[H])
	if at < 0 {
		return headers, nil, nil
	}
	n, err := strconv.ParseInt(string(header(headers[at]).Value), 10, 32)
	if err != nil || n < 0 {
		return nil, nil, fmt.Errorf("header %q: want the number of a partition, from 0 on, as a number or text", HeaderPartition)
	}
	rest = slices.Delete(slices.Clone(headers), at, at+1)
	if slices.ContainsFunc(rest, asksForPartition[H]) {
		return nil, nil, fmt.Errorf("header %q comes twice: want one partition", HeaderPartition)
	}
	asked := int32(n)
	return rest, &asked, nil
}

func asksForPartition[H Header](h H) bool { return header(h).Name == HeaderPartition }

// explicit marks a record whose Partition is binding. The client passes the field unchanged to the
// partitioner, and overwrites it when the record is acknowledged.
const explicit = -7

// SetPartition makes a partitioner of WrapPartitioner choose the partition.
func SetPartition(record *kgo.Record, partition int32) {
	record.Partition, record.Offset = partition, explicit
}

func isSet(record *kgo.Record) bool { return record.Offset == explicit }

// WrapPartitioner returns a partitioner that honours SetPartition, and uses inner for all other
// records.
func WrapPartitioner(inner kgo.Partitioner) kgo.Partitioner { return &partitioner{inner} }

// PartitionerOption returns the option that clients with these options also need: the partitioner
// that they set, or the default, wrapped.
func PartitionerOption(opts []kgo.Opt) (kgo.Opt, error) {
	client, err := kafkaclient.New(opts...) // it connects when it is used
	if err != nil {
		return nil, err
	}
	defer client.Close()
	inner, ok := client.OptValue(kgo.RecordPartitioner).(kgo.Partitioner)
	if !ok {
		return nil, errors.New("the client has no partitioner")
	}
	return kgo.RecordPartitioner(WrapPartitioner(inner)), nil
}

type partitioner struct{ inner kgo.Partitioner }

// ForTopic returns a value with OnNewBatch only if the inner one has it: the client then partitions
// the record that begins a batch twice.
func (p *partitioner) ForTopic(name string) kgo.TopicPartitioner {
	t := &topic{TopicPartitioner: p.inner.ForTopic(name)}
	if inner, ok := t.TopicPartitioner.(kgo.TopicPartitionerOnNewBatch); ok {
		return &stickyTopic{t, inner}
	}
	return t
}

// topic handles one record at a time.
type topic struct {
	kgo.TopicPartitioner

	last bool // whether the last record was placed by SetPartition
}

func (t *topic) RequiresConsistency(r *kgo.Record) bool {
	return isSet(r) || t.TopicPartitioner.RequiresConsistency(r)
}

// PartitionByBackup is what the client calls instead of Partition.
func (t *topic) PartitionByBackup(r *kgo.Record, n int, backup kgo.TopicBackupIter) int {
	if t.last = isSet(r); t.last {
		return int(r.Partition)
	}
	if inner, ok := t.TopicPartitioner.(kgo.TopicBackupPartitioner); ok {
		return inner.PartitionByBackup(r, n, backup)
	}
	return t.Partition(r, n)
}

type stickyTopic struct {
	*topic

	inner kgo.TopicPartitionerOnNewBatch
}

// OnNewBatch is called between two calls of PartitionByBackup for the same record. It is not passed
// on for a record that SetPartition placed: that record says nothing about the others.
func (t *stickyTopic) OnNewBatch() {
	if !t.last {
		t.inner.OnNewBatch()
	}
}
