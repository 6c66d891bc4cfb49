package httpkey

import (
	"bytes"
	"net/http"
	"slices"
	"strings"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/headers"
)

// ReplayedHeaders are the headers of a response that are stored and replayed by default, in
// canonical form: they describe its content and who may read it, and do not belong to one client or
// connection.
func ReplayedHeaders() []string { return headers.All(headers.Kept) }

// neverReplayed reports headers of one client, one connection or one moment, or that look like a
// credential.
func neverReplayed(name string) bool { return headers.Of(name) >= headers.Once }

// kept returns the headers to store. It drops headers that still have the value that an outer layer
// set before the handler ran: that layer sets its own at a replay.
func (m *Middleware) kept(header, outer http.Header) map[string][]string {
	return headers.Select(header, func(name string) bool {
		given, ok := outer[name]
		return m.keep[http.CanonicalHeaderKey(name)] && (!ok || !slices.Equal(given, header[name]))
	})
}

// first sends the handler's whole answer; its header includes what outer layers set.
func (m *Middleware) first(w http.ResponseWriter, r *http.Request, response idempotency.Response) {
	headers.First(w.Header(), response.Header)
	response.Header = nil
	m.write(w, r, response)
}

// replay sends what is stored. Caches must not serve it to other clients.
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
	_, _ = w.Write(response.Body) // a client that is gone retries
}
