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

// request is what a client asks for, and what a receipt tells.
type request struct {
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// payment is what the phases hand on.
type payment struct {
	Charge   string `json:"charge,omitempty"` // the provider's name of it
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
	// The tenant is who the caller was authenticated as, never a header.
	tenant := func(*http.Request) (string, error) { return "shop", nil }
	once, err := httpkey.New(pool, tenant, httpkey.Config{Operation: idempotency.Config{
		Schema:    schema,
		Operation: "create-order",
		Lock:      time.Second, // how long an API that was killed keeps its clients waiting
	}})
	if err != nil {
		return nil, err
	}
	flow, err := idempotency.NewFlow(once.Operation(), idempotency.FlowConfig[payment]{
		StoreRequest: true,                   // so that flow.Run finishes what clients give up
		CallMax:      time.Second,            // after that the bank's records have what it was asked for
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

// answering dies before the client is told.
type answering struct{ http.ResponseWriter }

func (a answering) WriteHeader(status int) {
	if status == http.StatusCreated {
		dieAt(atAnswer)
	}
	a.ResponseWriter.WriteHeader(status)
}

func (a answering) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// phases of an order. Each is committed on its own; no transaction is open while the provider is asked.
func phases(provider *providerClient, bank *bankClient, box *outbox.Outbox, topic string) []idempotency.Phase[payment] {
	return []idempotency.Phase[payment]{
		{Name: reserve, Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			r, err := parse(step.Request)
			if err != nil {
				return idempotency.Final(idempotency.Response{Status: http.StatusBadRequest}, err)
			}
			_, err = tx.Exec(ctx, `INSERT INTO orders (id, customer, cents, state) VALUES ($1, $2, $3, 'reserved')`,
				step.ChildID(), r.Customer, r.Cents) // refused for a client after the window, who gets 410
			dieAt(atReserve)
			return err
		}},
		{Name: "charge", Call: func(ctx context.Context, step *idempotency.Step[payment]) error {
			r, err := parse(step.Request)
			if err != nil {
				return err
			}
			dieAt(atCharge)
			// Asked again after a crash, and then under the same key: the provider answers what it did.
			charge, err := provider.charge(ctx, step.ChildID(), r)
			dieAt(atCharged)
			if errors.Is(err, errDeclined) {
				step.State.Declined = true // an answer like another: the next phase books it
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
		// The bank knows no keys, and pays at each request: it is asked once. Where its answer is lost, its records are asked.
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

// reserve is the phase that makes the order.
const reserve = "reserve"

// orderID is the same at every attempt: Step.ChildID of the phase that makes the order.
func orderID(key idempotency.Key) uuid.UUID { return key.ChildID(reserve) }

// sendReceipt is the consumer's handler: it has its effect once for each message ID. A mail server would be asked
// outside of the transaction, under msg.ChildID("mail"); here a table stands for it.
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
