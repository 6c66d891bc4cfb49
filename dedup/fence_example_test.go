package dedup_test

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
)

// States may arrive in any order: the newest one stays, and late ones have no effect.
func ExampleFence() {
	handle := func(ctx context.Context, tx pgx.Tx, order string, version int64, state []byte) error {
		fenced, err := dedup.Fence(ctx, tx, "shop/orders", order, version, state)
		if err != nil || fenced.Verdict != dedup.Applied {
			return err // stale or equal: there is nothing to do
		}
		_, err = tx.Exec(ctx, `UPDATE orders SET state = $2 WHERE id = $1`, order, state)
		return err
	}
	_ = handle
}

// Changes build on each other: each one must be applied, and none may be skipped.
func ExampleFences_FenceBatch() {
	type change struct {
		account string
		version int64
		cents   int
	}
	fences, err := dedup.NewFences(dedup.FenceConfig{RefuseGaps: true})
	if err != nil {
		return
	}
	handle := func(ctx context.Context, tx pgx.Tx, changes []change) error {
		versions := make([]dedup.Version, len(changes))
		for i, c := range changes {
			versions[i] = dedup.Version{Resource: c.account, Version: c.version}
		}
		fenced, err := fences.FenceBatch(ctx, tx, "ledger/accounts", versions)
		if err != nil {
			return err // retry a gap until the missing change has been applied
		}
		for i, c := range changes {
			if fenced[i].Verdict != dedup.Applied {
				continue
			}
			if _, err := tx.Exec(ctx, `UPDATE account SET balance = balance + $2 WHERE id = $1`, c.account, c.cents); err != nil {
				return err
			}
		}
		return nil
	}
	_ = handle
}
