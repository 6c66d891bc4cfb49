package httpkey

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Outcome decides what happens to a handler's response and to its writes.
type Outcome int

const (
	// Forget stores nothing: the handler's writes are rolled back, and the key is free. A retry may
	// succeed.
	Forget Outcome = iota
	// Refuse stores the response for replay, and rolls back the handler's writes.
	Refuse
	// Commit stores the response together with the handler's writes.
	Commit
)

// DefaultOutcome is the default of Config.Outcome:
//
//	2xx, 3xx                                 Commit
//	401, 403, 408, 409, 423, 425, 429, 5xx   Forget: a retry may succeed
//	other 4xx                                Refuse: a retry would fail in the same way
//
// A 4xx never commits the handler's writes, because half of the work may have been done before an
// http.Error.
func DefaultOutcome(status int) Outcome {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusConflict,
		http.StatusLocked, http.StatusTooEarly, http.StatusTooManyRequests:
		return Forget
	}
	switch {
	case status >= 200 && status < 400:
		return Commit
	case status >= 400 && status < 500:
		return Refuse
	}
	return Forget
}

// forgottenError carries a response through the transaction that it rolls back.
type forgottenError struct{ response idempotency.Response }

func (e *forgottenError) Error() string {
	return fmt.Sprintf("the handler answered with status %d", e.response.Status)
}

// failed makes the response that Strict stores for a failure: what the handler
// answered, if it did. For ErrExpired it is always the expired problem.
func failed(err error) idempotency.Response {
	if errors.Is(err, idempotency.ErrExpired) {
		return expired()
	}
	var forgotten *forgottenError
	if errors.As(err, &forgotten) {
		return forgotten.response
	}
	return idempotency.Response{Status: http.StatusInternalServerError}
}
