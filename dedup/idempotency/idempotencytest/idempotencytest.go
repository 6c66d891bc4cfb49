package idempotencytest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Main runs the tests of a package and stops the servers that they started. Call it from TestMain.
func Main(m *testing.M) { pgtest.Main(m) }

// Request sends the verified request, always the same one under the same key, to one replica. An
// error, or a status that asks for a retry, means that the client does not know the outcome yet.
type Request func(ctx context.Context) (idempotency.Response, error)

// Start starts a replica of the verified service, on the run's own database. It is called again
// after a replica was killed: keep nothing in memory that a new process would not have.
type Start func(pool *pgxpool.Pool) (Request, error)

// Options of Verify. The zero value is for work without tables of its own, and so without effects
// in them.
type Options struct {
	// Setup is SQL that creates what the work needs: tables, and rows in them.
	Setup string
	// Prepare does the same in Go, after Setup, at the beginning of each run. Reset stubs of
	// foreign systems here.
	Prepare func(ctx context.Context, pool *pgxpool.Pool) error
	// Effects lists effects outside of the tables, or results of your own query: one text for each
	// effect, the same in every run, in any order. "charge of order 1 over 500", twice in the list,
	// is a charge that was made twice.
	Effects func(ctx context.Context, pool *pgxpool.Pool) ([]string, error)
	// Ignore names columns, as "table.column", that legitimately differ from run to run. Identity
	// columns, and those whose default is an expression (now(), a sequence), are ignored anyway.
	Ignore []string
}

// Once verifies work in one transaction.
func Once(cfg idempotency.Config, key idempotency.Key, work func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) Start {
	return func(pool *pgxpool.Pool) (Request, error) {
		op, err := idempotency.New(pool, cfg)
		return func(ctx context.Context) (idempotency.Response, error) { return op.Once(ctx, key, work) }, err
	}
}

// Flow verifies work in phases. FlowConfig.Reconcile is called if the outcome is indeterminate.
func Flow[S any](build func(pool *pgxpool.Pool) (*idempotency.Flow[S], error), key idempotency.Key, request []byte) Start {
	return func(pool *pgxpool.Pool) (Request, error) {
		flow, err := build(pool)
		return func(ctx context.Context) (idempotency.Response, error) {
			response, err := flow.Do(ctx, key, request)
			if !errors.Is(err, idempotency.ErrIndeterminate) {
				return response, err
			}
			if decided, reconcileErr := flow.Reconcile(ctx); decided == 0 || reconcileErr != nil {
				return response, err
			}
			return flow.Do(ctx, key, request)
		}, err
	}
}

// Handler verifies an HTTP handler that executes requests under their keys. header has the key, in
// the field that the handler reads. Statuses 408, 409, 425, 429 and 500 and above ask the client
// for a retry. Of httpkey's own answers, idempotency-key-undecided is an indeterminate outcome, and
// idempotency-response-not-kept one whose body was not stored.
func Handler(build func(pool *pgxpool.Pool) (http.Handler, error), method, target string, header http.Header, body []byte) Start {
	return func(pool *pgxpool.Pool) (Request, error) {
		handler, err := build(pool)
		return func(ctx context.Context) (idempotency.Response, error) {
			r := httptest.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
			r.Header = header.Clone()
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, r)
			return understand(idempotency.Response{Status: recorder.Code, Header: recorder.Header(), Body: recorder.Body.Bytes()})
		}, err
	}
}

// understand interprets an answer as a client of httpkey does.
func understand(response idempotency.Response) (idempotency.Response, error) {
	var problem struct {
		Type    string
		Outcome int
	}
	_ = json.Unmarshal(response.Body, &problem) // a body that is not a problem has no type
	kind, _ := strings.CutPrefix(problem.Type, "urn:effectonce:problem:")
	switch {
	case kind == string(serving.KeyUndecided):
		return response, fmt.Errorf("the handler answered %d: %w", response.Status, idempotency.ErrIndeterminate)
	case kind == string(serving.ResponseDropped):
		response.Status, response.BodyDropped, response.Body = problem.Outcome, true, nil
		return response, nil
	case response.Status >= http.StatusInternalServerError, response.Status == http.StatusConflict, response.Status == http.StatusTooEarly,
		response.Status == http.StatusTooManyRequests, response.Status == http.StatusRequestTimeout:
		return response, fmt.Errorf("the handler answered %d: %.200s", response.Status, response.Body)
	}
	return response, nil
}
