package idempotency

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptrace"
	"sync/atomic"
)

// sending records what net/http reports about the requests made under the context of a call.
type sending struct {
	once  bool        // the call must not be repeated
	asked atomic.Bool // a connection was requested
	got   atomic.Bool // a connection was obtained: a request may have been sent
}

type sendingKey struct{}

// watched returns a context that watches the requests of a call. once: the call must not be
// repeated.
func watched(ctx context.Context, once bool) context.Context {
	s := &sending{once: once || CalledOnce(ctx)}
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn: func(string) { s.asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { s.got.Store(true) },
	})
	return context.WithValue(ctx, sendingKey{}, s)
}

// CalledOnce reports whether ctx is that of the Call of an AtMostOnce phase. A client that gets
// such a context sends its request once, and follows no redirect that would send it again. See
// keyclient.Single.
func CalledOnce(ctx context.Context) bool {
	s, ok := ctx.Value(sendingKey{}).(*sending)
	return ok && s.once
}

type notSentError struct{ err error }

func (e *notSentError) Error() string { return e.err.Error() }
func (e *notSentError) Unwrap() error { return e.err }

// NotSent is the marker method that errors of keyclient.Single have, too.
func (e *notSentError) NotSent() bool { return true }

// NotSent marks err if it shows that a net/http request was not sent: connection refused, no route,
// unknown name, rejected certificate, no TLS. It returns every other error, and nil, unchanged. The
// Call of a phase returns it instead of NotDone: the call of an AtMostOnce phase may then be
// repeated. Elsewhere it has no effect.
//
// The mark is verified: it counts only if the request was made under the context of the Call, and
// no request under that context got a connection. The check is needed because an http.Transport
// that sent a request over a connection which was then closed tries another one, and returns the
// error of that: refused. Errors of keyclient.Single count without NotSent. Calls through other
// clients than net/http's, or under another context, are not seen: let a phase make one request
// with an effect. If it must make another request first (for a token), or uses another client,
// inspect the error and use NotDone.
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

// certainlyNotDone reports whether the error of a call proves that the foreign system did nothing:
// the caller returned NotDone, or neither the request nor any other one of this call was sent.
func certainlyNotDone(ctx context.Context, err error) bool {
	var not *notDoneError
	if errors.As(err, &not) {
		return true
	}
	var marked interface{ NotSent() bool }
	s, ok := ctx.Value(sendingKey{}).(*sending)
	return ok && s.asked.Load() && !s.got.Load() && errors.As(err, &marked) && marked.NotSent()
}
