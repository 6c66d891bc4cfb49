package keyclient

import (
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync/atomic"

	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Single returns a RoundTripper that sends each request once through base, for any http.Client of a
// server that does not deduplicate. The caller owns base; nil is http.DefaultTransport. Put Single
// directly around the http.Transport: a base that retries by itself still does.
//
// An http.Transport repeats a request only if it can get the body again: with Single GetBody is nil,
// and a body that is nil or http.NoBody becomes an empty reader. The cost: over HTTP/1 a POST without
// a body has Transfer-Encoding: chunked instead of Content-Length: 0. If a server refuses that (411),
// give the request a body.
//
// Redirects by 307 and 308 would send the request again. They are not followed: the client gets the
// response without its Location. Redirects to a GET (301, 302, 303) are followed.
//
// An error before there was a connection, for whatever reason, has a method NotSent() bool that
// returns true: the request was not sent. The Call of an AtMostOnce phase returns it as it is, and
// its key stays free. A base that does not report to net/http/httptrace has no such errors.
func Single(base http.RoundTripper) http.RoundTripper {
	if base == nil {
		base = http.DefaultTransport
	}
	return single{base}
}

type single struct{ base http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (s single) RoundTrip(r *http.Request) (*http.Response, error) {
	if serving.Safe(r.Method) && r.Response != nil { // the target of a redirect: the request with the effect is done
		return s.base.RoundTrip(r)
	}
	var asked, got atomic.Bool
	r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		GetConn: func(string) { asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { got.Store(true) },
	}))
	r.GetBody = nil // base cannot repeat the request
	if r.Body == nil || r.Body == http.NoBody {
		r.Body = io.NopCloser(strings.NewReader(""))
	}
	response, err := s.base.RoundTrip(r)
	if err != nil && asked.Load() && !got.Load() {
		err = &notSentError{err}
	}
	if err != nil {
		return nil, err
	}
	again := response.StatusCode == http.StatusTemporaryRedirect || response.StatusCode == http.StatusPermanentRedirect
	if again && !serving.Safe(r.Method) {
		response.Header.Del("Location") // a http.Client has the body to send it again
	}
	return response, nil
}

// notSentError is an error before there was a connection.
type notSentError struct{ error }

func (e *notSentError) Unwrap() error { return e.error }

// NotSent is the method that package idempotency looks for.
func (e *notSentError) NotSent() bool { return true }
