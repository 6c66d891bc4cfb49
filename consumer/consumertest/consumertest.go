package consumertest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Main runs the tests of a package and stops the servers that they started. Call it from TestMain.
func Main(m *testing.M) { pgtest.Main(m) }

// Message is a message for a handler. Messages of one topic and partition are delivered in order.
type Message struct {
	// ID of the message, as its producer would send it. Default: a generated ID, the same in every
	// run.
	ID string
	// Topic. Default "messages".
	Topic     string
	Partition int32
	Key       string
	Value     string
	Headers   []consumer.Header
	// Time of the record. Default: the current time, the same in every run.
	Time time.Time
}

// Options of Verify. The zero value creates no tables: it suits only a handler that writes to none
// of its own.
type Options struct {
	// Setup is SQL that creates what the handler needs: tables, and rows in them.
	Setup string
	// Prepare does the same in Go, after Setup.
	Prepare func(ctx context.Context, pool *pgxpool.Pool) error
	// Ignore names columns, as "table.column", that differ from run to run for a good reason.
	// Identity columns, and those whose default is an expression (now(), a sequence), are ignored
	// anyway.
	Ignore []string
	// Calls, if set, records the handler's calls to other systems: each must have the same key in
	// every attempt.
	Calls *Calls
	// Consumer changes the consumer's configuration: set the real Order, Workers, Dedup and
	// OnFailure. Verify sets Group, Topics, Schema, Logger, Hooks, BatchMax and the pauses between
	// attempts.
	Consumer func(cfg *consumer.Config)
}

// Database returns a pool on a new database with the schema, for tests that call Deliver
// themselves. The pool is closed, and the database dropped, when the test ends.
func Database(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	return pgtest.Pool(tb)
}

// Records converts messages to records, with the offsets that they would have in new partitions.
func Records(messages ...Message) []*kgo.Record {
	next := map[string]int64{}
	records := make([]*kgo.Record, len(messages))
	for i, m := range messages {
		if m.Topic == "" {
			m.Topic = "messages"
		}
		if m.ID == "" {
			m.ID = uuid.Must(uuid.NewV7()).String()
		}
		if m.Time.IsZero() {
			m.Time = time.Now().Truncate(time.Millisecond)
		}
		partition := fmt.Sprint(m.Topic, m.Partition)
		r := &kgo.Record{Topic: m.Topic, Partition: m.Partition, Offset: next[partition], Timestamp: m.Time, Value: []byte(m.Value)}
		next[partition]++
		if m.Key != "" {
			r.Key = []byte(m.Key)
		}
		r.Headers = []kgo.RecordHeader{{Key: "message-id", Value: []byte(m.ID)}}
		for _, h := range m.Headers {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
		}
		records[i] = r
	}
	return records
}
