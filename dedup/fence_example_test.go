package dedup_test

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
)

// States may arrive in any order: the newest one stays, and late ones have no effect.
func ExampleFences_Fence() {
	fences, err := dedup.NewFences(dedup.FenceConfig{})
	if err != nil {
		return
	}
	handle := func(ctx context.Context, tx pgx.Tx, order string, version int64, state []byte) error {
		applied, err := fences.Fence(ctx, tx, "shop/orders", order, version)
		if err != nil || !applied {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE orders SET state = $2 WHERE id = $1`, order, state)
		return err
	}
	_ = handle
}
