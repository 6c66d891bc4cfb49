package keyclient

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"sync/atomic"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

type contextKey int

const (
	keyInContext contextKey = iota
	nameInContext
)

// chosen is a key that the caller chose, for one request.
type chosen struct {
	value  string
	target atomic.Pointer[string] // of the request that it was sent with
}

// WithKey makes a Transport send this key with the request of the context, whatever its method: also to ask again, later
// or in another process. A context is for one request, which may be sent several times: another method or address under
// it is refused, since its answer could be that of the first.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyInContext, &chosen{value: key})
}

// WithChild is WithKey with the key that a step of the work under another key asks other systems with: the same at each
// attempt of the work. See idempotency.Key.ChildID. A key without an operation takes part in none: fill it in.
func WithChild(ctx context.Context, key idempotency.Key, step string) context.Context {
	return WithKey(ctx, key.ChildID(step).String())
}

// WithRequestName names the request of the context for TransportConfig.Pending: "charge order 4127". It names one effect
// until it is forgotten: whoever asks under it again, also after a restart, asks under the same key. After that it gets a new
// key, and a second effect: look before whether the answer was written down, and ask again for what Pending.List told with
// WithKey as well. 1 to 255 bytes.
func WithRequestName(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, nameInContext, name)
}

// SentKey returns the key that a response was asked with, empty if none: behind a redirect to a GET, that of the request that was
// redirected. header is TransportConfig.Header, or empty for its default.
func SentKey(response *http.Response, header string) string {
	if response == nil || response.Request == nil {
		return ""
	}
	header = cmp.Or(header, defaultHeader)
	return keyed(response.Request, header).Header.Get(header)
}

// keyed is the request with a key, or else the last one that has one on the way of redirects that led to it, or else the first.
func keyed(r *http.Request, header string) *http.Request {
	for r.Header.Get(header) == "" && r.Response != nil && r.Response.Request != nil {
		r = r.Response.Request
	}
	return r
}

const (
	defaultHeader  = "Idempotency-Key"     // as the IETF's draft and most services call it
	replayedHeader = "Idempotent-Replayed" // says "true" of a stored answer
)

var errOtherRequest = errors.New("the idempotency key in the context was sent with another request: give each request its own context")

// claim binds the key to a method and an address.
func (c *chosen) claim(r *http.Request) error {
	target := r.Method + " " + r.URL.String()
	if !c.target.CompareAndSwap(nil, &target) && *c.target.Load() != target {
		return errOtherRequest
	}
	return nil
}
