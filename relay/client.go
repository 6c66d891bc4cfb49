package relay

import (
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
	"github.com/effectonce/effectonce/internal/record"
)

// transactionTimeout is how long the open transaction of a relay that died delays readers, if no
// other replica publishes the shard.
const transactionTimeout = 30 * time.Second

// newClient makes a producer. The options that correctness needs come after the caller's options,
// and so override them: idempotent, acks=all, no limit of retries or time, and no continuing after
// lost sequence numbers.
func (r *Relay) newClient(l *lease, more ...kgo.Opt) (*kgo.Client, error) {
	opts := []kgo.Opt{
		kgo.ProducerLinger(0), // the page is the batch
		// A topic that was deleted must not fill the flight for long: the client finds out by the
		// fifth answer in a row.
		kgo.MetadataMinAge(500 * time.Millisecond),
		kgo.SoftwareNameAndVersion("effectonce-relay", "v1"),
	}
	opts = append(opts, r.kafka...)
	opts = append(opts,
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.RecordRetries(1<<31-1),
		kgo.RecordDeliveryTimeout(0),
		kgo.StopProducerOnDataLossDetected(),
		// The relay bounds what is in flight by itself, in bytes.
		kgo.MaxBufferedRecords(1<<31-1),
		kgo.MaxBufferedBytes(0),
	)
	if codec, ok := codecs[r.cfg.Compression]; ok {
		opts = append(opts, kgo.ProducerBatchCompression(codec, kgo.NoCompression()))
	}
	if r.uncompressed.Load() {
		opts = append(opts, kgo.ProducerBatchCompression(kgo.NoCompression()))
	}
	if r.placing != nil {
		opts = append(opts, r.placing)
	}
	if l != nil && r.cfg.ExactlyOnce {
		opts = append(opts, kgo.TransactionalID(r.transactionalID(l)), kgo.TransactionTimeout(transactionTimeout))
	}
	client, err := kafkaclient.New(append(opts, more...)...)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	if problem := r.unusable(client, l != nil); problem != "" {
		client.Close()
		return nil, errors.New("kafka options: " + problem)
	}
	return client, nil
}

// unusable returns why the caller's options do not work.
func (r *Relay) unusable(client *kgo.Client, ours bool) string {
	is := func(option any) bool { set, ok := client.OptValue(option).(bool); return ok && set }
	id, _ := client.OptValue(kgo.TransactionalID).(string)
	retries, _ := client.OptValue(kgo.UnknownTopicRetries).(int64)
	write, bounded := client.OptValue(kgo.BrokerMaxWriteBytes).(int32)
	need := r.cfg.RecordBytesMax + requestOverheadBytes
	switch {
	case is(kgo.DisableIdempotentWrite):
		return "DisableIdempotentWrite would lose the order of rows and duplicate them: remove it"
	case is(kgo.ManualFlushing):
		return "ManualFlushing would keep all rows in the client: remove it"
	case id != "" && !ours:
		return "TransactionalID is not allowed: remove it"
	case retries < 0:
		return "UnknownTopicRetries without a limit would let the rows of a deleted topic hold up all others: remove it"
	case bounded && int(write) < need:
		return fmt.Sprintf("BrokerMaxWriteBytes %d: want at least %d, which a record of RecordBytesMax takes", write, need)
	}
	return ""
}

// requestOverheadBytes bounds the bytes of a request in addition to a batch: its header and the
// name of the topic.
const requestOverheadBytes = 1024

// batchBytes is called by the client when it first produces to a topic, and has no effect later. It is
// RecordBytesMax, unless a batch was refused for its size.
func (t *topics) batchBytes(name string) int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	size, told := t.given[name]
	if told {
		return size
	}
	size = int32(t.cfg.RecordBytesMax)
	if name == t.cfg.ProgressTopic {
		size = max(size, record.BytesDefault)
	}
	if less, refused := t.batches.Load(name); refused {
		size = less.(int32)
	}
	if name != "" { // else the client checks its options
		t.given[name] = size
	}
	return size
}

// fits reports whether a record is at most as large as the batches of this client. Those of the next one
// are as large as the largest record that was asked about.
func (t *topics) fits(name string, bytes int) bool {
	if bytes <= int(t.batchBytes(name)) {
		return true
	}
	if most, _ := t.batches.Load(name); most == nil || most.(int32) < int32(bytes) {
		t.batches.Store(name, int32(bytes))
	}
	return false
}

// errLimitsChanged requests a new client: batch sizes are fixed when a client first meets a topic.
var errLimitsChanged = &refused{errors.New("a record is larger than the batches of its topic: starting over with a new client")}
