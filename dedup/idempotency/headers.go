package idempotency

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/effectonce/effectonce/dedup/idempotency/internal/headers"
)

// NeverStored reports whether a header is never stored with an outcome, neither of a handler nor of
// a middleware: cookies, Authorization and its like, headers of one connection, and those of one
// moment, such as Date. Names match in any case.
func NeverStored(name string) bool { return headers.Never(name) }

// writeHeaders returns the stored form of the headers of a response; nil: nothing. jsonb cannot hold each byte: a
// value that it would change is refused, since a retry would get another response. A name that is no text is
// never sent: net/http drops it.
func writeHeaders(header map[string][]string) ([]byte, error) {
	kept := headers.Select(header, jsonText)
	if len(kept) == 0 {
		return nil, nil
	}
	for name, values := range kept {
		for _, value := range values {
			if !jsonText(value) {
				return nil, fmt.Errorf("header %s has a value that is not UTF-8, or has NUL, and cannot be stored: encode it (RFC 8187)", name)
			}
		}
	}
	return json.Marshal(kept)
}

// jsonText reports whether jsonb keeps a string unchanged.
func jsonText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
