package keyclient

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pause"
)

// Transport is an http.RoundTripper that retries a request under the same idempotency key until
// there is a response. It is safe for concurrent use, and keeps no goroutine.
//
// A request gets its key from its header, else from its context (WithKey), else a new one if its
// method is POST or PATCH. One without a key is passed to base unchanged. One with a key, to a server in
// Honours, is sent again if there is no response, for 408, 425, 429, 500, 502, 503 and 504, and for 409 with
// Retry-After, if it has no body or a GetBody; not with Idempotent-Replayed: true, whatever the status,
// which is stored and will not change. To any other server, and in the Call of an AtMostOnce phase
// (idempotency.CalledOnce), it is sent once, as by Single. When the attempts or the time of the request's context are used up, the last response is
// returned as it is, or an UnansweredError if there was none. If the body of a response breaks off,
// send the request again under the key, which response.Request has in its header.
//
// base bounds each attempt, and can log it, and the context bounds all of them: set
// http.Transport.ResponseHeaderTimeout, or a server that hangs is waited for as long as the context lives. Timeout of the http.Client must be
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

// TransportConfig of a Transport. The zero value works.
type TransportConfig struct {
	// Header that carries the key. Default "Idempotency-Key".
	Header string
	// Honours are the hosts that honour keys, without a port, as in the addresses of requests:
	// "bank.example", or "*" for all. Only requests to them are retried, even if the server may have
	// acted; a server that ignores keys would act again. Default: none.
	Honours []string
	// AttemptsMax is the maximum number of attempts of a request. 1 to 100; default 6.
	AttemptsMax int
	// BackoffMax bounds the pauses: the pause before attempt n+1 is random, up to 100 ms·2ⁿ⁻¹, at most
	// BackoffMax (full jitter). A server whose Retry-After is longer than BackoffMax is not asked again.
	// 1 ms to 1 h; default 10 s.
	BackoffMax time.Duration
}

func (c TransportConfig) withDefaults() (TransportConfig, error) {
	c.Header = http.CanonicalHeaderKey(cmp.Or(c.Header, "Idempotency-Key"))
	c.Honours = slices.Clone(c.Honours)
	problems := bounds.Durations(bounds.Duration{Field: "BackoffMax", Value: &c.BackoffMax, Default: 10 * time.Second, Min: time.Millisecond, Max: time.Hour})
	problems = append(problems, bounds.Ints(bounds.Int{Field: "AttemptsMax", Value: &c.AttemptsMax, Default: 6, Min: 1, Max: 100})...)
	return c, errors.Join(problems...)
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
	case errors.As(e.Err, new(*notSentError)):
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

// RoundTrip implements http.RoundTripper. A request that a server in Honours redirects by 307 or 308 keeps its key.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	key, err := t.chooseKey(r)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // nothing was sent; err is the error that matters
		}
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	request := r.Clone(r.Context())
	if key != "" {
		if request.Header == nil {
			request.Header = http.Header{}
		}
		request.Header.Set(t.cfg.Header, key)
	}
	var response *http.Response
	attempts := 1
	honoured := slices.ContainsFunc(t.cfg.Honours, func(host string) bool { return host == "*" || strings.EqualFold(host, r.URL.Hostname()) })
	switch {
	case idempotency.CalledOnce(r.Context()), key != "" && !honoured:
		response, err = Single(t.base).RoundTrip(request)
	case key == "":
		response, err = t.base.RoundTrip(request)
	default:
		response, attempts, err = t.sendUntilAnswered(request)
	}
	if err == nil {
		response.Request = request // it has the key; base may not set it
		return response, nil
	}
	var last *notSentError
	if errors.As(err, &last) && attempts > 1 {
		err = last.error // an earlier attempt may have been sent
	}
	if key != "" {
		err = &UnansweredError{Key: key, Honoured: honoured, Attempts: attempts, Err: err}
	}
	return nil, err
}

// chooseKey returns no key if none is needed.
func (t *Transport) chooseKey(r *http.Request) (key string, err error) {
	header := t.cfg.Header
	fromContext, chosen := r.Context().Value(contextKey{}).(string)
	switch values := r.Header[header]; {
	case len(values) > 1:
		return "", fmt.Errorf("%d headers %s: want one", len(values), header)
	case len(values) == 1:
		key = values[0]
	case serving.Safe(r.Method):
		return "", nil
	case r.Response != nil && r.Response.Request != nil && r.Response.Request.Header.Get(header) != "":
		key = r.Response.Request.Header.Get(header) // of the request that was redirected
	case chosen:
		key = fromContext
	case r.Method == http.MethodPost, r.Method == http.MethodPatch:
		key = idempotency.NewKey()
	default:
		return "", nil
	}
	if !serving.ValidKey(key) {
		return "", fmt.Errorf("a key of %d bytes: want 1 to 255 of visible ASCII", len(key))
	}
	return key, nil
}

// sendUntilAnswered sends the request until there is a response, or attempts or time are used up.
func (t *Transport) sendUntilAnswered(r *http.Request) (response *http.Response, attempts int, err error) {
	ctx, attemptsMax := r.Context(), t.cfg.AttemptsMax
	if r.GetBody == nil && r.Body != nil && r.Body != http.NoBody {
		attemptsMax = 1
	}
	for attempts = 1; ; attempts++ {
		response, err = t.base.RoundTrip(r)
		wait, ok := t.cfg.backoff(attempts, retryAfter(response))
		if end, bounded := ctx.Deadline(); bounded && time.Until(end) <= wait {
			ok = false
		}
		if !ok || err == nil && !mayRetry(response) || ctx.Err() != nil || attempts == attemptsMax {
			return response, attempts, err
		}
		if response != nil {
			_ = response.Body.Close()
		}
		if !pause.For(ctx, wait) {
			return nil, attempts, context.Cause(ctx)
		}
		if r.GetBody != nil {
			if r.Body, err = r.GetBody(); err != nil {
				return nil, attempts, fmt.Errorf("read the body of the request: %w", err)
			}
		}
	}
}

func mayRetry(response *http.Response) bool {
	if response.Header.Get("Idempotent-Replayed") == "true" {
		return false
	}
	switch response.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests,
		http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	case http.StatusConflict:
		return response.Header.Get("Retry-After") != "" // in progress; other conflicts stay
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
		return retryAfter + rand.N(backoffFirst), true //nolint:gosec // jitter needs no secret
	}
	ceiling := min(backoffFirst, c.BackoffMax)
	for range attempt - 1 {
		ceiling = min(2*ceiling, c.BackoffMax)
	}
	return rand.N(ceiling + 1), true //nolint:gosec // as above
}

const backoffFirst = 100 * time.Millisecond

// retryAfter returns the server's Retry-After in seconds, or 0, also for a date.
func retryAfter(response *http.Response) time.Duration {
	if response == nil {
		return 0
	}
	seconds, _ := strconv.ParseUint(response.Header.Get("Retry-After"), 10, 31) // 68 years at most
	return time.Duration(seconds) * time.Second
}
