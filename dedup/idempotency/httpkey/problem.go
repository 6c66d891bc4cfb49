package httpkey

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Problem is the type of an answer that this package gives instead of the handler, the member
// "type" of application/problem+json (RFC 9457): see Answer. The values do not change.
type Problem string

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
	p := func(status int, title, detail string) Answer {
		return Answer{Problem: kind, Title: title, Status: status, Detail: detail}
	}
	switch kind {
	case ProblemKeyMissing:
		return p(400, "Idempotency-Key is missing", "This request needs the header Idempotency-Key: a value of its own, the same at each try.")
	case ProblemKeyMalformed:
		return p(400, "Idempotency-Key is malformed", "The header must come once, with 1 to 255 visible ASCII characters, as they are or in double quotes.")
	case ProblemKeyInProgress:
		return p(409, "The request is in progress", "A request with this key is being executed. Retry later with the same key.")
	case ProblemKeyUndecided:
		return p(409, "The outcome of the request is unknown", "Whether the request with this key took effect has to be looked into. Do not send it again under another key.")
	case ProblemKeyAbandoned:
		return p(409, "The request was given up", "The request with this key was given up and has to be looked into. Do not send it again under another key.")
	case ProblemTooManyWaiting:
		return p(429, "Too many requests wait", "Too many requests wait for this key, or for keys of this caller. Nothing was done. Retry later with the same key.")
	case ProblemKeyReused:
		return p(422, "Idempotency-Key was used for another request", "A key belongs to one request. Send another request under a key of its own.")
	case ProblemResponseDropped:
		return p(410, "The response was not kept", "The request with this key was executed, and is not executed again. Its response was too large to be kept.")
	case ProblemKeyExpired:
		return p(410, "The request was executed before", "The request was executed with this key, longer ago than its answer is kept. It is not executed again: look for what it did.")
	case ProblemUnanswered:
		return p(503, "The outcome is not known yet", "The request may have been executed. Retry with the same key to find out.")
	case ProblemUnauthenticated:
		return p(401, "Not authenticated", "The request has no principal.")
	case ProblemUnreadable:
		return p(400, "The request cannot be read", "Its body ended early, or is not what this endpoint takes.")
	case ProblemReadTimeout:
		return p(408, "The request took too long", "The body did not arrive in time. Nothing was done.")
	case ProblemTooLarge:
		return p(413, "The request is too large", "The body is larger than this endpoint takes. Nothing was done.")
	case ProblemUnavailable:
		return p(503, "Not available", "The request could not be executed now. Retry with the same key.")
	case ProblemInternal:
	}
	return p(500, "Internal error", "The request was not executed.")
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
	switch answer.Status {
	case http.StatusBadRequest, http.StatusConflict, http.StatusUnprocessableEntity: // section 2.7 of the header's draft
		if m.cfg.DocsURL != "" {
			header.Add("Link", "<"+m.cfg.DocsURL+`>; rel="describedby"; type="text/html"`)
		}
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
