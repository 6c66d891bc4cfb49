package keyclient

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pause"
)

// sendUntilAnswered sends the request until there is a response, or attempts or time are used up.
func (c *call) sendUntilAnswered(ctx context.Context) (*http.Response, error) {
	cfg := c.t.cfg
	for attempt := 1; ; attempt++ {
		response, err := c.attempt(ctx)
		wait := cfg.backoff(attempt, retryAfter(response))
		if !c.mayAskAgain(response, err) || ctx.Err() != nil || attempt == cfg.AttemptsMax || time.Until(c.deadline) <= wait {
			if err != nil {
				return nil, c.unanswered(attempt, err)
			}
			return response, nil
		}
		c.tell(ctx, Retry{Attempt: attempt, Status: status(response), Err: err, Wait: wait})
		c.doubt = c.doubt || err != nil || response.StatusCode >= http.StatusInternalServerError ||
			response.StatusCode == http.StatusConflict // another request is executing
		next := time.Now().Add(wait)
		if response != nil {
			drain(response.Body, wait)
		}
		if !pause.For(ctx, time.Until(next)) {
			return nil, c.unanswered(attempt, context.Cause(ctx))
		}
		body, err := c.body.again()
		if err != nil {
			return nil, c.unanswered(attempt, fmt.Errorf("%w: %w", errBody, err))
		}
		c.request.Body = body
	}
}

// attempt sends the request once, and waits for the header of the response.
func (c *call) attempt(ctx context.Context) (*http.Response, error) {
	limit := min(c.t.cfg.AttemptMax, time.Until(c.deadline))
	ctx, cancel := context.WithCancelCause(ctx)
	end := func() { cancel(nil) }
	late := fmt.Errorf("no response within %v: %w", limit, context.DeadlineExceeded)
	timer := time.AfterFunc(limit, func() { cancel(late) })
	traced, sent := c.trace(ctx)
	response, err := c.send(traced)
	c.doubt = c.doubt || sent.Load() > 1
	if !timer.Stop() {
		cancel(late)                    // the timer's own call may not have run yet
		if context.Cause(ctx) == late { //nolint:errorlint // this error itself, not the caller's
			if err == nil {
				_ = response.Body.Close() // its context is over, so it cannot be read
			}
			var unsent *notSentError
			if errors.As(err, &unsent) {
				err = &notSentError{late}
			} else {
				err = late
			}
		}
	}
	if err != nil {
		end()
		return nil, err
	}
	return c.hand(response, end), nil
}

// send lets base repeat the request by itself only if that has no second effect.
func (c *call) send(ctx context.Context) (response *http.Response, err error) {
	r := c.request.WithContext(ctx)
	switch {
	case idempotency.CalledOnce(ctx):
		response, err = Single(c.t.base).RoundTrip(r)
	case c.trusts():
		response, err = c.t.base.RoundTrip(r)
	default:
		if response, err = sendOnce(c.t.base, r); err == nil {
			c.t.learn(r, c.t.cfg.Header, response)
		}
	}
	var unsent *notSentError
	c.sent = c.sent || !errors.As(err, &unsent)
	return response, err
}

// trusts reports whether base may repeat the request by itself: the request changes nothing, or its
// server deduplicates it; or it has no key, and then an http.Transport sends it once over HTTP/1.
func (c *call) trusts() bool {
	return c.key == "" || safe(c.request.Method) || c.t.honours(c.request.URL)
}

// mayAskAgain implements the table of Transport.
func (c *call) mayAskAgain(response *http.Response, err error) bool {
	var unsent *notSentError
	switch {
	case err != nil:
		return judgeError(err) == retry && (c.trusts() || errors.As(err, &unsent))
	case judge(response) == final:
		return false
	}
	return c.trusts() || refusedForNow(response.StatusCode)
}

// trace counts the connections over which an attempt is sent: an http.Transport repeats a request
// with a key by itself if the server closed a reused connection, and that may have been after it
// acted.
func (c *call) trace(ctx context.Context) (context.Context, *atomic.Int32) {
	connections := &atomic.Int32{}
	if c.name == "" || !c.t.cfg.ForgetAnswered {
		return ctx, connections
	}
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connections.Add(1) }}), connections
}

// tell reports a retry, without the key, and without the address, which may contain secrets, too.
func (c *call) tell(ctx context.Context, r Retry) {
	c.t.cfg.Logger.InfoContext(ctx, "retrying request", "method", c.request.Method, "host", c.request.URL.Host,
		"attempt", r.Attempt, "status", r.Status, "error", r.Err, "wait", r.Wait)
	if c.t.cfg.Retrying != nil {
		c.t.cfg.Retrying(c.request, r)
	}
}

func status(response *http.Response) int {
	if response == nil {
		return 0
	}
	return response.StatusCode
}
