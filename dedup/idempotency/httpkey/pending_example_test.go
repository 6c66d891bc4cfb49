package httpkey_test

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// A payment that happens once, whatever becomes of this process: the key is on disk before the bank is asked, and goes in
// the transaction that writes the answer down. After a restart, charge every order that is in Pending.List again.
func ExamplePending() {
	charge := func(ctx context.Context, pool *pgxpool.Pool, client *http.Client, pending *httpkey.Pending, order string) (err error) {
		name := "charge order " + order
		request, err := http.NewRequestWithContext(httpkey.WithRequestName(ctx, name), http.MethodPost, "https://bank.example/charges", strings.NewReader(order))
		if err != nil {
			return err
		}
		response, err := client.Do(request) // its Transport has TransportConfig.Pending
		if err != nil {
			return err // it is pending: ask again
		}
		defer func() { err = errors.Join(err, response.Body.Close()) }()
		if response.StatusCode != http.StatusCreated {
			return errors.New("not charged: " + response.Status)
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE orders SET charged = true WHERE id = $1`, order); err != nil {
				return err
			}
			return pending.ForgetTx(ctx, tx, name, httpkey.SentKey(response, ""))
		})
	}
	_ = charge
}

// A handler that asks another service under a key derived from its own: the same at each attempt of the work.
func ExampleWithChild() {
	ship := func(ctx context.Context, client *http.Client, key idempotency.Key) error {
		request, err := http.NewRequestWithContext(httpkey.WithChild(ctx, key, "ship"), http.MethodPost, "https://carrier.example/parcels", http.NoBody)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		return response.Body.Close()
	}
	_ = ship
}
