// Package httpkey executes HTTP requests once for each Idempotency-Key, and answers retries with the stored response.
//
//	func main() {
//		pool, err := pgxpool.New(context.Background(), os.Getenv("DATABASE_URL"))
//		if err != nil {
//			log.Fatal(err)
//		}
//		once, err := httpkey.New(pool, tenant, httpkey.Config{Operation: idempotency.Config{Operation: "shop-api"}})
//		if err != nil {
//			log.Fatal(err)
//		}
//		http.Handle("POST /orders", authenticate(once.Handler(http.HandlerFunc(createOrder))))
//		go once.Operation().Run(context.Background()) // forgets old keys
//		log.Fatal(http.ListenAndServe(":8080", nil))
//	}
//
//	// tenant is whom authenticate let in. An empty one is refused.
//	func tenant(r *http.Request) (string, error) {
//		account, _ := r.Context().Value(accountKey{}).(string)
//		return account, nil
//	}
//
//	func createOrder(w http.ResponseWriter, r *http.Request) {
//		ctx, tx, id := r.Context(), httpkey.Tx(r), httpkey.Key(r).ChildID("order")
//		if _, err := tx.Exec(ctx, `INSERT INTO orders (id) VALUES ($1)`, id); err != nil {
//			httpkey.Fail(r, err)
//			return
//		}
//		created := outbox.Message{ID: id, Topic: "orders", Key: id[:], Payload: []byte(`{"created":true}`)}
//		if err := outbox.Publish(ctx, tx, created); err != nil {
//			httpkey.Fail(r, err)
//			return
//		}
//		w.Header().Set("Location", "/orders/"+id.String())
//		w.WriteHeader(http.StatusCreated)
//	}
//
// The order, its message, the key and the response are one transaction; the client is answered after COMMIT. A retry gets
// the response again, with Idempotent-Replayed: true and Cache-Control: no-store.
//
// # What is kept
//
// DefaultOutcome says by the status: 2xx and 3xx are committed and stored; a 4xx that another try would meet again is
// stored, and what the handler wrote is rolled back; 401, 403, 408, 409, 423, 425, 429 and 5xx store nothing and free the
// key. A panic rolls back and goes on. Stored are status, body, and the headers of ReplayedHeaders and Config.Headers; cookies and
// credentials never, nor what a layer outside had set already: it sets its own at a replay. There Vary is what either says, and
// what a layer outside says about CORS replaces what is stored. Operation.Seal encrypts headers and bodies.
//
// A client that comes after Operation.Window meets a key that is forgotten, and its request is executed again, unless what the first
// execution wrote refuses that: let a handler insert rows under Key(r).ChildID, and pass the error to Fail. A row that is there
// already is then answered, and its answer stored, with 410 and ProblemKeyExpired. A handler that looks itself passes idempotency.ErrExpired to
// Fail, which has the details. Where the rows are deleted, or have no such ID, nothing refuses a second execution: make the window longer
// than clients try.
//
// POST and PATCH need a key. PUT and DELETE pass through without one, and are executed once with one; GET, HEAD, OPTIONS and TRACE
// pass through: see Config.PassThrough and Config.PassWithoutKey.
//
// What asks other systems does not belong into a transaction: see FlowHandler, and AcceptHandler for what takes long.
//
// # What this package answers itself
//
// Problems of RFC 9457, each with a type of its own: see Problem, and Config.Describe for another form. 409 with Retry-After
// says that the key is being worked on, 409 without that a person has to decide, 422 that the key belongs to another request,
// 429 that too much of this caller waits or is kept already, 503 that the same key may be tried again. 410 says that the
// request was executed, and its response was too large to be kept, or is not kept any more.
//
// What becomes of each kind of bad request, and of one whose client or server goes away, is a table in docs/operations.md.
//
// # Where it belongs
//
// Behind authentication: a caller who lost his rights must get its 401, not a replay, and the scope is whom it let in. Let
// the scope be the principal where callers of one tenant must not see each other's answers. In front of
// everything that reads the body: a request whose body, or a part of it, is gone is refused with 500, if it said
// how long it was or was parsed as a form. Of one in chunks nothing is to be seen. Inside of what compresses, logs or measures: the
// whole response comes at once. What recovers panics belongs outside, too: recovered inside, a panic behind the answer commits half
// of the work, where no status of 400 or more is written then. A handler cannot stream: see ErrStreaming.
//
// A router between this middleware and the handler may route a request again, for the handler's second run: those of net/http,
// gorilla/mux and echo can, mounted ones of chi need a line, and echo's errors another one. See the examples of Middleware.Handler.
//
// # What a stranger can learn, and fill
//
// The scope comes first in the primary key: a key of another tenant is a miss like any other, by the same statement, so
// neither answer nor duration tells that it exists. Whoever is let in can store a response for each new key, up to
// Operation.ResponseBytesMax, for Operation.Window: limit the rate of each tenant in front, keep the window short, and
// run the reaper. Requests without a scope, a key or a readable body store nothing and ask no database.
//
// # Caveats
//
// Requests are told apart by method, path, query (see Config.Query), media type and body. A multipart form that is built anew for a retry has another
// boundary, and is another request: let the client send the same bytes, or give Config.Fingerprint. Trailers and
// informational responses (1xx) of a handler are not sent. Content that the handler encoded is replayed as it was encoded: compress outside.
package httpkey
