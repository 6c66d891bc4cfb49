package serving

import (
	"errors"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Problem is why a server answers instead of its handler: httpkey sends it in a URN, grpckey in
// capitals.
type Problem string

// The problems. docs/reference/idempotency-keys.md lists them.
const (
	KeyMissing      Problem = "idempotency-key-missing"
	KeyMalformed    Problem = "idempotency-key-malformed"
	KeyInProgress   Problem = "idempotency-key-in-progress"
	KeyUndecided    Problem = "idempotency-key-undecided"
	TooManyWaiting  Problem = "idempotency-too-many-waiting"
	KeyReused       Problem = "idempotency-key-reused"
	ResponseDropped Problem = "idempotency-response-not-kept"
	KeyExpired      Problem = "idempotency-key-expired"
	Unanswered      Problem = "idempotency-outcome-unknown"
	Unauthenticated Problem = "unauthenticated"
	Unreadable      Problem = "request-unreadable"
	ReadTimeout     Problem = "request-timeout"
	TooLarge        Problem = "request-too-large"
	Internal        Problem = "internal"
	Unavailable     Problem = "unavailable"
)

// Answer is the status of HTTP for a problem, and fixed texts: neither keys nor errors reach a
// client.
type Answer struct {
	Status        int
	Title, Detail string
}

// Describe returns the answer for a problem.
func (p Problem) Describe() Answer { return answers[p] }

//nolint:gochecknoglobals // a table
var answers = map[Problem]Answer{
	KeyMissing:      {400, "Idempotency-Key is missing", "This request needs the header Idempotency-Key: a value of its own, the same at each try."},
	KeyMalformed:    {400, "Idempotency-Key is malformed", "The header must come once, with 1 to 255 visible ASCII characters, as they are or in double quotes."},
	KeyInProgress:   {409, "The request is in progress", "A request with this key is being executed. Retry later with the same key."},
	KeyUndecided:    {409, "The outcome of the request is unknown", "Whether the request with this key took effect, or will, has to be looked into. Do not send it again under another key."},
	TooManyWaiting:  {429, "Too many requests wait", "Too many requests wait for this key. Nothing was done. Retry later with the same key."},
	KeyReused:       {422, "Idempotency-Key was used for another request", "A key belongs to one request. Send another request under a key of its own."},
	ResponseDropped: {410, "The response was not kept", "The request with this key was executed, and is not executed again. Its response was too large to be kept."},
	KeyExpired:      {410, "The request was executed before", "The request was executed with this key, longer ago than its answer is kept. It is not executed again: look for what it did."},
	Unanswered:      {503, "The outcome is not known yet", "The request may have been executed. Retry with the same key to find out."},
	Unauthenticated: {401, "Not authenticated", "The request has no principal."},
	Unreadable:      {400, "The request cannot be read", "Its body ended early, or is not what this endpoint takes."},
	ReadTimeout:     {408, "The request took too long", "The body did not arrive in time. Nothing was done."},
	TooLarge:        {413, "The request is too large", "The body is larger than this endpoint takes. Nothing was done."},
	Unavailable:     {503, "Not available", "The request could not be executed now. Retry with the same key."},
	Internal:        {500, "Internal error", "The request was not executed."},
}

// RetryAfter is how long a client waits before it retries, if no better value is known.
const RetryAfter = time.Second

// ProblemOf returns the problem for an error of the engine, of a handler, or of ReadBody, and how long a client
// waits before it retries; 0: a retry does not help.
func ProblemOf(err error) (Problem, time.Duration) {
	var busy *idempotency.InProgressError
	switch {
	case errors.As(err, &busy) && busy.Crowded:
		return TooManyWaiting, busy.RetryAfter
	case errors.As(err, &busy):
		return KeyInProgress, busy.RetryAfter
	case errors.Is(err, idempotency.ErrInProgress), errors.Is(err, idempotency.ErrLockLost):
		return KeyInProgress, RetryAfter
	case errors.Is(err, idempotency.ErrMismatch):
		return KeyReused, 0
	case errors.Is(err, idempotency.ErrIndeterminate), errors.Is(err, idempotency.ErrAbandoned):
		return KeyUndecided, 0
	case errors.Is(err, idempotency.ErrUnanswered), errors.Is(err, idempotency.ErrUnreadable): // another replica may be able to read it
		return Unanswered, RetryAfter
	case errors.Is(err, ErrTooLarge):
		return TooLarge, 0
	case errors.Is(err, ErrSlow):
		return ReadTimeout, 0
	case errors.Is(err, ErrUnreadable):
		return Unreadable, 0
	case Passing(err):
		return Unavailable, RetryAfter
	}
	return Internal, 0
}
