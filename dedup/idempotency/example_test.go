package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/outbox"
)

// An operation in one transaction: the order, its message, the key and the response are committed
// together, or none of them is. The message keeps its ID if the work runs again. A retry with the
// same key gets the stored response; another body under the same key gets ErrMismatch.
func Example() {
	// newOperation runs once per process.
	newOperation := func(ctx context.Context, pool *pgxpool.Pool) (*idempotency.Operation, error) {
		orders, err := idempotency.New(pool, idempotency.Config{Operation: "create-order"})
		if err != nil {
			return nil, err
		}
		go orders.Run(ctx) // forgets old keys
		return orders, nil
	}
	createOrder := func(ctx context.Context, orders *idempotency.Operation, tenant, value string, body []byte) (idempotency.Response, error) {
		key := orders.Key(tenant, value, idempotency.NewFingerprint(body))
		return orders.Once(ctx, key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			id := key.ChildID("order")
			if _, err := tx.Exec(ctx, `INSERT INTO orders (id, body) VALUES ($1, $2)`, id, body); err != nil {
				return idempotency.Response{}, err // rolled back; the key is free for a retry
			}
			created := outbox.Message{ID: id, Topic: "orders", Key: id[:], Payload: body}
			if err := outbox.Publish(ctx, tx, created); err != nil {
				return idempotency.Response{}, err
			}
			return idempotency.Response{Status: 201, Body: []byte(id.String())}, nil
		})
	}
	_, _ = newOperation, createOrder
}

// A flow for work that calls another system. No transaction is open during the call, and the bank,
// which honours idempotency keys, gets the same one at every attempt. A bank that does not is
// called in a phase with AtMostOnce.
func ExampleFlow() {
	type payment struct{ Charge string } // what a phase passes on to later ones; stored as JSON
	charge := func(ctx context.Context, step *idempotency.Step[payment]) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://bank.example/charges", bytes.NewReader(step.Request))
		if err != nil {
			return err
		}
		request.Header.Set("Idempotency-Key", step.ChildID().String())
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err // the next attempt continues with this phase
		}
		defer func() { _ = response.Body.Close() }()
		switch response.StatusCode {
		case http.StatusCreated:
			step.State.Charge = response.Header.Get("Location")
			return nil
		case http.StatusPaymentRequired:
			return idempotency.Final(idempotency.Response{Status: 402}, errors.New("the card was declined"))
		}
		return fmt.Errorf("charge: %s", response.Status)
	}
	confirm := func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
		if _, err := tx.Exec(ctx, `INSERT INTO payments (id, charge) VALUES ($1, $2)`, step.ChildID(), step.State.Charge); err != nil {
			return err
		}
		step.Finish(idempotency.Response{Status: 201, Body: []byte(step.State.Charge)})
		return nil
	}
	// newFlow runs once per process.
	newFlow := func(ctx context.Context, pool *pgxpool.Pool) (*idempotency.Flow[payment], error) {
		payments, err := idempotency.New(pool, idempotency.Config{Operation: "pay"})
		if err != nil {
			return nil, err
		}
		flow, err := idempotency.NewFlow(payments, idempotency.FlowConfig[payment]{StoreRequest: true},
			idempotency.Phase[payment]{Name: "charged", Call: charge},
			idempotency.Phase[payment]{Name: "confirmed", Write: confirm},
		)
		if err != nil {
			return nil, err
		}
		go flow.Run(ctx) // finishes flows whose client gave up, and forgets old keys
		return flow, nil
	}
	pay := func(ctx context.Context, flow *idempotency.Flow[payment], tenant, value string, body []byte) (idempotency.Response, error) {
		return flow.Do(ctx, flow.Operation().Key(tenant, value, idempotency.NewFingerprint(body)), body)
	}
	_, _ = newFlow, pay
}
