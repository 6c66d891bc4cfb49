package keyclient_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
)

// A payment that happens once, even if this process dies: the key is on disk before the request is
// sent, and is removed in the transaction that stores the response. After a restart, pending
// requests are retried under their keys: another replica may have listed them, too, and may have
// finished them already.
func ExamplePending() {
	const charge = "charge order "
	// key is empty for an order that one program charges for the first time.
	pay := func(ctx context.Context, pool *pgxpool.Pool, client *http.Client, pending *keyclient.Pending, order, key string) (err error) {
		var charged bool
		if err := pool.QueryRow(ctx, `SELECT charged FROM orders WHERE id = $1`, order).Scan(&charged); err != nil {
			return err
		}
		if charged { // also if the reply to the COMMIT below was lost
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return pending.Forget(ctx, tx, charge+order, key) }) // a request after that COMMIT made it pending again
		}
		sent, err := pending.Begin(ctx, charge+order, cmp.Or(key, idempotency.NewKey()))
		if err != nil {
			return err
		}
		if key != "" && sent != key {
			return errors.New("another process began the request anew")
		}
		request, err := http.NewRequestWithContext(keyclient.WithKey(ctx, sent), http.MethodPost, "https://bank.example/charges", strings.NewReader(order))
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err // it is pending: retry
		}
		defer func() { err = errors.Join(err, response.Body.Close()) }()
		if response.StatusCode != http.StatusCreated {
			return errors.New("not charged: " + response.Status)
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `UPDATE orders SET charged = true WHERE id = $1`, order); err != nil {
				return err
			}
			return pending.Forget(ctx, tx, charge+order, sent)
		})
	}
	restarted := func(ctx context.Context, pool *pgxpool.Pool, client *http.Client, pending *keyclient.Pending) error {
		requests, err := pending.List(ctx, "", 100) // then the next page, after the last one
		for _, r := range requests {
			if order, ok := strings.CutPrefix(r.Request, charge); ok && !r.TooOld { // otherwise a person asks the bank
				err = errors.Join(err, pay(ctx, pool, client, pending, order, r.Key))
			}
		}
		return err
	}
	_ = restarted
}

// A transfer at a bank that ignores keys: made once, by a client that cannot send it again. If the
// bank refuses connections, the key stays free; if its answer is lost, the key is in doubt, and a
// person or FlowConfig.Reconcile decides.
func ExampleSingle() {
	type state struct{ Receipt string }
	bank := &http.Client{Transport: keyclient.Single(http.DefaultTransport)} // FlowConfig.CallMax is its timeout
	transfer := idempotency.Phase[state]{Name: "transferred", AtMostOnce: true, Call: func(ctx context.Context, step *idempotency.Step[state]) error {
		address := "https://bank.example/transfers?reference=" + step.ChildID().String()
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, address, bytes.NewReader(step.Request))
		if err != nil {
			return idempotency.NotDone(err)
		}
		response, err := bank.Do(request)
		if err != nil {
			return err
		}
		if response.StatusCode != http.StatusCreated {
			return errors.Join(errors.New("the bank answers "+response.Status), response.Body.Close())
		}
		step.State.Receipt = response.Header.Get("Location")
		return response.Body.Close()
	}}
	_ = transfer
}
