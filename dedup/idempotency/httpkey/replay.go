package httpkey

import (
	"maps"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// ReplayedHeaders are the headers of a response that are stored and replayed by default: they describe its content, and
// belong to no client and no connection.
func ReplayedHeaders() []string {
	return []string{
		"Allow", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Location", "Content-Range", "Content-Type",
		"Etag", "Last-Modified", "Link", "Location", "Preference-Applied", "Retry-After", "X-Content-Type-Options",
	}
}

// neverReplayed belong to one client, one connection or one moment.
func neverReplayed(name string) bool {
	switch http.CanonicalHeaderKey(name) {
	case "Age", "Cache-Control", "Content-Length", "Date", "Expires", keyHeader, replayedHeader:
		return true
	}
	return idempotency.NeverStored(name)
}

// kept is what of a header is stored. What Connection names belongs to the connection. What stands as it did outside of this
// middleware, before the handler ran, is left out: it is that layer's word about one answer, and at a replay it says its own.
func (m *Middleware) kept(header, outer http.Header) map[string][]string {
	kept := map[string][]string{}
	for name, values := range header {
		if given, ok := outer[name]; m.keep[http.CanonicalHeaderKey(name)] && (!ok || !slices.Equal(given, values)) {
			kept[http.CanonicalHeaderKey(name)] = values
		}
	}
	for _, names := range header.Values("Connection") {
		for name := range strings.SplitSeq(names, ",") {
			delete(kept, textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
		}
	}
	return kept
}

// first sends what the handler answered, whole: the header includes what was set outside of this middleware. Trailers are none of
// it, since those that the handler sets behind the body are not recorded; those of a layer outside are its own.
func first(w http.ResponseWriter, response idempotency.Response) {
	outer := w.Header()["Trailer"]
	clear(w.Header())
	response.Header = maps.Clone(response.Header)
	maps.DeleteFunc(response.Header, func(name string, _ []string) bool {
		return name == "Trailer" || strings.HasPrefix(name, http.TrailerPrefix)
	})
	if outer != nil {
		w.Header()["Trailer"] = outer
	}
	write(w, response)
}

// replay sends what is stored. Caches must not take it for an answer to somebody else.
func replay(w http.ResponseWriter, response idempotency.Response) {
	header := w.Header()
	header.Set(replayedHeader, "true")
	header.Set("Cache-Control", "no-store")
	if response.BodyDropped {
		for name, values := range replayable(response.Header) {
			if !strings.HasPrefix(name, "Content-") {
				header[name] = values
			}
		}
		gone := describe(ProblemResponseDropped)
		gone.Outcome = response.Status
		send(w, gone, 0)
		return
	}
	response.Header = replayable(response.Header)
	write(w, response)
}

// replayable leaves out what a flow should not have put into its response.
func replayable(header map[string][]string) map[string][]string {
	kept := map[string][]string{}
	for name, values := range header {
		if !neverReplayed(name) {
			kept[http.CanonicalHeaderKey(name)] = values
		}
	}
	return kept
}

func write(w http.ResponseWriter, response idempotency.Response) {
	for name, values := range response.Header {
		w.Header()[name] = values
	}
	if response.Status == 0 {
		response.Status = http.StatusOK
	}
	w.WriteHeader(response.Status)
	_, _ = w.Write(response.Body) // a client that is gone asks again
}
