package httpkey

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// outcome says what becomes of a handler's response and of its writes, by the status: see the package's text. A
// 4xx never commits them, because half of the work may have been done before an http.Error.
func outcome(status int) (stored, committed bool) {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusConflict,
		http.StatusLocked, http.StatusTooEarly, http.StatusTooManyRequests:
		return false, false
	}
	return status < 500, status < 400
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
