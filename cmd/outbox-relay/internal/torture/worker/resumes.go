package worker

import (
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
)

// metadataMax is when a client sees added partitions at the latest.
const metadataMax = 5 * time.Second

// resumes writes down where a consumer begins to read a partition, and where it goes back. It sees the
// records before the engine does.
type resumes struct {
	group string
	book  *ledger.Writer
	mu    sync.Mutex
	last  map[string]map[int32]int64
}

func newResumes(group string, book *ledger.Writer) *resumes {
	return &resumes{group: group, book: book, last: map[string]map[int32]int64{}}
}

// OnFetchRecordUnbuffered is called by the client for each record that it hands out or drops.
func (r *resumes) OnFetchRecordUnbuffered(record *kgo.Record, polled bool) {
	if !polled {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	topic := r.last[record.Topic]
	if topic == nil {
		topic = map[int32]int64{}
		r.last[record.Topic] = topic
	}
	last, known := topic[record.Partition]
	topic[record.Partition] = record.Offset
	if known && record.Offset > last {
		return
	}
	_ = r.book.Write(ledger.Resumed, r.group, record.Topic, record.Partition, record.Offset, time.Now().UnixNano()) // missing lines are blamed
}
