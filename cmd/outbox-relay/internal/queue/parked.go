package queue

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup"
)

// ParkedMessage is a row of parked_messages, without columns that may be large or secret.
type ParkedMessage struct {
	Seq       int64     `json:"seq"`
	ID        uuid.UUID `json:"id"`
	Consumer  string    `json:"consumer"`
	Group     string    `json:"group"`
	Topic     string    `json:"topic"`
	Partition int32     `json:"partition"`
	Offset    int64     `json:"offset"`
	Key       human.Key `json:"key"` // text, or base64: and bytes; null: none
	Reason    string    `json:"reason"`
	State     string    `json:"state"`
	Error     string    `json:"error"`
	Attempts  int32     `json:"attempts"`
	ParkedAt  time.Time `json:"parked_at"`
	// AgeSeconds is the time since ParkedAt, by the database's clock.
	AgeSeconds float64 `json:"age_seconds"`
	// RetryInSeconds is the time until the next attempt; null: it is not handed back.
	RetryInSeconds *float64   `json:"retry_in_seconds"`
	RecordTime     *time.Time `json:"record_time"`
	PayloadBytes   *int64     `json:"payload_bytes"` // null: a tombstone, or not stored
	Behind         int64      `json:"behind"`        // messages that wait for it
	// Head is the message for which it waits, if any.
	Head *uuid.UUID `json:"head"`
}

// At is the record's place in Kafka, as topic/partition/offset.
func (m *ParkedMessage) At() string { return fmt.Sprintf("%s/%d/%d", m.Topic, m.Partition, m.Offset) }

func scanParked(row pgx.CollectableRow) (m ParkedMessage, err error) {
	var head *[16]byte
	err = row.Scan(&m.Seq, (*[16]byte)(&m.ID), &m.Consumer, &m.Group, &m.Topic, &m.Partition, &m.Offset, (*[]byte)(&m.Key), &m.Reason, &m.State, &m.Error, &m.Attempts,
		&m.ParkedAt, &m.AgeSeconds, &m.RetryInSeconds, &m.RecordTime, &m.PayloadBytes, &m.Behind, &head)
	m.Head = (*uuid.UUID)(head)
	return m, err
}

// ParkedFilter selects parked messages; a nil field does not filter.
type ParkedFilter struct {
	Seqs                   []int64 // nil: any; see FindParked
	Key                    human.Key
	Topic, Consumer, Group *string
	Reason                 *string
	OlderThan, YoungerThan *time.Duration // since parked_at
	Behind                 bool
}

func (f ParkedFilter) args(behind bool, more ...any) []any {
	return append([]any{f.Seqs, []byte(f.Key), f.Topic, f.Consumer, f.Group, f.Reason, f.OlderThan, f.YoungerThan, f.Behind || behind}, more...)
}

// ParkedTable is the table of parked messages, each identified by its seq.
type ParkedTable = Table[int64, ParkedMessage, ParkedFilter]

// Parked is parked_messages.
func Parked(schema string) *ParkedTable {
	return &ParkedTable{
		name: "parked messages", held: "parked", unstored: ReasonTooLarge, reasons: parkedReasons(), schema: schema,
		sql: statements{
			list: parkedListSQL, targets: parkedTargetsSQL, totals: parkedTotalsSQL, detail: parkedDetailSQL, next: parkedBehindSQL,
			lock: parkedLockSQL, lockQueues: parkedLockQueuesSQL, retry: parkedRetrySQL, discard: parkedDiscardSQL, promote: parkedPromotedSQL,
			outcomes: parkedOutcomesSQL, discarded: parkedDiscardedSQL,
		},
		scan: scanParked, locked: scanLockedParked,
		at:     func(seq int64) ParkedFilter { return ParkedFilter{Seqs: []int64{seq}, Behind: true} },
		into:   func(seq *int64) []any { return []any{seq} },
		places: func(seqs []int64) []any { return []any{seqs} },
		queues: func(rows []locked[int64]) []any {
			consumers, topics := make([]int32, len(rows)), make([]string, len(rows))
			partitions, hashes := make([]int32, len(rows)), make([][]byte, len(rows))
			for i, r := range rows {
				consumers[i], topics[i], partitions[i], hashes[i] = r.consumer, r.topic, r.partition, keyHash(r.key)
			}
			return []any{consumers, topics, partitions, hashes}
		},
	}
}

// ParkedDetail is everything about a parked message.
type ParkedDetail struct {
	ParkedMessage
	TopicID    *uuid.UUID        `json:"topic_id"`
	Headers    json.RawMessage   `json:"headers"`
	Payload    []byte            `json:"-"` // at most as much as was requested
	ReleasedAt *time.Time        `json:"released_at"`
	RetryAt    time.Time         `json:"retry_at"`
	Next       []ParkedMessage   `json:"next"`    // messages behind it, at most 20
	Actions    []operator.Action `json:"actions"` // of operators on this ID, the newest first, at most 20
}

// ShowParked reads a message with up to payloadMax bytes of its payload, or ErrNotFound.
func ShowParked(ctx context.Context, db operator.Querier, schema string, seq, payloadMax int64) (d *ParkedDetail, err error) {
	d = &ParkedDetail{}
	var topicID *[16]byte
	d.ParkedMessage, d.Next, err = Parked(schema).show(ctx, db, seq, payloadMax, &topicID, (*[]byte)(&d.Headers), &d.Payload, &d.ReleasedAt, &d.RetryAt)
	if err == nil {
		d.TopicID = (*uuid.UUID)(topicID)
		d.Actions, err = operator.Actions(ctx, db, schema, operator.ActionFilter{Message: &d.ID}, actionsMax)
	}
	return d, err
}

// FindParked returns the seq of messages by what a person knows of them: the ID as logs show it,
// the ID as the message carried it, or topic/partition/offset. Several consumers may have parked
// the same message, and one ID may be used twice. If there is none, it returns ErrNotFound.
func FindParked(ctx context.Context, db operator.Querier, schema, text string) ([]int64, error) {
	sql, args := findArgs(text)
	found, err := collect(ctx, db, Parked(schema), pgx.RowTo[int64], sql, args...)
	if err == nil && len(found) == 0 {
		return nil, ErrNotFound
	}
	return found, err
}

func findArgs(text string) (sql string, args []any) {
	parts := strings.Split(text, "/")
	if len(parts) == 3 {
		partition, err := strconv.ParseInt(parts[1], 10, 32)
		offset, offsetErr := strconv.ParseInt(parts[2], 10, 64)
		if err == nil && offsetErr == nil {
			return parkedFindAtSQL, []any{parts[0], partition, offset}
		}
	}
	var id *[16]byte
	if parsed, err := uuid.Parse(text); err == nil {
		id = (*[16]byte)(&parsed)
	} else if carried := dedup.MessageID("", []byte(text)); carried[0]&0x80 == 0 {
		id = (*[16]byte)(&carried) // a ULID: it does not depend on the scope
	}
	return parkedFindSQL, []any{id, text}
}

func scanLockedParked(row pgx.CollectableRow) (r locked[int64], err error) {
	var name, text string
	var offset int64
	var attempts int32
	err = row.Scan(&r.place, &r.consumer, &name, (*[16]byte)(&r.id), &r.topic, &r.partition, &offset, (*[]byte)(&r.key), &r.reason, &text, &attempts, &r.state)
	r.seq = r.place
	r.subject = map[string]any{
		"seq": r.place, "consumer": name, "message_id": r.id, "topic": r.topic, "partition": r.partition, "offset": offset,
		"key": r.key, "reason": r.reason, "error": text, "attempts": attempts, "state": r.state,
	}
	return r, err
}
