// Package kafkaclient makes Kafka clients from options that are used more than once.
package kafkaclient

import (
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

// making is held while a client is made: see New.
var making sync.Mutex //nolint:gochecknoglobals // the state that it guards is shared by all options of a program

// New is kgo.NewClient for callers that make several clients of the same options, at the same time.
// kgo.DefaultCompressor writes into the slice that the user gave to kgo.ProducerBatchCompression, and
// every client reads it: without the lock that is a data race (franz-go 1.22). It opens no connection.
func New(opts ...kgo.Opt) (*kgo.Client, error) {
	making.Lock()
	defer making.Unlock()
	return kgo.NewClient(opts...)
}
