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

// Transport is an http.RoundTripper that asks again under the same idempotency key until there is an answer. It is safe
// for concurrent use, and keeps no goroutine.
//
// A request gets its key from its header, else from its context (WithKey, WithChild), else a new one where its method is
// one of TransportConfig.Methods, or where it has a name (WithRequestName). What is tried again, if the request has a
// key or its method is GET, HEAD, OPTIONS or TRACE, and its body can be sent again:
//
//	                                   server that keeps keys, or GET …   other servers
//	no connection                      yes, but for refused certificates and other mistakes of set-up
//	no response, also a late one       yes                                no
//	408, 500, 502, 503, 504            yes                                no
//	425, 429, 409 with Retry-After     yes: nothing was done              yes
//	Idempotent-Replayed: true          no, whatever the status: it is stored, and will not change
//	everything else, 409 and 422 too   no                                 no
//
// A server keeps keys if TransportConfig.Honours names it, or an answer of its has shown that. At others nothing below the Transport
// sends such a request again, either: see Single, which says what that does to a request without a body.
//
// 500 is among them since a service that keeps keys either stored nothing, and executes, or stored the failure, and
// replays it. In the Call of a phase that is AtMostOnce (idempotency.CalledOnce) every request is sent once, as by Single, whatever
// the server. Retry-After (seconds, or a date by the server's clock) is waited for, unless it is longer than
// what is left of TotalMax. When attempts or time are used up, the last response is returned as it is, or, where there was none, an
// UnansweredError.
//
// A response whose body breaks off is not asked for again by itself: do it under SentKey.
//
// Timeout of the http.Client must be 0: its error takes the place of the UnansweredError, and the key is lost, so that whoever
// asks again does so under a new one, and has a second effect. TotalMax, or the request's context, bound it as well. Who cannot
// do without makes the key first, WithKey(ctx, idempotency.NewKey()), and asks again under that.
type Transport struct {
	base  http.RoundTripper
	cfg   TransportConfig
	shown keepers
}

// NewTransport returns a transport that sends through base, which is borrowed, or all problems of its configuration at
// once.
func NewTransport(base http.RoundTripper, cfg TransportConfig) (*Transport, error) {
	cfg, err := cfg.withDefaults()
	if base == nil {
		err = errors.Join(err, errors.New("base is nil: want what sends, such as http.DefaultTransport"))
	}
	if err != nil {
		return nil, err
	}
	return &Transport{base: base, cfg: cfg}, nil
}

// UnansweredError is a request that the server may have executed, or not. Where Honoured, it is safe to ask again under Key, and only
// under Key: see WithKey. errors.As finds it in what a http.Client returns, but for one with a Timeout: see Transport.
type UnansweredError struct {
	Key      string
	Honoured bool // the server keeps keys, as far as is known (TransportConfig.Honours); else it may act again under Key, too
	Attempts int
	Err      error // the last one
}

func (e *UnansweredError) Error() string {
	state := "the server may have acted: ask again under the same idempotency key"
	var unsent *notSentError
	switch {
	case errors.As(e.Err, &unsent):
		state = "nothing was sent"
	case !e.Honoured:
		state = "the server may have acted, and is not among TransportConfig.Honours: find out before asking again"
	}
	return fmt.Sprintf("no answer in %d attempts, %s: %v", e.Attempts, state, e.Err)
}

func (e *UnansweredError) Unwrap() error { return e.Err }

// Timeout is what url.Error asks.
func (e *UnansweredError) Timeout() bool {
	var timeout interface{ Timeout() bool }
	return errors.As(e.Err, &timeout) && timeout.Timeout()
}

// ErrKey marks a request that was not sent, because of its key or its name.
var ErrKey = errors.New("request without a usable idempotency key")

// call is one request with all its attempts.
type call struct {
	t        *Transport
	request  *http.Request // the caller's, with a header of our own
	body     body
	key      string // empty: none
	name     string // that Pending knows it by
	deadline time.Time
	doubt    bool // an earlier attempt, of this process or of another one, may have been executed
	sent     bool // an attempt of this call may have been
}

// RoundTrip implements http.RoundTripper. Where a redirect is followed under 307 or 308, the key goes along. One that is followed
// by a GET has no key; where that gets no answer, the UnansweredError has the one that was redirected.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	c, err := t.prepare(r)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // nothing was sent; the error that counts is there
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
	return c.run(r.Context())
}

// prepare fills in the key and the body. The caller's request stays as it is, but for its body.
func (t *Transport) prepare(r *http.Request) (*call, error) {
	c := &call{t: t, request: r.WithContext(r.Context()), deadline: t.deadline(r.Context())} // shares Trailer, which the body fills in
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
	if c.name != "" { // last: nothing but sending can fail from here on
		if err := c.begin(r.Context(), given); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrKey, err)
		}
	}
	if c.key != "" {
		c.request.Header.Set(t.cfg.Header, c.key)
	}
	return c, nil
}

// headStart is how long before the deadline of its context a request ends by itself, at most.
const headStart = 250 * time.Millisecond

// deadline is that of all attempts. It is ahead of the context's, by a tenth of the time at most: what comes after that one a
// http.Client with a Timeout replaces by an error of its own, without the key. This helps only where nothing stalls in between.
func (t *Transport) deadline(ctx context.Context) time.Time {
	now := time.Now()
	deadline := now.Add(t.cfg.TotalMax)
	end, ok := ctx.Deadline()
	if early := end.Add(-min(end.Sub(now)/10, headStart)); ok && early.Before(deadline) {
		return early
	}
	return deadline
}

// chooseKey leaves the key empty where none is needed, and tells whether the caller gave it.
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

// redirected is the header of the request whose answer sent the client here.
func redirected(r *http.Request) http.Header {
	if r.Response == nil || r.Response.Request == nil {
		return nil
	}
	return r.Response.Request.Header
}

// usable is what servers take (H9): visible ASCII.
func usable(key string) error {
	if key == "" || len(key) > 255 || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fmt.Errorf("a key of %d bytes: want 1 to 255 of visible ASCII", len(key))
	}
	return nil
}

// begin makes the key durable, or takes the one that was.
func (c *call) begin(ctx context.Context, given bool) error {
	ctx, cancel := context.WithDeadline(ctx, c.deadline)
	defer cancel()
	key, err := c.t.cfg.Pending.Begin(ctx, c.name, c.key)
	if err != nil {
		return fmt.Errorf("remember request %q: %w", c.name, err)
	}
	if given && key != c.key {
		return fmt.Errorf("request %q is pending under another key than the one that was given", c.name)
	}
	c.doubt = given || key != c.key // the caller's own key may have been sent before
	c.key = key
	return usable(key)
}

// unanswered also has the key of a request whose answer sent the client here for the outcome.
func (c *call) unanswered(attempts int, err error) error {
	var unsent *notSentError
	if errors.As(err, &unsent) && c.sent {
		err = unsent.error // the last attempt was not, an earlier one was
	}
	asked := keyed(c.request, c.t.cfg.Header)
	key := asked.Header.Get(c.t.cfg.Header)
	if key == "" {
		return err
	}
	return &UnansweredError{Key: key, Honoured: c.t.honours(asked.URL), Attempts: attempts, Err: err}
}
