// Package httpkey executes HTTP requests once for each Idempotency-Key, and answers retries with
// the stored response.
//
//	once, err := httpkey.New(pool, tenant, httpkey.Config{Operation: idempotency.Config{Operation: "shop-api"}})
//	...
//	go once.Operation().Run(ctx) // forgets old keys
//	http.Handle("POST /orders", authenticate(once.Handler(http.HandlerFunc(createOrder)))) // which uses Tx and Key
//
// The order, its message, the key and the response are one transaction; the client is answered
// after COMMIT. A retry gets the same response, with Idempotent-Replayed: true and Cache-Control:
// no-store.
//
// # What is kept
//
// The status decides: 2xx and 3xx are committed and stored. A 4xx that a retry would get again is
// stored, and the handler's writes are rolled back. 401, 403, 408, 409, 423, 425, 429 and 5xx store
// nothing and free the key: a retry may succeed. To store another status, pass an idempotency.Final to
// Fail. A panic rolls back and is passed on. The status,
// the body, and the headers of ReplayedHeaders and Config.Headers are stored; those that
// idempotency.NeverStored reports, such as Set-Cookie, never are. At a replay a header that an outer
// layer has set stays, unless it describes the body (Content-Type and the like). CORS headers and
// Vary belong into an outer layer. Operation.Seal encrypts headers and bodies.
//
// A client that retries after Operation.Window finds its key forgotten, and its request is executed
// again, unless rows of the first execution prevent it: let a handler insert rows under
// Key(r).ChildID, and pass the error to Fail. If such a row exists already, the request is
// answered, and the answer stored, with 410. A handler that checks itself
// passes idempotency.ErrExpired to Fail; that error has the details. If the rows are deleted, or
// have no such ID, nothing prevents a second execution: make the window longer than clients retry.
//
// POST and PATCH need a key: without one they get 400. PUT and DELETE, which HTTP defines as idempotent,
// pass through without one, without a transaction (TxOf), and are executed once with one. GET, HEAD,
// OPTIONS and TRACE pass through. Where a POST may come without a key, look for the header in front of
// Middleware.Handler.
//
// Calls to other systems do not belong in a transaction: see FlowHandler. Slow work is answered
// with 202 and done by a consumer: see examples/accepted.
//
// # What this package answers itself
//
// The middleware answers with problems of RFC 9457, each with its own type, and fixed texts, which
// contain neither keys nor errors. docs/reference/idempotency-keys.md lists them, and
// docs/how-to/http-keys.md all kinds of bad requests, and of requests whose client or server disconnects.
//
// # Position in the handler chain
//
// Put it behind authentication: a caller whose rights were revoked must get its 401, not a replay,
// and the scope is the caller that authentication accepted. Let the scope be the principal if
// callers of one tenant must not see each other's responses.
//
// Put it in front of everything that reads the body. A request whose whole body was read before is
// refused with 500, if it declared its length or was parsed as a form. For other chunked bodies, and
// for bodies that were read in part, this cannot be detected.
//
// Put it inside of what compresses, logs or measures: the whole response arrives at once. What
// recovers panics belongs outside, too: if a panic is recovered inside, after the response was
// written, half of the work is committed unless a status of 400 or more is written. A handler
// cannot stream: see ErrStreaming.
//
// A router between this middleware and the handler must be able to route a request again, for a
// second run of the handler. Those of net/http, gorilla/mux and echo can; mounted routers of chi
// need one more line, and errors of echo another one. See the examples of Middleware.Handler.
//
// # What another tenant can learn, and store
//
// The scope comes first in the primary key: another tenant's key is a miss like any other, by the
// same statement, so neither response nor duration reveals that it exists. An authenticated caller
// can store one response for each new key, up to Operation.ResponseBytesMax, for Operation.Window:
// limit the rate of each tenant in front, keep the window short, and run the reaper. Requests
// without a scope, a key or a readable body store nothing and send no statement.
//
// # Caveats
//
// Requests are distinguished by method, path, query, media type and body. A
// multipart form that is rebuilt for a retry has another boundary, and is another request: let the
// client send the same bytes, or set Config.Fingerprint. Informational responses (1xx) of a handler are not
// sent. Content that the handler encoded is replayed in the same encoding:
// compress outside.
package httpkey
