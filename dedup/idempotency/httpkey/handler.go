package httpkey

import (
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Tx returns the transaction of the request, for the handler's writes and its outbox messages: they
// are committed together with the response, or not at all. It must not be used after the handler
// has returned, nor in two goroutines. Tx panics if the request did not pass through a Middleware,
// or its method passes through: without the transaction, the handler's writes would not be
// protected by the key.
func Tx(r *http.Request) pgx.Tx { return of(r).Tx }

// TxOf is Tx for a handler that also serves requests that pass through, such as a PUT without a
// key: it reports whether there is a transaction. If there is, Key and Fail work, too. What the handler
// writes on another connection is committed independently of the key.
func TxOf(r *http.Request) (pgx.Tx, bool) {
	e := serving.From(r.Context())
	if e == nil {
		return nil, false
	}
	return e.Tx, true
}

// Key returns the key of the request. Key(r).ChildID("invoice") is an ID for an outbox message, or
// a key for another system, that is the same at each attempt. It panics if Tx does.
func Key(r *http.Request) idempotency.Key { return of(r).Key }

// Fail abandons the request with an error, whatever is written to the ResponseWriter: everything is
// rolled back and nothing is stored. A serialization failure or a deadlock runs the handler again;
// an idempotency.Final makes its response the outcome; the client gets 503 if the database is
// unavailable or busy, and 500 for any other error. Return after it. It panics if Tx does.
func Fail(r *http.Request, err error) { of(r).Err = err }

func of(r *http.Request) *serving.Exchange {
	return serving.Of(r.Context(), "httpkey: no transaction: wrap the route in Middleware.Handler, and call TxOf where a request may come without a key")
}
