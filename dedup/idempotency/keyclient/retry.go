package keyclient

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// send lets base repeat the request by itself only if that has no second effect.
func (c *call) send(ctx context.Context) (response *http.Response, err error) {
	r := c.request.WithContext(ctx)
	switch {
	case idempotency.CalledOnce(ctx):
		response, err = Single(c.t.base).RoundTrip(r)
	case c.trusts, c.key == "":
		response, err = c.t.base.RoundTrip(r)
	default:
		response, err = sendOnce(c.t.base, r)
	}
	c.sent = c.sent || !notSent(err)
	if err == nil {
		response.Request = r // it has the key; base may not set it
	}
	return response, err
}

func notSent(err error) bool {
	var unsent *notSentError
	return errors.As(err, &unsent)
}

// mayRetry implements the table of Transport.
func (c *call) mayRetry(response *http.Response, err error) bool {
	switch {
	case err != nil:
		return c.trusts || notSent(err)
	case response.Header.Get("Idempotent-Replayed") == "true":
		return false
	}
	switch response.StatusCode {
	case http.StatusTooEarly, http.StatusTooManyRequests:
		return true
	case http.StatusConflict:
		return response.Header.Get("Retry-After") != "" // in progress; other conflicts stay
	case http.StatusRequestTimeout, http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return c.trusts
	}
	return false
}

// backoff is the pause after an attempt, counted from 1: "full jitter" of Brooker, Exponential
// Backoff And Jitter (AWS Architecture Blog, 2015). Retry-After gets jitter on top, so that clients
// that were refused at the same time do not come back at the same time. ok: it is at most BackoffMax.
func (c TransportConfig) backoff(attempt int, retryAfter time.Duration) (wait time.Duration, ok bool) {
	switch {
	case retryAfter > c.BackoffMax:
		return retryAfter, false
	case retryAfter > 0:
		return retryAfter + rand.N(c.BackoffMin), true //nolint:gosec // jitter needs no secret
	}
	ceiling := c.BackoffMin
	for range attempt - 1 {
		ceiling = min(2*ceiling, c.BackoffMax)
	}
	return rand.N(ceiling + 1), true //nolint:gosec // as above
}

// retryAfter returns the server's Retry-After in seconds, or 0, also for a date.
func retryAfter(response *http.Response) time.Duration {
	if response == nil {
		return 0
	}
	seconds, _ := strconv.ParseUint(response.Header.Get("Retry-After"), 10, 31) // 68 years at most
	return time.Duration(seconds) * time.Second
}
