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

// The change and its message are committed by one transaction, or neither is.
func Example() {
	pay := func(ctx context.Context, pool *pgxpool.Pool, orderID string, body []byte) error {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(ctx) }() // does nothing after Commit
		if _, err := tx.Exec(ctx, `UPDATE orders SET state = 'paid' WHERE id = $1`, orderID); err != nil {
			return err
		}
		if err := outbox.Publish(ctx, tx, outbox.Message{Topic: "orders", Key: []byte(orderID), Payload: body}); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}
	_ = pay
}

// The UPDATE takes the row lock that orders the messages of this order, so it comes before Publish.
func ExamplePublish() {
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

// A buffer collects messages anywhere in the transaction. Flush inserts them at its end, when every
// lock is held.
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

// A reminder is published in three days, unless its order is paid before. Cancel reports which of
// the two happened.
func ExampleCancel() {
	place := func(ctx context.Context, tx pgx.Tx, orderID string) error {
		reminder := uuid.New() // an ID without a time: consumers cannot take it for expired
		if _, err := tx.Exec(ctx, `INSERT INTO orders (id, reminder) VALUES ($1, $2)`, orderID, reminder); err != nil {
			return err
		}
		return outbox.Publish(ctx, tx, outbox.Message{
			ID:        reminder,
			Topic:     "reminders",
			Key:       []byte(orderID),
			DeliverAt: time.Now().AddDate(0, 0, 3),
		})
	}
	pay := func(ctx context.Context, tx pgx.Tx, orderID string) (reminded bool, err error) {
		var reminder uuid.UUID
		err = tx.QueryRow(ctx, `UPDATE orders SET state = 'paid' WHERE id = $1 RETURNING reminder`, orderID).Scan(&reminder)
		if err != nil {
			return false, err
		}
		cancelled, err := outbox.Cancel(ctx, tx, reminder)
		return !cancelled, err // not cancelled: the reminder is published, or about to be
	}
	_, _ = place, pay
}

// A message that Kafka would refuse is refused at once, and the transaction stays usable.
func ExampleErrInvalid() {
	buffer := outbox.NewBuffer()
	err := buffer.Add(context.Background(), outbox.Message{Topic: "new orders"})
	fmt.Println(errors.Is(err, outbox.ErrInvalid))
	fmt.Println(err)
	// Output:
	// true
	// message cannot be published: message 0: topic "new orders": Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens
}

// Headers are stored as JSON, which any program can write.
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
