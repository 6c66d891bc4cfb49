package record_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
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
