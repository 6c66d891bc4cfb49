package keyclient

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Transport is an http.RoundTripper that retries a request under the same idempotency key until
// there is a response. It is safe for concurrent use, and keeps no goroutine.
//
// A request gets its key from its header, else from its context (WithKey, WithChild), else a new
// one if its method is one of TransportConfig.Methods, or if it has a name (WithRequestName). A
// request is retried in these cases, if it has a key or its method is GET, HEAD, OPTIONS or TRACE,
// and its body can be sent again:
//
//	                                   server that honours keys, or GET …   other servers
//	no connection                      yes, but for refused certificates and other mistakes of set-up
//	no response, also a late one       yes                                  no
//	408, 500, 502, 503, 504            yes                                  no
//	425, 429, 409 with Retry-After     yes: nothing was done                yes
//	Idempotent-Replayed: true          no, whatever the status: it is stored, and will not change
//	everything else, 409 and 422 too   no                                   no
//
// A server honours keys if TransportConfig.Honours names it, or one of its responses has shown
// that. For other servers no layer below the Transport repeats such a request, either: see Single,
// which describes the effect on a request without a body.
//
// 500 is retried since a service that honours keys either stored nothing, and executes the retry,
// or stored the failure, and replays it. In the Call of an AtMostOnce phase
// (idempotency.CalledOnce) every request is sent once, as by Single, whatever the server. The
// Transport waits for Retry-After (seconds, or a date by the server's clock), unless it is longer
// than the rest of TotalMax. When attempts or time are used up, the last response is returned as it
// is, or an UnansweredError if there was none.
//
// A response whose body breaks off is not requested again automatically: send the request again
// under SentKey.
//
// Timeout of the http.Client must be 0: its error replaces the UnansweredError, and the key is
// lost, so that a retry by the caller uses a new one, and has a second effect. TotalMax, or the
// request's context, bounds the request, too. If you need a Timeout, make the key first,
// WithKey(ctx, idempotency.NewKey()), and retry under it.
type Transport struct {
	base  http.RoundTripper
	cfg   TransportConfig
	shown keepers
}

// NewTransport returns a transport that sends through base, which the caller owns, or all problems
// of its configuration at once.
func NewTransport(base http.RoundTripper, cfg TransportConfig) (*Transport, error) {
	cfg, err := cfg.withDefaults()
	if base == nil {
		err = errors.Join(err, errors.New("base is nil: want an http.RoundTripper, such as http.DefaultTransport"))
	}
	if err != nil {
		return nil, err
	}
	return &Transport{base: base, cfg: cfg}, nil
}

// UnansweredError is a request that the server may or may not have executed. If Honoured, it is
// safe to retry it under Key, and only under Key: see WithKey. errors.As finds it in the error of
// an http.Client, except one with a Timeout: see Transport.
type UnansweredError struct {
	Key      string
	Honoured bool // the server honours keys, as far as is known (TransportConfig.Honours); else it may act again even under Key
	Attempts int
	Err      error // of the last attempt
}

func (e *UnansweredError) Error() string {
	state := "the server may have acted: retry under the same idempotency key"
	var unsent *notSentError
	switch {
	case errors.As(e.Err, &unsent):
		state = "nothing was sent"
	case !e.Honoured:
		state = "the server may have acted, and is not among TransportConfig.Honours: find out before retrying"
	}
	return fmt.Sprintf("no answer in %d attempts, %s: %v", e.Attempts, state, e.Err)
}

func (e *UnansweredError) Unwrap() error { return e.Err }

// Timeout implements the method that url.Error calls.
func (e *UnansweredError) Timeout() bool {
	var timeout interface{ Timeout() bool }
	return errors.As(e.Err, &timeout) && timeout.Timeout()
}

// ErrKey marks a request that was not sent, because of its key or its name.
var ErrKey = errors.New("request without a usable idempotency key")

// call is one request with all its attempts.
type call struct {
	t        *Transport
	request  *http.Request // the caller's, with a copy of its header
	body     body
	key      string // empty: none
	name     string // its name in Pending
	deadline time.Time
	doubt    bool // an earlier attempt, of this process or of another one, may have been executed
	sent     bool // an attempt of this call may have been sent
}

// RoundTrip implements http.RoundTripper. A request redirected by 307 or 308 keeps its key. One
// redirected to a GET has no key; if that GET gets no response, the UnansweredError has the key of
// the redirected request.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	c, err := t.prepare(r)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // nothing was sent; err is the error that matters
		}
		return nil, err
	}
	if c.body.again == nil {
		response, err := c.send(r.Context())
		if err != nil {
			return nil, c.unanswered(1, err)
		}
		return c.hand(response, func() {}), nil
	}
	return c.sendUntilAnswered(r.Context())
}

// prepare sets the key and the body. The caller's request is not changed, except for its body.
func (t *Transport) prepare(r *http.Request) (*call, error) {
	c := &call{t: t, request: r.WithContext(r.Context()), deadline: t.deadline(r.Context())} // shares Trailer, which reading the body fills in
	c.request.Header = r.Header.Clone()
	if c.request.Header == nil {
		c.request.Header = http.Header{}
	}
	given, err := c.chooseKey(r)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	repeat := (c.key != "" || safe(r.Method)) && !idempotency.CalledOnce(r.Context())
	if c.body, err = newBody(r, t.cfg.BodyBytesMax, repeat); err != nil {
		return nil, err
	}
	c.body.apply(c.request)
	if c.name != "" { // last: after this only sending can fail
		if err := c.begin(r.Context(), given); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrKey, err)
		}
	}
	if c.key != "" {
		c.request.Header.Set(t.cfg.Header, c.key)
	}
	return c, nil
}

// headStart is the longest time by which a request ends before the deadline of its context.
const headStart = 250 * time.Millisecond

// deadline is the deadline of all attempts. It is before the context's, by a tenth of the time at
// most: an http.Client with a Timeout replaces an error that comes after the context's deadline by
// one of its own, without the key. This helps only if nothing stalls in between.
func (t *Transport) deadline(ctx context.Context) time.Time {
	now := time.Now()
	deadline := now.Add(t.cfg.TotalMax)
	end, ok := ctx.Deadline()
	if early := end.Add(-min(end.Sub(now)/10, headStart)); ok && early.Before(deadline) {
		return early
	}
	return deadline
}

// chooseKey leaves the key empty if none is needed, and reports whether the caller gave it.
func (c *call) chooseKey(r *http.Request) (given bool, err error) {
	cfg := c.t.cfg
	if name, named := r.Context().Value(nameInContext).(string); named && !safe(r.Method) {
		if cfg.Pending == nil {
			return false, errors.New("the request has a name, but TransportConfig.Pending is not set")
		}
		if c.name = name; name == "" {
			return false, errors.New("the request's name is empty")
		}
	}
	inContext, _ := r.Context().Value(keyInContext).(*chosen)
	switch values := r.Header[cfg.Header]; {
	case len(values) > 1:
		return false, fmt.Errorf("%d headers %s: want one", len(values), cfg.Header)
	case len(values) == 1:
		c.key = values[0]
	case safe(r.Method):
		return false, nil
	case redirected(r).Get(cfg.Header) != "":
		c.key = redirected(r).Get(cfg.Header)
	case inContext != nil:
		if err := inContext.claim(r); err != nil {
			return false, err
		}
		c.key = inContext.value
	case c.name != "" || slices.Contains(cfg.Methods, r.Method):
		c.key = idempotency.NewKey()
		return false, nil
	default:
		return false, nil
	}
	return true, usable(c.key)
}

// redirected returns the header of the request whose response redirected to r.
func redirected(r *http.Request) http.Header {
	if r.Response == nil || r.Response.Request == nil {
		return nil
	}
	return r.Response.Request.Header
}

// usable returns an error for a key that servers would reject (H9): want visible ASCII.
func usable(key string) error {
	if key == "" || len(key) > 255 || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fmt.Errorf("a key of %d bytes: want 1 to 255 of visible ASCII", len(key))
	}
	return nil
}

// begin makes the key durable, or takes the one that is pending.
func (c *call) begin(ctx context.Context, given bool) error {
	ctx, cancel := context.WithDeadline(ctx, c.deadline)
	defer cancel()
	key, err := c.t.cfg.Pending.Begin(ctx, c.name, c.key)
	if err != nil {
		return fmt.Errorf("remember request %q: %w", c.name, err)
	}
	if given && key != c.key {
		return fmt.Errorf("request %q is pending under another key than the given one", c.name)
	}
	c.doubt = given || key != c.key // the caller's own key may have been sent before
	c.key = key
	return usable(key)
}

// unanswered also finds the key of a request that was redirected to r.
func (c *call) unanswered(attempts int, err error) error {
	var unsent *notSentError
	if errors.As(err, &unsent) && c.sent {
		err = unsent.error // the last attempt was not sent, an earlier one was
	}
	asked := keyed(c.request, c.t.cfg.Header)
	key := asked.Header.Get(c.t.cfg.Header)
	if key == "" {
		return err
	}
	return &UnansweredError{Key: key, Honoured: c.t.honours(asked.URL), Attempts: attempts, Err: err}
}
