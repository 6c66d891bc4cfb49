package consumertest_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/consumer/consumertest"
)

func ExampleVerify() {
	type order struct{ Order, Amount int }
	handler := consumer.JSON(func(ctx context.Context, tx pgx.Tx, _ *consumer.Message, o order) error {
		_, err := tx.Exec(ctx, `INSERT INTO invoice (order_id, amount) VALUES ($1, $2)`, o.Order, o.Amount)
		return err
	})
	// func TestInvoices(t *testing.T)
	_ = func(t *testing.T) { //nolint:thelper // it stands for a test
		consumertest.Verify(t, handler, []consumertest.Message{
			{Key: "order-1", Value: `{"order": 1, "amount": 5}`},
			{Key: "order-2", Value: `{"order": 2, "amount": 7}`},
		}, consumertest.Options{Setup: `CREATE TABLE invoice (order_id int, amount int)`})
	}
}
