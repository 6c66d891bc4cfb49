package httpkey

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Outcome is what becomes of a handler's response, and of what it wrote.
type Outcome int

const (
	// Forget stores nothing: what the handler wrote is rolled back, the key is free. Trying again may help.
	Forget Outcome = iota
	// Refuse stores the response, which is replayed; what the handler wrote is rolled back.
	Refuse
	// Commit stores the response together with what the handler wrote.
	Commit
)

// DefaultOutcome is the default of Config.Outcome:
//
//	2xx, 3xx                                 Commit
//	401, 403, 408, 409, 423, 425, 429, 5xx   Forget: another try may go well
//	other 4xx                                Refuse: another try would fail in the same way
//
// A 4xx never commits what the handler wrote, because half of the work may lie behind an http.Error.
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

// failed is what Strict and AttemptsMax store of a failure: what the handler answered, if it did. Of a client that comes after the
// window it is stored in any case.
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
