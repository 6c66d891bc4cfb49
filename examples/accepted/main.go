// Accepted: a request whose work takes long is answered with 202 and the URL of its status.
//
//	go run ./examples/accepted
//
// The request's transaction stores a job and publishes its message; a consumer does the work, once.
// The job's row is what the status URL shows. A retry under the same key gets the stored 202.
package main

import (
	"context"
	"net/http"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/outbox"
)

const (
	schema = "effectonce_accepted"
	tables = `CREATE TABLE IF NOT EXISTS effectonce_accepted.jobs (id uuid PRIMARY KEY, tenant text NOT NULL, result text)`
)

// tenant is the authenticated caller.
func tenant(*http.Request) (string, error) { return "shop", nil }

// newAPI serves POST /jobs and GET /jobs/{id}.
func newAPI(pool *pgxpool.Pool, topic string) (http.Handler, error) {
	box, err := outbox.New(outbox.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	once, err := httpkey.New(pool, tenant, httpkey.Config{Operation: idempotency.Config{Schema: schema, Operation: "create-job"}})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /jobs", once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, scope := httpkey.Key(r).ChildID("job"), httpkey.Key(r).Scope
		_, err := httpkey.Tx(r).Exec(r.Context(), `INSERT INTO jobs (id, tenant) VALUES ($1, $2)`, id, scope)
		if err == nil {
			err = box.Publish(r.Context(), httpkey.Tx(r), outbox.Message{ID: id, Topic: topic, Key: []byte(id.String())})
		}
		if err != nil {
			httpkey.Fail(r, err)
			return
		}
		w.Header().Set("Location", "/jobs/"+id.String())
		w.WriteHeader(http.StatusAccepted)
	})))
	mux.HandleFunc("GET /jobs/{id}", func(w http.ResponseWriter, r *http.Request) {
		id, idErr := uuid.Parse(r.PathValue("id"))
		scope, scopeErr := tenant(r)
		var result *string
		err := pool.QueryRow(r.Context(), `SELECT result FROM jobs WHERE id = $1 AND tenant = $2`, id, scope).Scan(&result)
		switch {
		case idErr != nil || scopeErr != nil || err != nil: // a real API tells 404 from 503
			w.WriteHeader(http.StatusNotFound)
		case result == nil:
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusAccepted)
		default:
			_, _ = w.Write([]byte(*result)) // a client that is gone asks again
		}
	})
	return mux, nil
}

// work is the consumer's handler: it runs after the 202, in a transaction with its claim. Calls to
// other systems are made under msg.ChildID, so that they may be repeated.
func work(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
	_, err := tx.Exec(ctx, `UPDATE jobs SET result = 'done' WHERE id = $1`, string(msg.Key))
	return err
}
