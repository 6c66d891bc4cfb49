// Package headers decides which headers of an outcome are stored and replayed. It has the only lists
// of them.
package headers

import (
	"net/textproto"
	"slices"
	"strings"
)

// Kept are the headers that httpkey stores and replays unless told otherwise: they describe the
// response. The list is in canonical form, and sorted.
func Kept() []string {
	return []string{
		"Allow", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Location", "Content-Range", "Content-Type",
		"Etag", "Last-Modified", "Link", "Location", "Preference-Applied", "Retry-After", "X-Content-Type-Options",
	}
}

//nolint:gochecknoglobals // a table
var never = []string{
	// Of one client.
	"Cookie", "Cookie2", "Set-Cookie", "Set-Cookie2",
	"Authorization", "Authentication-Info", "Www-Authenticate", "Proxy-Authorization", "Proxy-Authenticate", "Proxy-Authentication-Info",
	"X-Api-Key", "X-Auth-Token", "X-Amz-Security-Token", "X-Csrf-Token",
	// Of one connection.
	"Connection", "Keep-Alive", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
	// Of one moment, or one request: a replay has its own.
	"Age", "Cache-Control", "Content-Length", "Date", "Expires", "Idempotency-Key", "Idempotent-Replayed",
}

// Never reports whether a header is never stored. Its name may be written in any case.
func Never(name string) bool {
	return slices.Contains(never, textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
}

// Select returns the headers that may be stored, and for which keep returns true.
func Select(header map[string][]string, keep func(name string) bool) map[string][]string {
	selected := map[string][]string{}
	for name, values := range header {
		if !Never(name) && keep(name) {
			selected[name] = values
		}
	}
	return selected
}
