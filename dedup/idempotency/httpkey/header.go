package httpkey

import (
	"errors"
	"net/http"
	"strings"
)

const (
	keyHeader      = "Idempotency-Key"
	replayedHeader = "Idempotent-Replayed"
	keyBytesMax    = 255
)

// Why ParseKey found no key.
var (
	// ErrNoKey: the header is missing.
	ErrNoKey = errors.New("the header Idempotency-Key is missing")
	// ErrMalformedKey: it comes twice, or is not of its form. The error does not repeat it.
	ErrMalformedKey = errors.New("the header Idempotency-Key must come once, with 1 to 255 visible ASCII characters, as they are or in double quotes")
)

// ParseKey reads the Idempotency-Key of a request: the value that it is claimed under, for whatever else has to know it, such as
// region.Config.Key. 1 to 255 visible ASCII characters, in one of two forms that are the same key: raw, as most clients send
// it, and as a string of RFC 8941, as the draft of the header says. A proxy that joins two headers puts a space between them,
// which is refused like two headers. Errors are ErrNoKey and ErrMalformedKey.
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
	invisible := func(r rune) bool { return r <= ' ' || r > '~' }
	if len(values) > 1 || value == "" || len(value) > keyBytesMax || strings.ContainsFunc(value, invisible) {
		return "", ErrMalformedKey
	}
	return value, nil
}

// unquote reads a string of RFC 8941: only quote and backslash are escaped. Parameters behind it are refused.
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
