package httpkey

import (
	"bytes"
	"net/http"
	"slices"
	"strings"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/headers"
)

// ReplayedHeaders are the headers of a response that are stored and replayed by default, in their canonical form: they describe
// its content and who may read it, and belong to no client and no connection.
func ReplayedHeaders() []string { return headers.All(headers.Kept) }

// neverReplayed belong to one client, one connection or one moment.
func neverReplayed(name string) bool { return headers.Of(name) >= headers.Once }

// kept is what of a header is stored. What is as it was outside of this middleware, before the handler ran, is left out: it is
// that layer's word about one answer, and at a replay it says its own.
func (m *Middleware) kept(header, outer http.Header) map[string][]string {
	return headers.Select(header, func(name string) bool {
		given, ok := outer[name]
		return m.keep[http.CanonicalHeaderKey(name)] && (!ok || !slices.Equal(given, header[name]))
	})
}

// first sends what the handler answered, whole: its header has what layers outside set.
func (m *Middleware) first(w http.ResponseWriter, r *http.Request, response idempotency.Response) {
	headers.First(w.Header(), response.Header)
	response.Header = nil
	m.write(w, r, response)
}

// replay sends what is stored. Caches must not take it for an answer to somebody else.
func (m *Middleware) replay(w http.ResponseWriter, r *http.Request, response idempotency.Response) {
	header := w.Header()
	header.Set(replayedHeader, "true")
	header.Set("Cache-Control", "no-store")
	response.Header = headers.Select(response.Header, func(name string) bool {
		ofBody := strings.HasPrefix(http.CanonicalHeaderKey(name), "Content-")
		return !neverReplayed(name) && (!response.BodyDropped || !ofBody)
	})
	if response.BodyDropped {
		headers.Add(header, response.Header)
		gone := describe(ProblemResponseDropped)
		gone.Outcome = response.Status
		m.send(w, r, gone)
		return
	}
	m.write(w, r, response)
}

func (m *Middleware) write(w http.ResponseWriter, r *http.Request, response idempotency.Response) {
	if response.Status == http.StatusGone && bytes.Equal(response.Body, expired().Body) {
		m.send(w, r, describe(ProblemKeyExpired))
		return
	}
	headers.Add(w.Header(), response.Header)
	if response.Status == 0 {
		response.Status = http.StatusOK
	}
	w.WriteHeader(response.Status)
	_, _ = w.Write(response.Body) // a client that is gone asks again
}
