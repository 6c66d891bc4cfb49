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
	target atomic.Pointer[string] // method and address of its request
}

// WithKey makes a Transport send this key with the request of the context, whatever its method,
// also for a retry later or in another process. A context is for one request, which may be sent
// several times: a request with another method or address under it is rejected, since it could get
// the response of the first.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyInContext, &chosen{value: key})
}

// WithChild is WithKey with the key that a step of the work under another key uses for calls to
// other systems: the same at each attempt of the work. See idempotency.Key.ChildID. It panics for a
// key without an operation.
func WithChild(ctx context.Context, key idempotency.Key, step string) context.Context {
	return WithKey(ctx, key.ChildID(step).String())
}

// WithRequestName names the request of the context for TransportConfig.Pending: "charge order
// 4127". The name stands for one effect until it is forgotten: a request with the same name, also
// after a restart, uses the same key. After that it gets a new key, and a second effect. So check
// first whether the response was stored, and use WithKey as well to retry requests that
// Pending.List returned. 1 to 255 bytes.
func WithRequestName(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, nameInContext, name)
}

// SentKey returns the key that the request of a response was sent with, empty if none; after a
// redirect to a GET, that of the redirected request. header is TransportConfig.Header, or empty for
// its default.
func SentKey(response *http.Response, header string) string {
	if response == nil || response.Request == nil {
		return ""
	}
	header = cmp.Or(header, defaultHeader)
	return keyed(response.Request, header).Header.Get(header)
}

// keyed returns the request if it has a key, else the last one with a key in the chain of redirects
// that led to it, else the first one.
func keyed(r *http.Request, header string) *http.Request {
	for r.Header.Get(header) == "" && r.Response != nil && r.Response.Request != nil {
		r = r.Response.Request
	}
	return r
}

const (
	defaultHeader  = "Idempotency-Key"     // the name in the IETF's draft and at most services
	replayedHeader = "Idempotent-Replayed" // "true" with a stored response
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
