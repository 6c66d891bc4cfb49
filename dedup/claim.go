package dedup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

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
	sql     queries
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

// Claim records one message in the caller's transaction and reports whether it is fresh: true
// exactly once for each consumer and ID. It waits while another open transaction holds the same
// claim. After an error the transaction is aborted and must be rolled back.
func (c *Claims) Claim(ctx context.Context, tx pgx.Tx, consumer Consumer, id uuid.UUID) (bool, error) {
	fresh, err := c.ClaimBatch(ctx, tx, consumer, []uuid.UUID{id})
	if err != nil {
		return false, err
	}
	return fresh[0], nil
}

// ClaimBatch records many messages in one statement and one round trip; fresh[i] belongs to ids[i].
// If an ID occurs several times in ids, only its first occurrence can be fresh; the others are
// duplicates. Claim all IDs of a transaction in one call: two calls can deadlock with another
// transaction.
func (c *Claims) ClaimBatch(ctx context.Context, tx pgx.Tx, consumer Consumer, ids []uuid.UUID) (fresh []bool, err error) {
	if len(ids) == 0 {
		return nil, nil
	}
	batch := &pgx.Batch{}
	result := c.Queue(batch, consumer, ids)
	err = tx.SendBatch(ctx, batch).Close()
	if err != nil {
		return nil, WrapClaimError(err)
	}
	return result.Fresh(), nil
}

// Result of a claim. For a queued claim, it is filled when the batch's results have been read.
type Result struct {
	sorted    []uuid.UUID // the IDs, each once
	first     []int       // index in the batch of the first occurrence of each ID in sorted
	fresh     []bool
	conflicts []bool
}

// newResult sorts the IDs and removes repetitions: the first occurrence of an ID counts.
func newResult(ids []uuid.UUID) *Result {
	first := make([]int, len(ids))
	for i := range first {
		first[i] = i
	}
	slices.SortStableFunc(first, func(a, b int) int { return bytes.Compare(ids[a][:], ids[b][:]) })
	first = slices.CompactFunc(first, func(a, b int) bool { return ids[a] == ids[b] })
	sorted := make([]uuid.UUID, len(first))
	for i, at := range first {
		sorted[i] = ids[at]
	}
	return &Result{sorted: sorted, first: first, fresh: make([]bool, len(ids))}
}

// Queue adds the claim of ClaimBatch to a batch of statements, so that they share one round trip.
// Errors of the statement are returned when the batch's results are read; pass them through
// WrapClaimError.
func (c *Claims) Queue(batch *pgx.Batch, consumer Consumer, ids []uuid.UUID) *Result {
	result := newResult(ids)
	sql := c.sql.claim
	if consumer.forever {
		sql = c.sql.claimForever
	}
	batch.Queue(sql, asArrays(result.sorted), consumer.id).Query(result.read)
	return result
}

// asArrays converts the IDs to a type that pgx encodes without calling a method of each ID.
func asArrays(ids []uuid.UUID) [][16]byte {
	arrays := make([][16]byte, len(ids))
	for i, id := range ids {
		arrays[i] = id
	}
	return arrays
}

// Fingerprint identifies the content of a message. It is the first 128 bits of SHA-256 over key and
// value, each preceded by its length. Nil and empty give different fingerprints.
func Fingerprint(key, value []byte) [16]byte {
	hash := sha256.New()
	for _, part := range [][]byte{key, value} {
		length := int64(len(part))
		if part == nil {
			length = -1
		}
		_ = binary.Write(hash, binary.BigEndian, length) // a hash never fails
		hash.Write(part)
	}
	return [16]byte(hash.Sum(nil))
}

// QueueChecked is Queue for consumers that distinguish a duplicate from another message under the
// same ID. The claim stores the fingerprint of each message. Result.Conflicts reports the IDs that
// were claimed with a different fingerprint, before or earlier in the same batch. A fingerprint of
// zeros means none: it is not stored, and the message conflicts with nothing. A message also
// conflicts with nothing if its ID was claimed without a fingerprint.
func (c *Claims) QueueChecked(batch *pgx.Batch, consumer Consumer, ids []uuid.UUID, fingerprints [][16]byte) *Result {
	result := newResult(ids)
	result.conflicts = make([]bool, len(ids))
	all := make([]pgtype.UUID, len(ids))
	for i, fingerprint := range fingerprints {
		all[i] = pgtype.UUID{Bytes: fingerprint, Valid: fingerprint != [16]byte{}}
	}
	claim, compare := c.sql.claimChecked, c.sql.conflicts
	if consumer.forever {
		claim, compare = c.sql.claimCheckedForever, c.sql.conflictsForever
	}
	batch.Queue(claim, asArrays(result.sorted), consumer.id, once(result, all)).Query(result.read)
	batch.Queue(compare, asArrays(ids), consumer.id, all).Query(func(rows pgx.Rows) error {
		var at int
		_, err := pgx.ForEachRow(rows, []any{&at}, func() error {
			result.conflicts[at-1] = true
			return nil
		})
		return err
	})
	return result
}

// once returns the elements of each that belong to first occurrences, in the order of sorted.
func once[T any](r *Result, each []T) []T {
	chosen := make([]T, len(r.first))
	for i, at := range r.first {
		chosen[i] = each[at]
	}
	return chosen
}

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
		found := next < len(r.sorted) && r.sorted[next] == id
		if !found {
			next, found = slices.BinarySearchFunc(r.sorted, id, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
		}
		if found {
			r.fresh[r.first[next]] = true
			next++
		}
	}
	return rows.Err()
}

// Fresh reports whether each ID of the claim is fresh, in the order in which the IDs were given.
func (r *Result) Fresh() []bool { return r.fresh }

// ProcessedAt returns when an ID was claimed, by the database's clock. It returns pgx.ErrNoRows if
// the ID is not claimed, or its claim was forgotten.
func (c *Claims) ProcessedAt(ctx context.Context, db Querier, consumer Consumer, id uuid.UUID) (at time.Time, err error) {
	sql := c.sql.processedAt
	if consumer.forever {
		sql = c.sql.processedAtForever
	}
	err = db.QueryRow(ctx, sql, [16]byte(id), consumer.id).Scan(&at)
	if err != nil {
		return at, fmt.Errorf("read the claim of message %s: %w", id, err)
	}
	return at, nil
}

// Conflicts reports for each ID of QueueChecked whether a message with different content claimed
// it. Nil after Queue.
func (r *Result) Conflicts() []bool { return r.conflicts }

// WrapClaimError makes errors.Is(err, ErrRetry) true for errors that a new transaction resolves.
func WrapClaimError(err error) error {
	if pgerr.Transient(err) {
		return fmt.Errorf("%w: %w", ErrRetry, err)
	}
	return fmt.Errorf("claim messages: %w", err)
}
