package webhook_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/outbox"
)

// Two senders at one server, one of them during a rotation of its secret. Messages for other
// systems are published in the same transaction.
func Example() {
	serve := func(ctx context.Context, pool *pgxpool.Pool, current, next string) (http.Handler, error) {
		orders, err := webhook.New(pool, webhook.Config{Sender: "shop", Name: "orders", Scheme: webhook.StandardWebhooks(current, next)},
			func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
				if !json.Valid(event.Body) {
					return webhook.Refuse(errors.New("the body is not JSON"))
				}
				return outbox.Publish(ctx, tx, outbox.Message{ID: event.ChildID("publish"), Topic: "shop", Key: []byte(event.ID), Payload: event.Body})
			})
		if err != nil {
			return nil, err
		}
		pushes, err := webhook.New(pool, webhook.Config{Sender: "github", Name: "pushes", Scheme: webhook.GitHub(current)},
			func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
				_, err := tx.Exec(ctx, `INSERT INTO builds (push) VALUES ($1)`, event.Body)
				return err
			})
		if err != nil {
			return nil, err
		}
		go orders.Run(ctx) // one Run for all of them
		mux := http.NewServeMux()
		mux.Handle("/webhooks/shop", orders)
		mux.Handle("/webhooks/github", pushes)
		return mux, nil
	}
	_ = serve
}
