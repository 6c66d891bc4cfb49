package idempotency

import (
	"encoding/json"
	"fmt"
	"net/textproto"
	"slices"
	"strings"
	"unicode/utf8"
)

// NeverStored reports whether a header is never stored with an outcome, neither of a handler nor of
// a middleware: cookies, Authorization and its like, headers of one connection, and those of one
// moment, such as Date. Names match in any case.
func NeverStored(name string) bool {
	return slices.Contains(never, textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
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

// writeHeaders returns the stored form of the headers of a response; nil: nothing. jsonb cannot hold each byte: a
// value that it would change is refused, since a retry would get another response. A name that is no text is
// never sent: net/http drops it.
func writeHeaders(header map[string][]string) ([]byte, error) {
	kept := map[string][]string{}
	for name, values := range header {
		if NeverStored(name) || !jsonText(name) {
			continue
		}
		if slices.ContainsFunc(values, func(value string) bool { return !jsonText(value) }) {
			return nil, fmt.Errorf("header %s has a value that is not UTF-8, or has NUL, and cannot be stored: encode it (RFC 8187)", name)
		}
		kept[name] = values
	}
	if len(kept) == 0 {
		return nil, nil
	}
	return json.Marshal(kept)
}

// jsonText reports whether jsonb keeps a string unchanged.
func jsonText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
