// Package partitions puts records into the partition that their row asks for. The relay and a replay send by it.
package partitions

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// Take returns the headers without the one that asks for a partition, and the partition: nil if there is none.
func Take(headers []outbox.Header) (rest []outbox.Header, partition *int32, err error) {
	at := slices.IndexFunc(headers, isPartition)
	if at < 0 {
		return headers, nil, nil
	}
	n, err := strconv.ParseInt(string(headers[at].Value), 10, 32)
	if err != nil || n < 0 {
		return nil, nil, fmt.Errorf("header %q: want the number of a partition, from 0 on, as a number or text", outbox.HeaderPartition)
	}
	rest = slices.Delete(slices.Clone(headers), at, at+1)
	if slices.ContainsFunc(rest, isPartition) {
		return nil, nil, fmt.Errorf("header %q comes twice: want one partition", outbox.HeaderPartition)
	}
	asked := int32(n)
	return rest, &asked, nil
}

func isPartition(h outbox.Header) bool { return h.Name == outbox.HeaderPartition }

// explicit marks a record whose Partition counts. The client passes the field on to the partitioner as it is, and
// overwrites it when the record is acknowledged.
const explicit = -7

// Set makes a partitioner of Wrap choose the partition.
func Set(record *kgo.Record, partition int32) {
	record.Partition, record.Offset = partition, explicit
}

func isSet(record *kgo.Record) bool { return record.Offset == explicit }

// Wrap returns a partitioner that honours Set, and asks inner for all other records.
func Wrap(inner kgo.Partitioner) kgo.Partitioner { return &partitioner{inner} }

// Option is what clients with these options need besides: the partitioner that they name, or the default, wrapped.
func Option(opts []kgo.Opt) (kgo.Opt, error) {
	client, err := kgo.NewClient(opts...) // it connects when it is used
	if err != nil {
		return nil, err
	}
	defer client.Close()
	inner, ok := client.OptValue(kgo.RecordPartitioner).(kgo.Partitioner)
	if !ok {
		return nil, errors.New("the client names no partitioner")
	}
	return kgo.RecordPartitioner(Wrap(inner)), nil
}

type partitioner struct{ inner kgo.Partitioner }

// ForTopic returns what has the optional interfaces of the inner one: the client behaves differently for each.
func (p *partitioner) ForTopic(name string) kgo.TopicPartitioner {
	plain := &topic{inner: p.inner.ForTopic(name)}
	backup, byBackup := plain.inner.(kgo.TopicBackupPartitioner)
	onNewBatch, sticky := plain.inner.(kgo.TopicPartitionerOnNewBatch)
	switch {
	case byBackup && sticky:
		return &stickyBackupTopic{backupTopic{plain, backup}, stickyTopic{plain, onNewBatch}}
	case byBackup:
		return &backupTopic{plain, backup}
	case sticky:
		return &stickyTopic{plain, onNewBatch}
	}
	return plain
}

// topic is used for one record at a time.
type topic struct {
	inner kgo.TopicPartitioner
	last  bool // whether the last record was placed by Set
}

func (t *topic) RequiresConsistency(r *kgo.Record) bool {
	return isSet(r) || t.inner.RequiresConsistency(r)
}

func (t *topic) Partition(r *kgo.Record, n int) int {
	if t.last = isSet(r); t.last {
		return int(r.Partition)
	}
	return t.inner.Partition(r, n)
}

type backupTopic struct {
	*topic
	inner kgo.TopicBackupPartitioner
}

func (t *backupTopic) PartitionByBackup(r *kgo.Record, n int, backup kgo.TopicBackupIter) int {
	if t.last = isSet(r); t.last {
		return int(r.Partition)
	}
	return t.inner.PartitionByBackup(r, n, backup)
}

type stickyTopic struct {
	*topic
	inner kgo.TopicPartitionerOnNewBatch
}

// OnNewBatch is called between two questions about the same record. One that is placed says nothing about the others.
func (t *stickyTopic) OnNewBatch() {
	if !t.last {
		t.inner.OnNewBatch()
	}
}

type stickyBackupTopic struct {
	backupTopic
	sticky stickyTopic
}

func (t *stickyBackupTopic) OnNewBatch() { t.sticky.OnNewBatch() }
