package parked

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup"
)

// ErrNotFound means that no parked message matches.
var ErrNotFound = errors.New("no parked message matches")

// Message is a row of parked_messages, without columns that may be large or secret.
type Message struct {
	Seq       int64     `json:"seq"`
	ID        uuid.UUID `json:"id"`
	Consumer  string    `json:"consumer"`
	Group     string    `json:"group"`
	Topic     string    `json:"topic"`
	Partition int32     `json:"partition"`
	Offset    int64     `json:"offset"`
	Key       Key       `json:"key"` // text, or base64: and bytes; null: none
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
func (m *Message) At() string { return fmt.Sprintf("%s/%d/%d", m.Topic, m.Partition, m.Offset) }

func scanMessage(row pgx.CollectableRow) (m Message, err error) {
	var id [16]byte
	var head *[16]byte
	err = row.Scan(&m.Seq, &id, &m.Consumer, &m.Group, &m.Topic, &m.Partition, &m.Offset, (*[]byte)(&m.Key), &m.Reason, &m.State, &m.Error, &m.Attempts,
		&m.ParkedAt, &m.AgeSeconds, &m.RetryInSeconds, &m.RecordTime, &m.PayloadBytes, &m.Behind, &head)
	m.ID = id
	if head != nil {
		m.Head = (*uuid.UUID)(head)
	}
	return m, err
}

// Filter selects messages; a nil field does not filter. Messages behind another one are left out
// unless Behind is set: they follow their head.
type Filter struct {
	Seqs                   []int64 // nil: any; see Find
	Key                    Key
	Topic, Consumer, Group *string
	Reason                 *string
	OlderThan, YoungerThan *time.Duration // since parked_at
	Behind                 bool
}

func (f Filter) args(more ...any) []any {
	return append([]any{f.Seqs, []byte(f.Key), f.Topic, f.Consumer, f.Group, f.Reason, f.OlderThan, f.YoungerThan, f.Behind}, more...)
}

// List returns messages, the newest first.
func List(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) ([]Message, error) {
	rows, err := db.Query(ctx, inSchema(listSQL, schema), filter.args(limit)...)
	if err != nil {
		return nil, fmt.Errorf("read parked messages: %w", err)
	}
	all, err := pgx.CollectRows(rows, scanMessage)
	if err != nil {
		return nil, fmt.Errorf("read parked messages: %w", err)
	}
	return all, nil
}

// Total is how many messages of a consumer are parked for a reason.
type Total struct {
	Consumer string
	Reason   string
	Count    int64
	Retrying int64 // how many of Count are handed back to the consumers
	HeldKeys int64 // keys whose first message has this reason
}

// Totals counts the messages that a filter selects, and those behind them.
func Totals(ctx context.Context, db operator.Querier, schema string, filter Filter) ([]Total, error) {
	filter.Behind = true
	rows, err := db.Query(ctx, inSchema(totalsSQL, schema), filter.args()...)
	if err != nil {
		return nil, fmt.Errorf("count parked messages: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Total])
	if err != nil {
		return nil, fmt.Errorf("count parked messages: %w", err)
	}
	return all, nil
}

// Targets returns the seq of messages, the oldest first, for Retry and Discard.
func Targets(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) ([]int64, error) {
	return seqs(ctx, db, inSchema(targetsSQL, schema), filter.args(min(limit, operator.TargetsMax))...)
}

// Find returns the seq of messages by what a person knows of them: the ID as logs show it, the ID
// as the message carried it, or topic/partition/offset. Several consumers may have parked the same
// message, and one ID may be used twice. If there is none, it returns ErrNotFound.
func Find(ctx context.Context, db operator.Querier, schema, text string) ([]int64, error) {
	sql, args := findArgs(text)
	found, err := seqs(ctx, db, inSchema(sql, schema), args...)
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
			return findAtSQL, []any{parts[0], partition, offset}
		}
	}
	var id *[16]byte
	if parsed, err := uuid.Parse(text); err == nil {
		id = (*[16]byte)(&parsed)
	} else if carried := dedup.MessageID("", []byte(text)); carried[0]&0x80 == 0 {
		id = (*[16]byte)(&carried) // a ULID: it does not depend on the scope
	}
	return findSQL, []any{id, text}
}

func seqs(ctx context.Context, db operator.Querier, sql string, args ...any) ([]int64, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("look for parked messages: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("look for parked messages: %w", err)
	}
	return found, nil
}
