package httpkey

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// problemType begins the type of an answer that this package gives instead of the handler: a name of
// package serving follows. The values do not change.
const problemType, problemMedia = "urn:effectonce:problem:", "application/problem+json"

// problemOf returns the body of an answer (RFC 9457). outcome is the status of the response that was
// not stored, only for serving.ResponseDropped.
func problemOf(kind serving.Problem, outcome int) []byte {
	answer := kind.Describe()
	body, err := json.Marshal(struct {
		Type    string `json:"type"`
		Title   string `json:"title"`
		Status  int    `json:"status"`
		Detail  string `json:"detail"`
		Outcome int    `json:"outcome,omitempty"`
	}{problemType + string(kind), answer.Title, answer.Status, answer.Detail, outcome})
	if err != nil {
		panic(err) // strings and numbers
	}
	return body
}

// refuse answers with a problem. A retryAfter of zero sends no header.
func refuse(w http.ResponseWriter, kind serving.Problem, retryAfter time.Duration) {
	if retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(retryAfter.Seconds())))))
	}
	send(w, kind, 0)
}

func send(w http.ResponseWriter, kind serving.Problem, outcome int) {
	header := w.Header()
	header.Set("Content-Type", problemMedia)
	header.Set("Cache-Control", "no-store")
	w.WriteHeader(kind.Describe().Status)
	_, _ = w.Write(problemOf(kind, outcome)) //nolint:gosec // fixed texts and a number; a client that is gone retries
}

// expired is stored for a client that retries after the window.
func expired() idempotency.Response {
	return idempotency.Response{
		Status: serving.KeyExpired.Describe().Status, Header: http.Header{"Content-Type": {problemMedia}}, Body: problemOf(serving.KeyExpired, 0),
	}
}
