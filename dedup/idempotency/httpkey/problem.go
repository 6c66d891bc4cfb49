package httpkey

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Problem is the type of an answer that this package gives instead of the handler, the member
// "type" of application/problem+json (RFC 9457): see Answer. The values do not change.
type Problem string

const urn = "urn:effectonce:problem:"

// The problems.
const (
	ProblemKeyMissing      Problem = "urn:effectonce:problem:idempotency-key-missing"       // 400
	ProblemKeyMalformed    Problem = "urn:effectonce:problem:idempotency-key-malformed"     // 400
	ProblemKeyInProgress   Problem = "urn:effectonce:problem:idempotency-key-in-progress"   // 409, Retry-After
	ProblemKeyUndecided    Problem = "urn:effectonce:problem:idempotency-key-undecided"     // 409: whether it was executed is unknown, a person decides
	ProblemKeyAbandoned    Problem = "urn:effectonce:problem:idempotency-key-abandoned"     // 409: it was given up, a person decides
	ProblemTooManyWaiting  Problem = "urn:effectonce:problem:idempotency-too-many-waiting"  // 429, Retry-After: the maximum waits for this key, or this caller's keys
	ProblemKeyReused       Problem = "urn:effectonce:problem:idempotency-key-reused"        // 422: another request has this key
	ProblemResponseDropped Problem = "urn:effectonce:problem:idempotency-response-not-kept" // 410: it was executed; member "outcome" is its status
	ProblemKeyExpired      Problem = "urn:effectonce:problem:idempotency-key-expired"       // 410: it was executed, longer ago than its response is stored
	ProblemUnanswered      Problem = "urn:effectonce:problem:idempotency-outcome-unknown"   // 503, Retry-After: a retry with the same key resolves it
	ProblemUnauthenticated Problem = "urn:effectonce:problem:unauthenticated"               // 401
	ProblemUnreadable      Problem = "urn:effectonce:problem:request-unreadable"            // 400
	ProblemReadTimeout     Problem = "urn:effectonce:problem:request-timeout"               // 408
	ProblemTooLarge        Problem = "urn:effectonce:problem:request-too-large"             // 413
	ProblemInternal        Problem = "urn:effectonce:problem:internal"                      // 500: not executed
	ProblemUnavailable     Problem = "urn:effectonce:problem:unavailable"                   // 503, Retry-After: not executed, or resumable
)

// Answer is what a client gets from this package instead of the handler's response. Its texts are
// fixed: they contain neither keys nor errors.
type Answer struct {
	Problem Problem `json:"type"`
	Title   string  `json:"title"`
	Status  int     `json:"status"`
	Detail  string  `json:"detail"`
	// Outcome is the status of the response that was not stored. Only with ProblemResponseDropped.
	Outcome int `json:"outcome,omitempty"`
	// RetryAfter is the value of the header Retry-After, rounded up to seconds. Zero: no header.
	RetryAfter time.Duration `json:"-"`
}

func describe(kind Problem) Answer {
	of := serving.Problem(strings.TrimPrefix(string(kind), urn)).Describe()
	return Answer{Problem: kind, Title: of.Title, Status: of.Status, Detail: of.Detail}
}

// refuse answers with a problem. A retryAfter of zero sends no header.
func (m *Middleware) refuse(w http.ResponseWriter, r *http.Request, kind Problem, retryAfter time.Duration) {
	answer := describe(kind)
	answer.RetryAfter = retryAfter
	m.send(w, r, answer)
}

func (m *Middleware) send(w http.ResponseWriter, r *http.Request, answer Answer) {
	contentType, body := m.cfg.Describe(r, answer)
	header := w.Header()
	header.Set("Content-Type", contentType)
	header.Set("Cache-Control", "no-store")
	if answer.RetryAfter > 0 {
		header.Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(answer.RetryAfter.Seconds())))))
	}
	w.WriteHeader(answer.Status)
	_, _ = w.Write(body) // a client that is gone retries
}

// ProblemJSON is the default of Config.Describe: application/problem+json (RFC 9457).
func ProblemJSON(_ *http.Request, answer Answer) (contentType string, body []byte) {
	body, err := json.Marshal(answer)
	if err != nil {
		panic(err) // strings and numbers
	}
	return "application/problem+json", body
}

// expired is stored for a client that retries after the window. write recognizes it by its body,
// and Config.Describe writes the body of each answer anew.
func expired() idempotency.Response {
	contentType, body := ProblemJSON(nil, describe(ProblemKeyExpired))
	return idempotency.Response{Status: http.StatusGone, Header: http.Header{"Content-Type": {contentType}}, Body: body}
}
