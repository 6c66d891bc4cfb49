package keyclient

import (
	"context"
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
	final verdict = iota // the answer of the server, or an error that the next attempt would meet, too
	retry                // whether the server acted is unknown, or it did not: ask again
)

// refusedForNow reports whether a status that judge retries says that the server did nothing.
func refusedForNow(status int) bool {
	return status == http.StatusConflict || status == http.StatusTooEarly || status == http.StatusTooManyRequests
}

// judge says what a response means at a server that keeps keys.
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

// settles tells answers after which a key is not needed any more. After the others the request was not executed for now, or
// it was, or that is unknown: under a new key it could be executed again. 409 and 410 are what httpkey.Middleware says of a key that a
// person has to decide, and of an answer that was not kept; 422 may say that the key was used for what now has other
// contents; 202 says that it is still being executed (httpkey.AcceptHandler), unless it is the stored answer; 307 and 308 say that the answer is elsewhere; 407 and 421 come from something on the way. doubt: an earlier attempt
// may have been executed. Then a refusal may be about this attempt alone (a route that is gone, a limit that is lower now),
// unless it is the stored answer.
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

// replayed tells a stored answer: it will not change.
func replayed(response *http.Response) bool { return response.Header.Get(replayedHeader) == "true" }

// judgeError tells errors that another attempt could mend: all but these. What a client of HTTP/2 or a proxy returns has
// no common type, and to ask again under the same key does no harm.
func judgeError(err error) verdict {
	var certificate *tls.CertificateVerificationError
	var noTLS tls.RecordHeaderError
	switch {
	case errors.As(err, &certificate), errors.As(err, &noTLS), errors.Is(err, http.ErrSchemeMismatch), errors.Is(err, errBody):
		return final
	}
	return retry
}

// backoff is the pause after an attempt, counted from 1: "full jitter" of Brooker, Exponential Backoff And Jitter (AWS
// Architecture Blog, 2015), and what the server wants on top of that, so that those whom it turned away at once do not come
// back at once.
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

// retryAfterMax is more than any request has time for; a date in the year 9999 would overflow what is added to it.
const retryAfterMax = 24 * time.Hour

// retryAfter is what the server asks for, 0 if nothing: seconds, or a date. A date is taken by the server's own clock.
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

// sleep waits or returns false when ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// safe methods change nothing: they are tried again without a key. PUT and DELETE are not among them: done twice, with
// somebody else's write in between, they undo that.
func safe(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}
