package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup"
)

// The claim and its effect are one transaction: a payment that is delivered twice is booked once.
func Example() {
	// At the start of the program.
	register := func(ctx context.Context, pool *pgxpool.Pool) (*dedup.Claims, dedup.Consumer, error) {
		claims, err := dedup.New(dedup.Config{})
		if err != nil {
			return nil, dedup.Consumer{}, err
		}
		consumer, err := claims.Register(ctx, pool, dedup.Registration{
			Name:   "billing/payments",
			Group:  "billing",
			Topics: []string{"payments"},
		})
		return claims, consumer, err
	}
	// For each message. carriedID is the ID that the message carries.
	book := func(ctx context.Context, pool *pgxpool.Pool, claims *dedup.Claims, consumer dedup.Consumer, carriedID, value []byte, cents int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			fresh, err := claims.Claim(ctx, tx, consumer, dedup.MessageID("payments", carriedID), dedup.Fingerprint(nil, value))
			if err != nil {
				return err // rolls back; dedup.ErrConflict: another message has this ID
			}
			if !fresh {
				return nil // a duplicate: its effect is already committed
			}
			_, err = tx.Exec(ctx, `UPDATE account SET balance = balance + $1 WHERE owner = 'alice'`, cents)
			return err
		})
	}
	_, _ = register, book
}

// Under REPEATABLE READ and SERIALIZABLE a conflict needs a new transaction.
func ExampleClaims_ClaimBatch() {
	claims, err := dedup.New(dedup.Config{Schema: "effectonce"})
	if err != nil {
		fmt.Println(err)
		return
	}
	handle := func(ctx context.Context, pool *pgxpool.Pool, consumer dedup.Consumer, carried []string) error {
		msgs := make([]dedup.Message, len(carried))
		for i, id := range carried {
			msgs[i] = dedup.Message{ID: dedup.MessageID("orders", []byte(id)), Fingerprint: dedup.Fingerprint(nil, []byte(id))}
		}
		for {
			err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				result, err := claims.ClaimBatch(ctx, tx, consumer, msgs)
				if err != nil {
					return err
				}
				for i, id := range carried {
					if !result.Fresh()[i] {
						continue
					}
					if _, err := tx.Exec(ctx, `UPDATE orders SET state = 'paid' WHERE id = $1`, id); err != nil {
						return err
					}
				}
				return nil
			})
			if !errors.Is(err, dedup.ErrRetry) {
				return err
			}
		}
	}
	_ = handle
}

// An ID that carries its time is used as it is; anything else is hashed with its scope.
func ExampleMessageID() {
	fmt.Println(dedup.MessageID("orders", []byte("0191D3A7-5C1E-7ABC-9DEF-0123456789AB")))
	fmt.Println(dedup.MessageID("orders", []byte("order-4711")))
	fmt.Println(dedup.MessageID("refunds", []byte("order-4711")))
	// Output:
	// 0191d3a7-5c1e-7abc-9def-0123456789ab
	// fe0374e1-62b3-872a-aabd-877c33d7b2b3
	// cde2a6fc-03cf-8178-b1d7-1ed508df4f35
}

// The ID of a message that a handler publishes is derived from the handled message, so a
// re-execution publishes it under the same ID. recordTime is the timestamp of the handled record,
// not the current time.
func ExamplePublishID() {
	message := dedup.MessageID("orders", []byte("order-4711"))
	recordTime := time.Date(2026, time.November, 21, 12, 0, 0, 0, time.UTC)
	invoice := dedup.PublishID("billing", message, "invoice", recordTime)
	again := dedup.PublishID("billing", message, "invoice", recordTime)
	at, _ := dedup.Time(invoice)
	fmt.Println(invoice == again, invoice.Version(), at.UTC())
	// Output: true VERSION_7 2026-11-21 12:00:00 +0000 UTC
}

// The idempotency key of a foreign call depends only on consumer, message and step. Each attempt
// calls under the same key.
func ExampleCallKey() {
	message := dedup.MessageID("orders", []byte("order-4711"))
	fmt.Println(dedup.CallKey("billing/orders", message, "charge"))
	fmt.Println(dedup.CallKey("billing/orders", message, "refund"))
	// Output:
	// 969809a2-5fbc-858c-a489-e8dbe750925e
	// c104be56-3045-8904-9a65-620a60f00b63
}

// States may arrive in any order: the newest one stays, and late ones have no effect.
func ExampleClaims_Fence() {
	claims, err := dedup.New(dedup.Config{})
	if err != nil {
		return
	}
	handle := func(ctx context.Context, tx pgx.Tx, order string, version int64, state []byte) error {
		applied, err := claims.Fence(ctx, tx, "shop/orders", order, version)
		if err != nil || !applied {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE orders SET state = $2 WHERE id = $1`, order, state)
		return err
	}
	_ = handle
}
