package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
)

// The claims that are measured, before and after the rows exist.
const (
	costBatch   = 500
	costBatches = 400
)

// window is the time over which the rows are spread.
const costWindow = 7 * 24 * time.Hour

// claimCosts measures how much longer a claim takes when the table has many rows. IDs that begin
// with their time go to the end of an index; random IDs touch all of it.
func (b *consumeBench) claimCosts(ctx context.Context) error {
	claims, err := dedup.New(dedup.Config{Schema: b.schema})
	if err != nil {
		return err
	}
	consumer, err := claims.Register(ctx, b.pool, dedup.Registration{Name: "cost", Group: "cost"})
	if err != nil {
		return err
	}
	for _, kind := range []struct {
		key string
		id  func(at time.Time) uuid.UUID
	}{{"dedup_cost_uuid7", messageID}, {"dedup_cost_random", func(time.Time) uuid.UUID { return randomID() }}} {
		if err := b.clean(ctx); err != nil {
			return err
		}
		empty, err := b.claimSeconds(ctx, claims, consumer, kind.id)
		if err != nil {
			return fmt.Errorf("%s: %w", kind.key, err)
		}
		b.note("%s: copying %d rows", kind.key, b.opts.Preload)
		if err := b.preload(ctx, consumer, kind.id); err != nil {
			return fmt.Errorf("%s: %w", kind.key, err)
		}
		if err := b.checkpoint(ctx); err != nil {
			return err
		}
		full, err := b.claimSeconds(ctx, claims, consumer, kind.id)
		if err != nil {
			return fmt.Errorf("%s: %w", kind.key, err)
		}
		b.samples.add(kind.key, full/empty)
		b.note("%s: %.2f", kind.key, full/empty)
	}
	return nil
}

// randomID returns an ID that carries no time.
func randomID() uuid.UUID {
	id := uuid.New()
	id[0] |= 0x80
	return id
}

// claimSeconds claims new IDs in batches, each in a transaction, and returns how long the faster
// half took: the slower half includes the checkpoints of the rows.
func (b *consumeBench) claimSeconds(ctx context.Context, claims *dedup.Claims, consumer dedup.Consumer, id func(time.Time) uuid.UUID) (float64, error) {
	conn, closeConn, err := b.connect(ctx)
	if err != nil {
		return 0, err
	}
	defer closeConn()
	took := make([]float64, costBatches)
	for i := range took {
		ids := make([]uuid.UUID, costBatch)
		for j := range ids {
			ids[j] = id(time.Now())
		}
		begin := time.Now()
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			_, err := claims.ClaimBatch(ctx, tx, consumer, ids)
			return err
		})
		if err != nil {
			return 0, err
		}
		took[i] = time.Since(begin).Seconds()
	}
	return percentile(took, 0.5), nil
}

// preload copies rows, spread over a week, in the order of their time.
func (b *consumeBench) preload(ctx context.Context, consumer dedup.Consumer, id func(time.Time) uuid.UUID) error {
	conn, closeConn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer closeConn()
	begin, n := time.Now().Add(-costWindow), 0
	_, err = conn.CopyFrom(ctx, pgx.Identifier{b.schema, "processed_messages"}, []string{"message_id", "consumer"}, pgx.CopyFromFunc(func() ([]any, error) {
		if n == b.opts.Preload {
			return nil, nil
		}
		at := begin.Add(time.Duration(float64(costWindow) * float64(n) / float64(b.opts.Preload)))
		if n++; n%5_000_000 == 0 {
			b.note("copied %d rows", n)
		}
		return []any{[16]byte(id(at)), consumer.ID()}, nil
	}))
	if err != nil {
		return fmt.Errorf("copy rows: %w", err)
	}
	return nil
}
