package keys

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Outcome is what every request gets from now on.
type Outcome struct {
	Status int
	Header map[string][]string // UTF-8, and none for which idempotency.NeverStored is true
	Body   []byte
	Window *time.Duration // how long it is remembered; nil: forever
}

// writeHeaders returns the stored form of headers; nil: none. A header that must not be replayed is
// refused instead of dropped: otherwise the operator would believe that clients get it.
func writeHeaders(header map[string][]string) ([]byte, error) {
	for _, name := range slices.Sorted(maps.Keys(header)) {
		switch {
		case idempotency.NeverStored(name):
			return nil, fmt.Errorf("header %q of the outcome belongs to one client, connection or moment, and is never stored: leave it out", name)
		case !storable(name), !storable(header[name]...):
			return nil, fmt.Errorf("header %q of the outcome: want UTF-8 without zero bytes", name)
		}
	}
	if len(header) == 0 {
		return nil, nil
	}
	text, err := json.Marshal(header)
	if err != nil {
		return nil, fmt.Errorf("headers of the outcome: %w", err)
	}
	return text, nil
}

// storable reports whether jsonb keeps the texts unchanged.
func storable(texts ...string) bool {
	return !slices.ContainsFunc(texts, func(text string) bool { return !utf8.ValidString(text) || strings.ContainsRune(text, 0) })
}
