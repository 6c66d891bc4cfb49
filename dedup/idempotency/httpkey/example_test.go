package httpkey_test

import (
	"context"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/outbox"
)

type accountKey struct{}

// tenant returns the authenticated account. An empty one is refused.
func tenant(r *http.Request) (string, error) {
	account, _ := r.Context().Value(accountKey{}).(string)
	return account, nil
}

// createOrder writes the order and its message in the request's transaction.
func createOrder(w http.ResponseWriter, r *http.Request) {
	ctx, tx, id := r.Context(), httpkey.Tx(r), httpkey.Key(r).ChildID("order")
	if _, err := tx.Exec(ctx, `INSERT INTO orders (id) VALUES ($1)`, id); err != nil {
		httpkey.Fail(r, err)
		return
	}
	created := outbox.Message{ID: id, Topic: "orders", Key: id[:], Payload: []byte(`{"created":true}`)}
	if err := outbox.Publish(ctx, tx, created); err != nil {
		httpkey.Fail(r, err)
		return
	}
	w.Header().Set("Location", "/orders/"+id.String())
	w.WriteHeader(http.StatusCreated)
}

// ship is a handler without a router: order comes from the path.
func ship(w http.ResponseWriter, r *http.Request, order string) {
	id := httpkey.Key(r).ChildID("shipment")
	if _, err := httpkey.Tx(r).Exec(r.Context(), `INSERT INTO shipments (id, order_name) VALUES ($1, $2)`, id, order); err != nil {
		httpkey.Fail(r, err)
		return
	}
	w.Header().Set("Location", "/shipments/"+id.String())
	w.WriteHeader(http.StatusCreated)
}

// Handler is a func(http.Handler) http.Handler, so any router accepts it, behind authentication.
// The other examples show chi, gorilla/mux and echo.
func ExampleMiddleware_Handler() {
	routes := func(pool *pgxpool.Pool, authenticate func(http.Handler) http.Handler) (http.Handler, error) {
		once, err := httpkey.New(pool, tenant, httpkey.Config{
			Operation: idempotency.Config{Operation: "shop-api", WaitMax: 2 * time.Second},
		})
		if err != nil {
			return nil, err
		}
		mux := http.NewServeMux()
		mux.Handle("POST /orders", authenticate(once.Handler(http.HandlerFunc(createOrder))))
		return mux, nil
	}
	_ = routes
}

// An endpoint that charges a card: the bank gets the same key at each attempt, and no transaction
// is open during the call.
func ExampleFlowHandler() {
	type state struct{ Receipt string }
	routes := func(once *httpkey.Middleware, charge func(ctx context.Context, key string, order []byte) (string, error)) (http.Handler, error) {
		flow, err := idempotency.NewFlow(once.Operation(), idempotency.FlowConfig[state]{StoreRequest: true},
			idempotency.Phase[state]{Name: "charged", Call: func(ctx context.Context, step *idempotency.Step[state]) (err error) {
				step.State.Receipt, err = charge(ctx, step.ChildID().String(), step.Request)
				step.Finish(idempotency.Response{Status: http.StatusCreated, Body: []byte(step.State.Receipt)})
				return err
			}})
		if err != nil {
			return nil, err
		}
		return httpkey.FlowHandler(once, flow, nil)
	}
	_ = routes
}
