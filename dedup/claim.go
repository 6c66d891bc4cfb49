package dedup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/migrations"
)

// Config of a Claims. The zero value works.
type Config struct {
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
}

// Claims records processed messages. It holds no connection and is safe for concurrent use.
type Claims struct{ sql queries }

// Consumer is the number of a registered consumer: the scope of its claims.
type Consumer int32

// ErrRetry marks a claim that met a concurrent transaction in a way that only a new transaction can
// resolve: serialization failure (40001, what REPEATABLE READ and SERIALIZABLE report instead of a
// duplicate), deadlock (40P01), lock timeout (55P03). The transaction is aborted and nothing is
// claimed: roll back and run it again; the next snapshot sees the other claim.
var ErrRetry = errors.New("claim met a concurrent transaction: roll back and run again")

// ErrNameTaken is returned by Register: the name belongs to another consumer group. Two applications
// under one name would drop each other's messages. Nothing was changed. Remedy: another name.
var ErrNameTaken = errors.New("consumer name is taken by another consumer group")

// New returns the claims of a schema, or an error for a schema name out of bounds.
func New(cfg Config) (*Claims, error) {
	schema, err := migrations.Options{Schema: cfg.Schema}.Resolve()
	if err != nil {
		return nil, err
	}
	return &Claims{sql: newQueries(schema)}, nil
}

// Querier is a pool, a connection or a transaction.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Register returns the number of a consumer and makes it on the first call. The name is at most 600
// bytes. A name that another group registered gives ErrNameTaken.
func (c *Claims) Register(ctx context.Context, db Querier, name, group string, topics []string) (Consumer, error) {
	var id Consumer
	var owner string
	if err := db.QueryRow(ctx, c.sql.register, name, group, topics).Scan(&id, &owner); err != nil {
		return 0, fmt.Errorf("register consumer %q: %w", name, err)
	}
	if owner != group {
		return 0, fmt.Errorf("%w: %q belongs to group %q, not to %q: choose another consumer name", ErrNameTaken, name, owner, group)
	}
	return id, nil
}

// Claim records one message in the caller's transaction and reports whether it is fresh: true exactly
// once for each consumer and ID, whoever asks. It waits while another open transaction holds the same
// claim. After an error the transaction is aborted and must be rolled back.
func (c *Claims) Claim(ctx context.Context, tx pgx.Tx, consumer Consumer, id uuid.UUID) (bool, error) {
	fresh, err := c.ClaimBatch(ctx, tx, consumer, []uuid.UUID{id})
	if err != nil {
		return false, err
	}
	return fresh[0], nil
}

// ClaimBatch records many messages in one statement and one round trip; fresh[i] tells of ids[i]. Of
// an ID that occurs several times in ids the first occurrence can be fresh, the others are duplicates.
// Claim all IDs of a transaction in one call: two calls can deadlock with another transaction's.
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

// Result of a queued claim. It is filled when the batch's results have been read.
type Result struct {
	ids     []uuid.UUID
	claimed map[uuid.UUID]struct{}
}

// Queue adds the claim of ClaimBatch to a batch of statements, so that it can share their round trip.
// Errors of the statement come from reading the batch's results; pass them through WrapClaimError.
func (c *Claims) Queue(batch *pgx.Batch, consumer Consumer, ids []uuid.UUID) *Result {
	result := &Result{ids: ids, claimed: make(map[uuid.UUID]struct{}, len(ids))}
	sorted := make([][16]byte, len(ids))
	for i, id := range ids {
		sorted[i] = id
	}
	slices.SortFunc(sorted, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	sorted = slices.Compact(sorted)
	batch.Queue(c.sql.claim, sorted, int32(consumer)).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			var id [16]byte
			if err := rows.Scan(&id); err != nil {
				return err
			}
			result.claimed[id] = struct{}{}
		}
		return rows.Err()
	})
	return result
}

// Fresh tells for each ID of the claim, in the order in which they were given, whether it is fresh.
// It may be called once.
func (r *Result) Fresh() []bool {
	fresh := make([]bool, len(r.ids))
	for i, id := range r.ids {
		if _, ok := r.claimed[id]; ok {
			fresh[i] = true
			delete(r.claimed, id) // a second occurrence in the same batch is a duplicate
		}
	}
	return fresh
}

// WrapClaimError makes errors.Is(err, ErrRetry) true for those that a new transaction resolves.
func WrapClaimError(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		switch pgErr.Code {
		case "40001", "40P01", "55P03":
			return fmt.Errorf("%w: %w", ErrRetry, err)
		}
	}
	return fmt.Errorf("claim messages: %w", err)
}
