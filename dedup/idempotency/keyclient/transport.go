package keyclient

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/pause"
)

// Transport is an http.RoundTripper that retries a request under the same idempotency key until
// there is a response. It is safe for concurrent use, and keeps no goroutine.
//
// A request gets its key from its header, else from its context (WithKey), else a new one if its
// method is POST or PATCH. One without a key is passed to base unchanged. One with a key is retried
// as follows, if it has no body or a GetBody. Below the Transport only requests to servers in Honours
// are repeated: see Single.
//
//	                               Honours                              other servers
//	no connection                  yes                                  yes
//	no response, also a late one   yes                                  no
//	408, 500, 502, 503, 504        yes                                  no
//	425, 429, 409 with Retry-After yes: nothing was done                yes
//	Idempotent-Replayed: true      no, whatever the status: it is stored, and will not change
//	everything else                no                                   no
//
// In the Call of an AtMostOnce phase (idempotency.CalledOnce) every request is sent once, as by
// Single. When the attempts or the time of the request's context are used up, the last response is
// returned as it is, or an UnansweredError if there was none. If the body of a response breaks off,
// send the request again under the key, which response.Request has in its header.
//
// base bounds each attempt, and the context all of them: set http.Transport.ResponseHeaderTimeout, or
// a server that hangs is waited for as long as the context lives. Timeout of the http.Client must be
// 0: its error replaces the UnansweredError, and the key is lost, so that a retry by the caller uses
// a new one, and has a second effect. If you need it, make the key first (WithKey).
type Transport struct {
	base http.RoundTripper
	cfg  TransportConfig
}

// NewTransport returns a transport that sends through base, which the caller owns, or all problems
// of its configuration at once. A base of nil is http.DefaultTransport with a ResponseHeaderTimeout
// of 20 s.
func NewTransport(base http.RoundTripper, cfg TransportConfig) (*Transport, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if base == nil {
		base = http.DefaultTransport
		if standard, ok := base.(*http.Transport); ok {
			own := standard.Clone()
			own.ResponseHeaderTimeout = 20 * time.Second
			base = own
		}
	}
	return &Transport{base: base, cfg: cfg}, nil
}

// UnansweredError is a request that the server may or may not have executed. If Honoured, it is
// safe to retry it under Key (see WithKey), and only under Key.
type UnansweredError struct {
	Key      string
	Honoured bool // the server is one of TransportConfig.Honours; another one may act again even under Key
	Attempts int
	Err      error // of the last attempt
}

func (e *UnansweredError) Error() string {
	state := "the server may have acted: retry under the same idempotency key"
	switch {
	case notSent(e.Err):
		state = "nothing was sent"
	case !e.Honoured:
		state = "the server may have acted, and is not among TransportConfig.Honours: find out before retrying"
	}
	return fmt.Sprintf("no answer in %d attempts, %s: %v", e.Attempts, state, e.Err)
}

func (e *UnansweredError) Unwrap() error { return e.Err }

// ErrKey marks a request that was not sent, because of its key.
var ErrKey = errors.New("request without a usable idempotency key")

type contextKey struct{}

// WithKey makes a Transport send this key with the request of the context, whatever its method,
// also for a retry later or in another process. A context is for one request, which may be sent
// several times: another request under it has the same key, and is a mismatch at the server. A step
// of work under another key uses key.ChildID(step).String(), the same at each attempt of the work.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, contextKey{}, key)
}

// call is one request with all its attempts.
type call struct {
	t       *Transport
	request *http.Request // the caller's, with a copy of its header
	key     string        // empty: none
	trusts  bool          // the server honours keys
	sent    bool          // an attempt may have been sent
}

// RoundTrip implements http.RoundTripper. A request redirected by 307 or 308 keeps its key.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	c := &call{t: t, request: r.Clone(r.Context())}
	if c.request.Header == nil {
		c.request.Header = http.Header{}
	}
	if err := c.chooseKey(r); err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // nothing was sent; err is the error that matters
		}
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	c.trusts = t.cfg.honours(r.URL)
	whole := r.GetBody != nil || r.Body == nil || r.Body == http.NoBody
	if c.key == "" || !whole || idempotency.CalledOnce(r.Context()) {
		response, err := c.send(r.Context())
		return response, c.unanswered(1, err)
	}
	return c.sendUntilAnswered(r.Context())
}

// chooseKey leaves the key empty if none is needed.
func (c *call) chooseKey(r *http.Request) error {
	header := c.t.cfg.Header
	fromContext, chosen := r.Context().Value(contextKey{}).(string)
	switch values := r.Header[header]; {
	case len(values) > 1:
		return fmt.Errorf("%d headers %s: want one", len(values), header)
	case len(values) == 1:
		c.key = values[0]
	case serving.Safe(r.Method):
		return nil
	case r.Response != nil && r.Response.Request != nil && r.Response.Request.Header.Get(header) != "":
		c.key = r.Response.Request.Header.Get(header) // of the request that was redirected
	case chosen:
		c.key = fromContext
	case r.Method == http.MethodPost, r.Method == http.MethodPatch:
		c.key = idempotency.NewKey()
	default:
		return nil
	}
	if !serving.ValidKey(c.key) {
		return fmt.Errorf("a key of %d bytes: want 1 to 255 of visible ASCII", len(c.key))
	}
	c.request.Header.Set(header, c.key)
	return nil
}

// sendUntilAnswered sends the request until there is a response, or attempts or time are used up.
func (c *call) sendUntilAnswered(ctx context.Context) (*http.Response, error) {
	cfg := c.t.cfg
	for attempt := 1; ; attempt++ {
		response, err := c.send(ctx)
		wait, ok := cfg.backoff(attempt, retryAfter(response))
		if end, bounded := ctx.Deadline(); bounded && time.Until(end) <= wait {
			ok = false
		}
		if !ok || !c.mayRetry(response, err) || ctx.Err() != nil || attempt == cfg.AttemptsMax {
			return response, c.unanswered(attempt, err)
		}
		status := 0
		if response != nil {
			status = response.StatusCode
			_ = response.Body.Close()
		}
		// Without the key and the address, which may contain secrets.
		cfg.Logger.InfoContext(ctx, "retrying request", "method", c.request.Method, "host", c.request.URL.Host, "attempt", attempt, "status", status, "error", err, "wait", wait)
		if !pause.For(ctx, wait) {
			return nil, c.unanswered(attempt, context.Cause(ctx))
		}
		if c.request.GetBody != nil {
			if c.request.Body, err = c.request.GetBody(); err != nil {
				return nil, c.unanswered(attempt, fmt.Errorf("read the body of the request: %w", err))
			}
		}
	}
}

// unanswered returns nil for a nil error.
func (c *call) unanswered(attempts int, err error) error {
	var last *notSentError
	if errors.As(err, &last) && c.sent {
		err = last.error // the last attempt was not sent, an earlier one was
	}
	if err == nil || c.key == "" {
		return err
	}
	return &UnansweredError{Key: c.key, Honoured: c.trusts, Attempts: attempts, Err: err}
}
