package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// Paths of the service: an order in one transaction, and one in phases with a foreign call.
const (
	PathOrders  = "/orders"
	PathCharged = "/charged"
)

// serve answers requests, each of which orders once for its key.
func serve(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger) error {
	p, err := newProducer(pool, j, logger)
	if err != nil {
		return err
	}
	scope := func(*http.Request) (string, error) { return scene.Tenant, nil }
	once, err := httpkey.New(pool, scope, httpkey.Config{
		Operation:      idempotency.Config{Operation: scene.OperationOrders, Lock: 2 * time.Second, IdleTimeout: 3 * time.Second, LockTimeout: 2 * time.Second, Logger: logger},
		HandlerTimeout: 10 * time.Second,
	})
	if err != nil {
		return err
	}
	charged := once.For(scene.OperationCharged)
	flow, err := idempotency.NewFlow(charged.Operation(), idempotency.FlowConfig[int64]{StoreRequest: true, CallMax: 2 * time.Second, RetryAfter: time.Second, Every: time.Second},
		idempotency.Phase[int64]{Name: scene.StepCharge, Call: func(ctx context.Context, step *idempotency.Step[int64]) error {
			return callBank(ctx, j.Bank, step.ChildID().String(), scene.Requests+"/"+step.Key.Value)
		}},
		idempotency.Phase[int64]{Name: "order", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[int64]) error {
			id, err := p.order(ctx, tx, step.Key.Value)
			step.Finish(idempotency.Response{Status: http.StatusCreated, Body: fmt.Append(nil, id)})
			return err
		}},
	)
	if err != nil {
		return err
	}
	charge, err := httpkey.FlowHandler(charged, flow, nil)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST "+PathCharged, charge)
	mux.Handle("POST "+PathOrders, once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, err := p.order(r.Context(), httpkey.Tx(r), httpkey.Key(r).Value)
		if err != nil {
			httpkey.Fail(r, err)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(strconv.AppendInt(nil, id, 10)) //nolint:gosec // a number
	})))
	server := &http.Server{Addr: j.Listen, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go once.Operation().Run(ctx)
	go flow.Run(ctx)
	go func() {
		<-ctx.Done()
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		_ = server.Shutdown(limited)
	}()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// order writes an order of a request. The client's ledger, not the producer's, knows whether it was
// confirmed.
func (p *producer) order(ctx context.Context, tx pgx.Tx, request string) (int64, error) {
	id := p.next.Add(1)
	random := rand.New(rand.NewPCG(p.Seed, uint64(id))) //nolint:gosec // a seed
	orders, err := p.draw(ctx, tx, random, id, 1)
	if err != nil {
		return 0, err
	}
	if _, err := p.insert(ctx, tx, orders, request); err != nil {
		return 0, err
	}
	return id, p.publish(ctx, tx, random, orders)
}
