package httpkey

import (
	"errors"
	"net/http"
	"strings"

	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

const (
	keyHeader      = "Idempotency-Key"
	replayedHeader = "Idempotent-Replayed"
)

// Errors of ParseKey.
var (
	// ErrNoKey: the header is missing.
	ErrNoKey = errors.New("the header Idempotency-Key is missing")
	// ErrMalformedKey: the header is repeated, or malformed. The error does not contain its value.
	ErrMalformedKey = errors.New("the header Idempotency-Key must come once, with 1 to 255 visible ASCII characters, as they are or in double quotes")
)

// ParseKey reads the Idempotency-Key of a request and returns the value under which it is claimed,
// for other code that needs it, such as a router (examples/regions). The key is 1 to 255 visible
// ASCII characters, in one of two equivalent forms: raw, as most clients send it, or as a string of
// RFC 8941, as the draft of the header says. A proxy that joins two headers puts a space between
// them, which is refused like two headers. Errors are ErrNoKey and ErrMalformedKey.
func ParseKey(header http.Header) (string, error) {
	values := header.Values(keyHeader)
	if len(values) == 0 {
		return "", ErrNoKey
	}
	value := values[0]
	if strings.HasPrefix(value, `"`) {
		var ok bool
		if value, ok = unquote(value); !ok {
			return "", ErrMalformedKey
		}
	}
	if len(values) > 1 || !serving.ValidKey(value) {
		return "", ErrMalformedKey
	}
	return value, nil
}

// unquote reads a string of RFC 8941: only quote and backslash are escaped. Parameters after it are
// refused.
func unquote(quoted string) (string, bool) {
	var value strings.Builder
	for i := 1; i < len(quoted); i++ {
		switch quoted[i] {
		case '"':
			return value.String(), i == len(quoted)-1
		case '\\':
			i++
			if i == len(quoted) || (quoted[i] != '"' && quoted[i] != '\\') {
				return "", false
			}
		}
		value.WriteByte(quoted[i])
	}
	return "", false
}
