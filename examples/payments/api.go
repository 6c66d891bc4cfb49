package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/outbox"
)

// request is the body of an order, and of its receipt.
type request struct {
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// payment is the state that the phases pass on.
type payment struct {
	Charge   string `json:"charge,omitempty"` // the provider's ID of the charge
	Declined bool   `json:"declined,omitempty"`
}

// api takes orders.
type api struct {
	flow    *idempotency.Flow[payment]
	handler http.Handler
}

func newAPI(pool *pgxpool.Pool, provider *providerClient, bank *bankClient, topic string) (*api, error) {
	box, err := outbox.New(outbox.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	// The tenant is the authenticated caller, never a header.
	tenant := func(*http.Request) (string, error) { return "shop", nil }
	once, err := httpkey.New(pool, tenant, httpkey.Config{Operation: idempotency.Config{
		Schema:    schema,
		Operation: "create-order",
		Lock:      time.Second, // how long clients wait for an API process that was killed
	}})
	if err != nil {
		return nil, err
	}
	flow, err := idempotency.NewFlow(once.Operation(), idempotency.FlowConfig[payment]{
		StoreRequest: true,                   // so that flow.Run finishes requests that clients gave up
		CallMax:      time.Second,            // after that time the bank's records contain the requested transfer
		Every:        200 * time.Millisecond, // so that this program ends soon
		Reconcile:    bank.reconcile,
	}, phases(provider, bank, box, topic)...)
	if err != nil {
		return nil, err
	}
	handler, err := httpkey.FlowHandler(once, flow, nil)
	if err != nil {
		return nil, err
	}
	return &api{flow, handler}, nil
}

// ServeHTTP handles POST /orders.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	dieAt(atRequest)
	a.handler.ServeHTTP(answering{w}, r)
}

// answering kills the process before the response is sent.
type answering struct{ http.ResponseWriter }

func (a answering) WriteHeader(status int) {
	if status == http.StatusCreated {
		dieAt(atAnswer)
	}
	a.ResponseWriter.WriteHeader(status)
}

func (a answering) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// phases of an order. Each is committed separately; no transaction is open during a call to the
// provider.
func phases(provider *providerClient, bank *bankClient, box *outbox.Outbox, topic string) []idempotency.Phase[payment] {
	return []idempotency.Phase[payment]{
		{Name: reserve, Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			r, err := parse(step.Request)
			if err != nil {
				return idempotency.Final(idempotency.Response{Status: http.StatusBadRequest}, err)
			}
			tag, err := tx.Exec(ctx, `INSERT INTO orders (id, customer, cents, state) VALUES ($1, $2, $3, 'reserved') ON CONFLICT DO NOTHING`,
				step.ChildID(), r.Customer, r.Cents)
			if err == nil && tag.RowsAffected() == 0 {
				return idempotency.ErrExpired // a client that retries after the window gets 410
			}
			dieAt(atReserve)
			return err
		}},
		{Name: "charge", Call: func(ctx context.Context, step *idempotency.Step[payment]) error {
			r, err := parse(step.Request)
			if err != nil {
				return err
			}
			dieAt(atCharge)
			// After a crash the charge is requested again under the same key: the provider returns
			// its first result.
			charge, err := provider.charge(ctx, step.ChildID(), r)
			dieAt(atCharged)
			if errors.Is(err, errDeclined) {
				step.State.Declined = true // a valid result: the next phase books it
				return nil
			}
			step.State.Charge = charge
			return err
		}},
		{Name: "book", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			id := orderID(step.Key)
			if step.State.Declined {
				step.Finish(idempotency.Response{Status: http.StatusPaymentRequired, Body: fmt.Appendf(nil, "order %s is declined\n", id)})
				_, err := tx.Exec(ctx, `UPDATE orders SET state = 'declined' WHERE id = $1`, id)
				return err
			}
			if _, err := tx.Exec(ctx, `UPDATE orders SET state = 'paid', charge = $2 WHERE id = $1`, id, step.State.Charge); err != nil {
				return err
			}
			err := box.Publish(ctx, tx, outbox.Message{
				ID: step.Key.ChildID("receipt"), Topic: topic, Key: []byte(id.String()), Payload: step.Request,
			})
			dieAt(atBook)
			return err
		}},
		// The bank has no keys, and pays on each request, so it is called once. If its response is
		// lost, its records are read.
		{Name: "transfer", AtMostOnce: true, Call: func(ctx context.Context, step *idempotency.Step[payment]) error {
			r, err := parse(step.Request)
			if err != nil {
				return err
			}
			dieAt(atTransfer)
			err = bank.transfer(ctx, step.ChildID(), r)
			dieAt(atTransferred)
			step.Finish(paid(step.Key, step.State))
			return err
		}},
	}
}

func paid(key idempotency.Key, state payment) idempotency.Response {
	return idempotency.Response{Status: http.StatusCreated, Body: fmt.Appendf(nil, "order %s is paid by charge %s\n", orderID(key), state.Charge)}
}

// reserve is the phase that creates the order.
const reserve = "reserve"

// orderID is the same in every attempt: Step.ChildID of the phase that creates the order.
func orderID(key idempotency.Key) uuid.UUID { return key.ChildID(reserve) }

// sendReceipt is the consumer's handler: it has its effect once for each message ID. A mail server
// would be called outside the transaction, under msg.ChildID("mail"); here a table replaces it.
func sendReceipt(ctx context.Context, tx pgx.Tx, _ *consumer.Message, r request) error {
	_, err := tx.Exec(ctx, `INSERT INTO receipts (customer, cents) VALUES ($1, $2)`, r.Customer, r.Cents)
	return err
}

func parse(body []byte) (r request, err error) {
	if err = json.Unmarshal(body, &r); err == nil && (r.Customer == "" || r.Cents <= 0) {
		err = errors.New("an order needs a customer and cents")
	}
	return r, err
}
