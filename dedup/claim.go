package dedup

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// Config of a Claims. The zero value works.
type Config struct {
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
}

// Claims records processed messages. It holds no connection and is safe for concurrent use.
type Claims struct {
	sql     map[bool]queries // by Consumer.forever
	schema  string
	lookMax time.Duration // zero: the constant; only tests set it
}

// Consumer is a registered consumer: the scope of its claims, and the table that holds them.
// Register returns it. Values with the same ID are the same consumer.
type Consumer struct {
	id       int32
	forever  bool
	replaced time.Duration
	idRule   string
}

// ID returns the consumer's ID in the tables.
func (c Consumer) ID() int32 { return c.id }

// Replaced returns the dedup window that was stored before this registration, if it differed. Then
// a replica with the other setting runs, or ran. Zero: there was none, or it was the same.
func (c Consumer) Replaced() time.Duration { return c.replaced }

// IDRule returns the stored rule that gives this consumer's messages their IDs.
func (c Consumer) IDRule() IDRule {
	rule, _ := ParseIDRule(c.idRule) // Register has checked it
	return rule
}

// ErrRetry marks a claim that conflicts with a concurrent transaction in a way that only a new
// transaction can resolve: serialization failure (40001, which REPEATABLE READ and SERIALIZABLE
// report instead of a duplicate), deadlock (40P01), lock timeout (55P03). The transaction is
// aborted and nothing is claimed. Roll back and run the transaction again; its new snapshot sees
// the other claim.
var ErrRetry = errors.New("claim conflicts with a concurrent transaction: roll back and run the transaction again")

// New returns the claims of a schema, or an error for an invalid schema name.
func New(cfg Config) (*Claims, error) {
	schema, err := migrations.Options{Schema: cfg.Schema}.Resolve()
	if err != nil {
		return nil, err
	}
	return &Claims{sql: newQueries(schema), schema: schema}, nil
}

// Message is what a claim knows of a message.
type Message struct {
	// ID under which it is claimed: see MessageID.
	ID uuid.UUID
	// Fingerprint of its content: see the function Fingerprint. It distinguishes a duplicate from
	// another message under the same ID.
	Fingerprint int32
}

// ErrConflict is returned by Claim: a message with another fingerprint claimed the ID. Dropping this
// one as a duplicate would lose it. Nothing is claimed, and the transaction can be used. Remedy: set
// the message aside, or claim it under another ID.
var ErrConflict = errors.New("a message with other content claimed the ID")

// ErrForgotten is returned by Claim and ClaimBatch: claims as old as the ID, a UUIDv7 or ULID, were
// forgotten (Registration.Window): the message may have been processed before. Roll back, and set the
// message aside, or look for its effect.
var ErrForgotten = errors.New("claims as old as the ID of the message were forgotten")

// Claim records one message in the caller's transaction and reports whether it is fresh: true
// exactly once for each consumer and ID. A duplicate gives false, and another message under the same
// ID ErrConflict. It waits while another open transaction holds the same claim. After any other
// error the transaction must be rolled back.
func (c *Claims) Claim(ctx context.Context, tx pgx.Tx, consumer Consumer, id uuid.UUID, fingerprint int32) (bool, error) {
	result, err := c.ClaimBatch(ctx, tx, consumer, []Message{{ID: id, Fingerprint: fingerprint}})
	if err != nil {
		return false, err
	}
	if result.conflicts != nil && result.conflicts[0] {
		return false, fmt.Errorf("%w: message %s", ErrConflict, id)
	}
	return result.fresh[0], nil
}

// ClaimBatch records many messages in one statement. If one ID occurs several times, only its first
// occurrence can be fresh. Claim all messages of a transaction in one call: two calls can deadlock
// with another transaction. It takes one round trip, and one more if there are duplicates.
func (c *Claims) ClaimBatch(ctx context.Context, tx pgx.Tx, consumer Consumer, msgs []Message) (*Result, error) {
	batch, mark := &pgx.Batch{}, time.Time{}
	result := c.Queue(batch, consumer, msgs)
	if len(msgs) == 0 {
		return result, nil
	}
	c.QueueForgotten(batch, consumer, &mark, true)
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return nil, WrapClaimError(err)
	}
	for i, m := range msgs {
		if at, ok := Time(m.ID); ok && result.fresh[i] && at.Before(mark) {
			return nil, fmt.Errorf("%w: message %s, forgotten up to %v", ErrForgotten, m.ID, mark)
		}
	}
	return result, c.Compare(ctx, tx, consumer, result)
}

// Result of a claim. For a queued claim, it is filled when the batch's results have been read.
type Result struct {
	msgs      []Message
	order     []int // indexes of the first occurrence of each ID, sorted by ID
	fresh     []bool
	conflicts []bool
}

// newResult sorts the IDs and removes repetitions: the first occurrence of an ID counts.
func newResult(msgs []Message) *Result {
	order := make([]int, len(msgs))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return bytes.Compare(msgs[a].ID[:], msgs[b].ID[:]) })
	order = slices.CompactFunc(order, func(a, b int) bool { return msgs[a].ID == msgs[b].ID })
	return &Result{msgs: msgs, order: order, fresh: make([]bool, len(msgs))}
}

// columns returns IDs and fingerprints of some messages, in types that pgx encodes without calling a
// method of each.
func (r *Result) columns(indexes []int) (ids [][16]byte, fingerprints []int32) {
	ids, fingerprints = make([][16]byte, len(indexes)), make([]int32, len(indexes))
	for i, at := range indexes {
		ids[i], fingerprints[i] = r.msgs[at].ID, r.msgs[at].Fingerprint
	}
	return ids, fingerprints
}

// Queue adds the claim of ClaimBatch to a batch of statements, so that they share one round trip.
// Errors of the statement are returned when the batch's results are read; pass them through
// WrapClaimError. Then call Compare.
func (c *Claims) Queue(batch *pgx.Batch, consumer Consumer, msgs []Message) *Result {
	result := newResult(msgs)
	ids, fingerprints := result.columns(result.order)
	batch.Queue(c.sql[consumer.forever].claim, ids, consumer.id, fingerprints).Query(result.read)
	return result
}

// Compare finds out which of the messages that are not fresh are conflicts, not duplicates: their ID
// was claimed with another fingerprint, before or earlier in the same batch. It is a statement of its
// own, because the claim does not see rows that are newer than its snapshot. If every message is
// fresh, it does nothing. After an error the transaction is aborted.
func (c *Claims) Compare(ctx context.Context, db Querier, consumer Consumer, result *Result) error {
	var others []int
	for i, fresh := range result.fresh {
		if !fresh {
			others = append(others, i)
		}
	}
	if len(others) == 0 {
		return nil
	}
	result.conflicts = make([]bool, len(result.msgs))
	ids, fingerprints := result.columns(others)
	rows, err := db.Query(ctx, c.sql[consumer.forever].conflicts, pgx.QueryExecModeCacheDescribe, ids, consumer.id, fingerprints) // planned each time
	if err != nil {
		return WrapClaimError(err)
	}
	var n int
	if _, err = pgx.ForEachRow(rows, []any{&n}, func() error { result.conflicts[others[n-1]] = true; return nil }); err != nil {
		return WrapClaimError(err)
	}
	return nil
}

// Fingerprint identifies the content of a message: CRC-32C (Castagnoli) over the length of the key in
// 8 bytes (big-endian; -1 for nil), the key, the length of the value, and the value. Nil and empty give
// different fingerprints. Other programs may compute it.
func Fingerprint(key, value []byte) int32 {
	var sum uint32
	for _, part := range [2][]byte{key, value} {
		var length [8]byte
		n := int64(len(part))
		if part == nil {
			n = -1
		}
		binary.BigEndian.PutUint64(length[:], uint64(n))
		sum = crc32.Update(sum, castagnoli, length[:])
		sum = crc32.Update(sum, castagnoli, part)
	}
	return int32(sum)
}

//nolint:gochecknoglobals // a constant table
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// read marks the returned IDs as fresh. The server returns IDs in the order in which it received
// them, so the next one is nearly always the one that follows. The result does not depend on that
// order.
func (r *Result) read(rows pgx.Rows) error {
	next := 0
	for rows.Next() {
		var id uuid.UUID
		if err := rows.Scan((*[16]byte)(&id)); err != nil {
			return err
		}
		found := next < len(r.order) && r.msgs[r.order[next]].ID == id
		if !found {
			next, found = slices.BinarySearchFunc(r.order, id, func(at int, id uuid.UUID) int { return bytes.Compare(r.msgs[at].ID[:], id[:]) })
		}
		if found {
			r.fresh[r.order[next]] = true
			next++
		}
	}
	return rows.Err()
}

// Fresh reports whether each message is fresh, in the order in which they were given.
func (r *Result) Fresh() []bool { return r.fresh }

// Conflicts reports for each message whether another message has its ID, after Compare. Nil: every
// message is fresh.
func (r *Result) Conflicts() []bool { return r.conflicts }

// WrapClaimError makes errors.Is(err, ErrRetry) true for errors that a new transaction resolves.
func WrapClaimError(err error) error {
	if pgerr.Transient(err) {
		return fmt.Errorf("%w: %w", ErrRetry, err)
	}
	return fmt.Errorf("claim messages: %w", err)
}
