package httpkey

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"
)

// Problem is the type of an answer that this package gives instead of the handler, as the member "type" of
// application/problem+json (RFC 9457). They do not change.
type Problem string

// The problems.
const (
	ProblemKeyMissing      Problem = "urn:effectonce:problem:idempotency-key-missing"       // 400
	ProblemKeyMalformed    Problem = "urn:effectonce:problem:idempotency-key-malformed"     // 400
	ProblemKeyInProgress   Problem = "urn:effectonce:problem:idempotency-key-in-progress"   // 409, Retry-After
	ProblemKeyUndecided    Problem = "urn:effectonce:problem:idempotency-key-undecided"     // 409: whether it was done is unknown, a person decides
	ProblemKeyAbandoned    Problem = "urn:effectonce:problem:idempotency-key-abandoned"     // 409: it was given up, a person decides
	ProblemKeyReused       Problem = "urn:effectonce:problem:idempotency-key-reused"        // 422: another request has this key
	ProblemResponseDropped Problem = "urn:effectonce:problem:idempotency-response-not-kept" // 410: it was done; member "outcome" is its status
	ProblemKeyExpired      Problem = "urn:effectonce:problem:idempotency-key-expired"       // 410: it was done, longer ago than its answer is kept
	ProblemUnanswered      Problem = "urn:effectonce:problem:idempotency-outcome-unknown"   // 503, Retry-After: the same key finds out
	ProblemUnauthenticated Problem = "urn:effectonce:problem:unauthenticated"               // 401
	ProblemUnreadable      Problem = "urn:effectonce:problem:request-unreadable"            // 400
	ProblemReadTimeout     Problem = "urn:effectonce:problem:request-timeout"               // 408
	ProblemTooLarge        Problem = "urn:effectonce:problem:request-too-large"             // 413
	ProblemTooDeep         Problem = "urn:effectonce:problem:request-too-deep"              // 400: see Config.JSONDepthMax
	ProblemInternal        Problem = "urn:effectonce:problem:internal"                      // 500: nothing was done
	ProblemUnavailable     Problem = "urn:effectonce:problem:unavailable"                   // 503, Retry-After: not done, or resumable
)

// problem is the body of an answer. Its texts are fixed: neither keys nor errors reach a client.
type problem struct {
	Type    Problem `json:"type"`
	Title   string  `json:"title"`
	Status  int     `json:"status"`
	Detail  string  `json:"detail"`
	Outcome int     `json:"outcome,omitempty"`
}

const problemJSON = "application/problem+json"

func (p problem) json() []byte {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and numbers
	}
	return body
}

func describe(kind Problem) problem {
	p := func(status int, title, detail string) problem {
		return problem{Type: kind, Title: title, Status: status, Detail: detail}
	}
	switch kind {
	case ProblemKeyMissing:
		return p(400, "Idempotency-Key is missing", "This request needs the header Idempotency-Key: a value of its own, the same at each try.")
	case ProblemKeyMalformed:
		return p(400, "Idempotency-Key is malformed", "The header must come once, with 1 to 255 visible ASCII characters, as they are or in double quotes.")
	case ProblemKeyInProgress:
		return p(409, "The request is in progress", "A request with this key is being executed. Ask again later with the same key.")
	case ProblemKeyUndecided:
		return p(409, "The outcome of the request is unknown", "Whether the request with this key took effect has to be looked into. Do not send it again under another key.")
	case ProblemKeyAbandoned:
		return p(409, "The request was given up", "The request with this key was given up and has to be looked into. Do not send it again under another key.")
	case ProblemKeyReused:
		return p(422, "Idempotency-Key was used for another request", "A key belongs to one request. Send another request under a key of its own.")
	case ProblemResponseDropped:
		return p(410, "The response was not kept", "The request with this key was executed, and is not executed again. Its response was too large to be kept.")
	case ProblemKeyExpired:
		return p(410, "The request was executed before", "The request was executed with this key, longer ago than its answer is kept. It is not executed again: look for what it did.")
	case ProblemUnanswered:
		return p(503, "The outcome is not known yet", "The request may have been executed. Ask again with the same key to find out.")
	case ProblemUnauthenticated:
		return p(401, "Not authenticated", "The request has no principal.")
	case ProblemUnreadable:
		return p(400, "The request cannot be read", "Its body ended early, or is not what this endpoint takes.")
	case ProblemReadTimeout:
		return p(408, "The request took too long", "The body did not arrive in time. Nothing was done.")
	case ProblemTooLarge:
		return p(413, "The request is too large", "The body is larger than this endpoint takes. Nothing was done.")
	case ProblemTooDeep:
		return p(400, "The request is nested too deeply", "Arrays and objects of the body lie in each other deeper than this endpoint takes. Nothing was done.")
	case ProblemUnavailable:
		return p(503, "Not available", "The request could not be executed now. Ask again with the same key.")
	case ProblemInternal:
	}
	return p(500, "Internal error", "The request was not executed.")
}

// refuse answers with a problem. retryAfter of zero is not said.
func refuse(w http.ResponseWriter, kind Problem, retryAfter time.Duration) {
	send(w, describe(kind), retryAfter)
}

func send(w http.ResponseWriter, p problem, retryAfter time.Duration) {
	header := w.Header()
	header.Set("Content-Type", problemJSON)
	header.Set("Cache-Control", "no-store")
	if retryAfter > 0 {
		header.Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(retryAfter.Seconds())))))
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(p.json()) // a client that is gone asks again
}
