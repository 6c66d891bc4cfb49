package idempotency

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptrace"
	"sync/atomic"
)

// sending is what net/http reports of the requests that are made under the context of a call.
type sending struct {
	once  bool        // the call must not be made twice
	asked atomic.Bool // for a connection
	got   atomic.Bool // one: from here on a request may have been sent
}

type sendingKey struct{}

// watched watches the requests of a call, and marks one that must not be made twice.
func watched(ctx context.Context, once bool) context.Context {
	s := &sending{once: once || CalledOnce(ctx)}
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn: func(string) { s.asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { s.got.Store(true) },
	})
	return context.WithValue(ctx, sendingKey{}, s)
}

// CalledOnce reports whether ctx is the one of the Call of a phase that is AtMostOnce: a client that is given it sends its
// request once, and follows no redirect that would send it again. See keyclient.Single.
func CalledOnce(ctx context.Context) bool {
	s, ok := ctx.Value(sendingKey{}).(*sending)
	return ok && s.once
}

type notSentError struct{ err error }

func (e *notSentError) Error() string { return e.err.Error() }
func (e *notSentError) Unwrap() error { return e.err }

// NotSent is the mark that keyclient.Single makes, too.
func (e *notSentError) NotSent() bool { return true }

// NotSent says that a request of net/http was not sent, where err shows that: connection refused, no route, unknown name, a
// certificate that is refused, no TLS. It returns every other error, and nil, as it is. The Call of a phase returns it instead of
// NotDone: one that is AtMostOnce may be made again. Elsewhere it changes nothing.
//
// It is no promise, but is checked: it counts only where the request was made under the context of the Call, and no request under
// that context had a connection. For a Transport of net/http that sent a request over a connection which was closed tries another one, and
// returns the error of that: refused. Errors of keyclient.Single count without NotSent. What the Call did before by other clients than
// net/http's, or under another context, is not seen: let a phase make one request that acts. Where it must make another one first (for
// a token), or has another client, look at the error, and use NotDone.
func NotSent(err error) error {
	var dial *net.OpError
	var name *net.DNSError
	var certificate *tls.CertificateVerificationError
	var noTLS tls.RecordHeaderError
	switch {
	case errors.As(err, &dial) && (dial.Op == "dial" || dial.Op == "proxyconnect"),
		errors.As(err, &name), errors.As(err, &certificate), errors.As(err, &noTLS):
		return &notSentError{err}
	}
	return err
}

// certainlyNotDone reports whether the error of a call proves that the foreign system did nothing: by a promise of the caller's, or
// since its request was not sent, nor any other one of this call.
func certainlyNotDone(ctx context.Context, err error) bool {
	var not *notDoneError
	if errors.As(err, &not) {
		return true
	}
	var marked interface{ NotSent() bool }
	s, ok := ctx.Value(sendingKey{}).(*sending)
	return ok && s.asked.Load() && !s.got.Load() && errors.As(err, &marked) && marked.NotSent()
}
