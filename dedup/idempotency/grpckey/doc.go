// Package grpckey executes unary gRPC calls once for each idempotency key, and answers retries with
// the stored response. The example of Interceptor.Unary is a complete server and its client. Writes,
// key and response are one transaction. Calls to other systems belong in an idempotency.Flow, under
// Interceptor.Operation.
//
// # What is stored
//
// The response of a call that succeeded is stored together with the handler's writes. For a call
// that failed with InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, OutOfRange or
// Unimplemented, the status is stored with its details, and the handler's writes are rolled back. Any
// other failure stores nothing and frees the key. Headers and trailers are sent, and never stored.
//
// # What the interceptor answers itself
//
// It answers with a status that has an ErrorInfo of the Domain, and a RetryInfo if a retry helps. The
// reason is the name of a problem of httpkey in capitals, such as IDEMPOTENCY_KEY_MISSING; UNAVAILABLE,
// UNAUTHENTICATED and INTERNAL have their codes, and the others these:
//
//	InvalidArgument     KEY_MISSING, KEY_MALFORMED and KEY_REUSED, after IDEMPOTENCY_; REQUEST_UNREADABLE
//	FailedPrecondition  KEY_UNDECIDED, KEY_EXPIRED and RESPONSE_NOT_KEPT, after IDEMPOTENCY_
//	Aborted             IDEMPOTENCY_KEY_IN_PROGRESS
//	ResourceExhausted   IDEMPOTENCY_TOO_MANY_WAITING
//	Unavailable         IDEMPOTENCY_OUTCOME_UNKNOWN
//
// An error of a handler that is not a status does not reach the client: it is UNAVAILABLE if the
// database is unavailable or busy, else INTERNAL.
//
// # Caveats
//
// Two requests are the same if their methods and deterministic encodings are. That encoding is
// stable for the same program; a new release of a message with other fields may make a retry across
// the deployment another request (see Config.Fingerprint). In a stream, Tx panics. A client's
// deadline does not end a call: Config.HandlerTimeout does, and a retry gets the outcome.
package grpckey
