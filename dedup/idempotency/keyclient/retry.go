package keyclient

import (
	"crypto/tls"
	"errors"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// verdict is what an attempt means.
type verdict int

const (
	final verdict = iota // the server's answer, or an error that a retry would get, too
	retry                // the server did not act, or that is unknown: retry
)

// refusedForNow reports whether a status that judge retries means that the server did nothing.
func refusedForNow(status int) bool {
	return status == http.StatusConflict || status == http.StatusTooEarly || status == http.StatusTooManyRequests
}

// judge decides what a response means at a server that honours keys.
func judge(response *http.Response) verdict {
	if replayed(response) {
		return final
	}
	switch response.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return retry
	case http.StatusConflict:
		if response.Header.Get("Retry-After") != "" {
			return retry // in progress; other conflicts stay
		}
	}
	return final
}

// settles reports responses after which a key is no longer needed. After any other one the request
// was not executed for now, or it was, or that is unknown: under a new key it could be executed
// again. 409 and 410 are what httpkey.Middleware returns for a key that a person has to decide, and
// for a response that was not stored. 422 may mean that the key was used for a request whose
// content has changed since. 202 means that the request is still being executed
// (httpkey.AcceptHandler), unless it is the stored response. 307 and 308 mean that the response is
// elsewhere; 407 and 421 come from an intermediary. doubt: an earlier attempt may have been
// executed. Then a refusal may be about this attempt alone (a removed route, a lowered limit),
// unless it is the stored response.
func settles(response *http.Response, doubt bool) bool {
	switch response.StatusCode {
	case http.StatusTemporaryRedirect, http.StatusPermanentRedirect,
		http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired, http.StatusRequestTimeout, http.StatusConflict,
		http.StatusGone, http.StatusMisdirectedRequest, http.StatusUnprocessableEntity, http.StatusLocked, http.StatusTooEarly,
		http.StatusTooManyRequests:
		return false
	case http.StatusAccepted:
		return replayed(response)
	}
	switch status := response.StatusCode; {
	case status >= 400 && status < 500:
		return !doubt || replayed(response)
	default:
		return status >= 200 && status < 400
	}
}

// replayed reports a stored response: it will not change.
func replayed(response *http.Response) bool { return response.Header.Get(replayedHeader) == "true" }

// judgeError separates errors that a retry cannot fix, which are those listed, from all others.
// Errors of an HTTP/2 client or a proxy have no common type, and a retry under the same key does no
// harm.
func judgeError(err error) verdict {
	var certificate *tls.CertificateVerificationError
	var noTLS tls.RecordHeaderError
	switch {
	case errors.As(err, &certificate), errors.As(err, &noTLS), errors.Is(err, http.ErrSchemeMismatch), errors.Is(err, errBody):
		return final
	}
	return retry
}

// backoff is the pause after an attempt, counted from 1: "full jitter" of Brooker, Exponential
// Backoff And Jitter (AWS Architecture Blog, 2015). Retry-After gets jitter on top, so that clients
// that were refused at the same time do not come back at the same time.
func (c TransportConfig) backoff(attempt int, retryAfter time.Duration) time.Duration {
	ceiling := c.BackoffMin
	for range attempt - 1 {
		ceiling = min(2*ceiling, c.BackoffMax)
	}
	if retryAfter > 0 {
		return retryAfter + rand.N(c.BackoffMin) //nolint:gosec // jitter needs no secret
	}
	return rand.N(ceiling + 1) //nolint:gosec // as above
}

// retryAfterMax is longer than any request may take; adding to a date in the year 9999 would
// overflow.
const retryAfterMax = 24 * time.Hour

// retryAfter returns the server's Retry-After, seconds or a date, or 0. A date is compared with the
// server's own clock.
func retryAfter(response *http.Response) time.Duration {
	if response == nil {
		return 0
	}
	value := response.Header.Get("Retry-After")
	if seconds, err := strconv.ParseUint(value, 10, 32); err == nil { // 136 years at most
		return min(time.Duration(seconds)*time.Second, retryAfterMax)
	}
	date, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(response.Header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return min(max(date.Sub(now), 0), retryAfterMax)
}

// safe methods change nothing: they are retried without a key. PUT and DELETE are not among them: a
// repetition would undo another client's write in between.
func safe(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}
