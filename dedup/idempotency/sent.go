package idempotency

import (
	"context"
	"errors"
	"net/http/httptrace"
	"sync/atomic"
)

// sending records what net/http reports about the requests made under the context of a call.
type sending struct {
	once  bool        // the call must not be repeated
	asked atomic.Bool // a connection was requested: requests of the call are seen here
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

// certainlyNotDone reports whether the error of a call proves that the foreign system did nothing:
// the caller returned NotDone; or an error of keyclient.Single says that the request was not sent,
// and no other one under the context of the call got a connection either: an http.Transport whose
// connection was closed after it sent a request tries another one, and returns the error of that.
func certainlyNotDone(ctx context.Context, err error) bool {
	var not *notDoneError
	if errors.As(err, &not) {
		return true
	}
	var marked interface{ NotSent() bool }
	s, ok := ctx.Value(sendingKey{}).(*sending)
	return ok && s.asked.Load() && !s.got.Load() && errors.As(err, &marked) && marked.NotSent()
}
