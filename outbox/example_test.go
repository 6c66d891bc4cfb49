package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/outbox"
)

// The order's change and its event are one transaction. The UPDATE takes the lock that orders the
// order's events, so it comes before the event.
func Example() {
	pay := func(ctx context.Context, pool *pgxpool.Pool, orderID string, body []byte) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE orders SET state = 'paid' WHERE id = $1`, orderID); err != nil {
				return err
			}
			return outbox.Publish(ctx, tx, outbox.Message{
				Topic:   "orders",
				Key:     []byte(orderID),
				Payload: body,
				Headers: []outbox.Header{{Name: "content-type", Value: []byte("application/json")}},
			})
		})
	}
	_ = pay
}

// A buffer collects wherever the code is, and inserts when every lock is held.
func ExampleBuffer() {
	ship := func(ctx context.Context, pool *pgxpool.Pool, orderIDs []string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			buffer := outbox.NewBuffer()
			for _, id := range orderIDs {
				if err := buffer.Add(ctx, outbox.Message{Topic: "orders", Key: []byte(id), Payload: []byte(`{"state":"shipped"}`)}); err != nil {
					return err
				}
				if _, err := tx.Exec(ctx, `UPDATE orders SET state = 'shipped' WHERE id = $1`, id); err != nil {
					return err
				}
			}
			return buffer.Flush(ctx, tx)
		})
	}
	_ = ship
}

// A reminder is published in three days, unless its order is paid before. Cancel says which of the two it is.
func ExampleCancel() {
	place := func(ctx context.Context, tx pgx.Tx, orderID string, reminder uuid.UUID) error {
		return outbox.Publish(ctx, tx, outbox.Message{
			ID:        reminder, // uuid.New(), stored with the order
			Topic:     "reminders",
			AlsoTo:    []string{"audit"},
			Key:       []byte(orderID),
			DeliverAt: time.Now().AddDate(0, 0, 3),
		})
	}
	pay := func(ctx context.Context, tx pgx.Tx, reminder uuid.UUID) (reminded bool, err error) {
		cancelled, err := outbox.Cancel(ctx, tx, reminder)
		return !cancelled, err
	}
	_, _ = place, pay
}

// A message that Kafka would refuse is refused at once, and the transaction goes on.
func ExampleErrInvalid() {
	buffer := outbox.NewBuffer()
	err := buffer.Add(context.Background(), outbox.Message{Topic: "new orders"})
	fmt.Println(errors.Is(err, outbox.ErrInvalid))
	fmt.Println(err)
	// Output:
	// true
	// message cannot be published: message 0: topic "new orders": Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens
}

// The stored form of headers is JSON that any program can write.
func ExampleEncodeHeaders() {
	stored, err := outbox.EncodeHeaders([]outbox.Header{
		{Name: "content-type", Value: []byte("application/json")},
		{Name: "trace", Value: []byte{0xff, 0}},
		{Name: "tag", Value: []byte("new")},
		{Name: "tag", Value: nil},
	})
	fmt.Println(string(stored), err)
	// Output: {"content-type":"application/json","tag":["new",null],"trace":{"base64":"/wA="}} <nil>
}
