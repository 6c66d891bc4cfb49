package idempotencytest_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/idempotencytest"
)

func ExampleVerify() {
	key := idempotency.Key{Scope: "tenant", Operation: "order", Value: "k"}
	createOrder := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		_, err := tx.Exec(ctx, `INSERT INTO orders (id, amount) VALUES ($1, $2)`, key.ChildID("order"), 100)
		return idempotency.Response{Status: 201}, err
	}
	// func TestOrders(t *testing.T)
	_ = func(t *testing.T) { //nolint:thelper // it replaces a test
		idempotencytest.Verify(t, idempotencytest.Once(idempotency.Config{Operation: "order"}, key, createOrder),
			idempotencytest.Options{Setup: `CREATE TABLE orders (id uuid, amount int)`})
	}
}
