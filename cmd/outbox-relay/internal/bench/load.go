package bench

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// idsPerMillisecond is the density of the messages' IDs in time: as of several producers that
// together write 20,000 messages per second.
const idsPerMillisecond = 20

// produce fills a topic. It returns when all messages are acknowledged.
func (b *consumeBench) produce(ctx context.Context, l load) error {
	begin := time.Now().Add(-time.Duration(l.messages/idsPerMillisecond) * time.Millisecond)
	var failed error
	var once sync.Once
	for i := range l.messages {
		id := messageID(begin.Add(time.Duration(i/idsPerMillisecond) * time.Millisecond))
		b.Client.Produce(ctx, &kgo.Record{
			Topic:   l.topic,
			Key:     []byte("account-" + strconv.Itoa(i%keysDistinct)),
			Value:   body(i),
			Headers: []kgo.RecordHeader{{Key: outbox.HeaderMessageID, Value: []byte(id.String())}},
		}, func(_ *kgo.Record, err error) {
			if err != nil {
				once.Do(func() { failed = err })
			}
		})
	}
	if err := b.Client.Flush(ctx); err != nil {
		return fmt.Errorf("produce to topic %s: %w", l.topic, err)
	}
	if failed != nil {
		return fmt.Errorf("produce to topic %s: %w", l.topic, failed)
	}
	return nil
}

// messageID makes a UUIDv7 of a given time. The IDs of one millisecond are in no order, as with
// several producers.
func messageID(at time.Time) uuid.UUID {
	var id uuid.UUID
	_, _ = rand.Read(id[6:]) // never fails: crypto/rand documents it
	var milli [8]byte
	binary.BigEndian.PutUint64(milli[:], uint64(at.UnixMilli()))
	copy(id[:6], milli[2:])
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return id
}

// body is different for each message, so that effects can be distinguished.
func body(i int) []byte {
	value := make([]byte, 0, consumeValueBytes)
	value = fmt.Appendf(value, `{"order":%d,"state":"paid","amount":%d,"currency":"EUR","note":"`, i, i%9973)
	for len(value) < consumeValueBytes-2 {
		value = append(value, 'a'+byte((i+len(value))%26))
	}
	return append(value, `"}`...)
}
