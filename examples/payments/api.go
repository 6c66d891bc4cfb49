package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
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
	flow *idempotency.Flow[payment]
}

func newAPI(pool *pgxpool.Pool, provider *providerClient, topic string) (*api, error) {
	op, err := idempotency.New(pool, idempotency.Config{
		Schema:    schema,
		Operation: "create-order",
		Lock:      time.Second, // how long an API that was killed keeps its clients waiting
	})
	if err != nil {
		return nil, err
	}
	box, err := outbox.New(outbox.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	flow, err := idempotency.NewFlow(op, idempotency.FlowConfig[payment]{
		StoreRequest: true, // so that flow.Run finishes what clients give up
	}, phases(provider, box, topic)...)
	return &api{flow}, err
}

// phases of an order. Each is committed on its own; no transaction is open while the provider is asked.
func phases(provider *providerClient, box *outbox.Outbox, topic string) []idempotency.Phase[payment] {
	return []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			r, err := parse(step.Request)
			if err != nil {
				return idempotency.Final(idempotency.Response{Status: http.StatusBadRequest}, err)
			}
			_, err = tx.Exec(ctx, `INSERT INTO orders (id, customer, cents, state) VALUES ($1, $2, $3, 'reserved')`,
				orderID(step.Key), r.Customer, r.Cents)
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
			step.Finish(idempotency.Response{Status: http.StatusCreated, Body: fmt.Appendf(nil, "order %s is paid by charge %s\n", id, step.State.Charge)})
			err := box.Publish(ctx, tx, outbox.Message{
				ID: step.Key.ChildID("receipt"), Topic: topic, Key: []byte(id.String()), Payload: step.Request,
			})
			dieAt(atBook)
			return err
		}},
	}
}

// orderID is the same at every attempt.
func orderID(key idempotency.Key) uuid.UUID { return key.ChildID("order") }

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

const bodyMax = 64 << 10

// ServeHTTP handles POST /orders.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	dieAt(atRequest)
	value, err := httpkey.ParseKey(r.Header)
	if err != nil {
		refuse(w, err)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyMax))
	if err != nil {
		http.Error(w, "the body could not be read", http.StatusBadRequest)
		return
	}
	key := idempotency.Key{
		Scope:       "shop", // the tenant: who the caller was authenticated as, never a header
		Value:       value,
		Fingerprint: idempotency.NewFingerprint([]byte(r.Method), []byte(r.URL.Path), body),
	}
	response, err := a.flow.Do(r.Context(), key, body)
	if err != nil {
		refuse(w, err)
		return
	}
	dieAt(atAnswer)
	w.Header().Set("Cache-Control", "no-store")
	if response.Replayed {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	w.WriteHeader(cmp.Or(response.Status, http.StatusOK)) // 0: a person stored it (outbox-relay keys finish)
	_, _ = w.Write(response.Body)
}

// refuse tells the client whether the same request is worth another try.
func refuse(w http.ResponseWriter, err error) {
	var busy *idempotency.InProgressError
	switch {
	case errors.As(err, &busy):
		w.Header().Set("Retry-After", strconv.Itoa(int(busy.RetryAfter.Seconds())))
		http.Error(w, "the order is being worked on", http.StatusConflict)
	case errors.Is(err, httpkey.ErrNoKey), errors.Is(err, httpkey.ErrMalformedKey):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case errors.Is(err, idempotency.ErrMismatch):
		http.Error(w, "the Idempotency-Key was used for another order", http.StatusUnprocessableEntity)
	case errors.Is(err, idempotency.ErrAbandoned), errors.Is(err, idempotency.ErrIndeterminate):
		http.Error(w, "the order has to be looked into", http.StatusConflict) // without Retry-After: to ask again does not help
	default:
		http.Error(w, "try again with the same key", http.StatusServiceUnavailable)
	}
}
