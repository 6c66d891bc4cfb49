package httpkey

import (
	"maps"
	"net/http"
	"strings"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// ReplayedHeaders are the headers of a response that are stored and replayed by default, in
// canonical form: they describe its content, and do not belong to one client or connection.
func ReplayedHeaders() []string {
	return []string{
		"Allow", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Location", "Content-Range", "Content-Type",
		"Etag", "Last-Modified", "Link", "Location", "Preference-Applied", "Retry-After", "X-Content-Type-Options",
	}
}

// kept returns the headers to store.
func (m *Middleware) kept(header http.Header) map[string][]string {
	kept := map[string][]string{}
	for name, values := range header {
		if m.keep[http.CanonicalHeaderKey(name)] {
			kept[name] = values
		}
	}
	return kept
}

// first sends the handler's whole answer; its header includes what outer layers set.
func first(w http.ResponseWriter, response idempotency.Response) {
	clear(w.Header())
	maps.Copy(w.Header(), response.Header)
	response.Header = nil
	write(w, response)
}

// replay sends what is stored. Caches must not serve it to other clients.
func replay(w http.ResponseWriter, response idempotency.Response) {
	header := w.Header()
	header.Set(replayedHeader, "true")
	header.Set("Cache-Control", "no-store")
	if response.BodyDropped {
		maps.DeleteFunc(response.Header, func(name string, _ []string) bool { return ofBody(name) })
		add(header, response.Header)
		send(w, serving.ResponseDropped, response.Status)
		return
	}
	write(w, response)
}

func write(w http.ResponseWriter, response idempotency.Response) {
	add(w.Header(), response.Header)
	if response.Status == 0 {
		response.Status = http.StatusOK
	}
	w.WriteHeader(response.Status)
	_, _ = w.Write(response.Body) // a client that is gone retries
}

// add adds stored headers to those of this answer. What an outer layer has set stays, except where
// it describes the body, which is the stored one.
func add(to, header http.Header) {
	for name, values := range header {
		if name = http.CanonicalHeaderKey(name); len(to[name]) == 0 || ofBody(name) {
			to[name] = values
		}
	}
}

func ofBody(name string) bool { return strings.HasPrefix(http.CanonicalHeaderKey(name), "Content-") }
