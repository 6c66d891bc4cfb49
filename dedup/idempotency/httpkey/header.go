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

var (
	errNoKey        = errors.New("the header Idempotency-Key is missing")
	errMalformedKey = errors.New("the header Idempotency-Key must come once, with 1 to 255 visible ASCII characters, as they are or in double quotes")
)

// parseKey reads the key of a request. Both forms of a value are the same key: raw, as most clients send it, and as a
// string of RFC 8941, as the draft of the header says. A proxy that joins two headers puts a space between them, which is
// refused like two headers.
func parseKey(header http.Header) (string, error) {
	values := header.Values(keyHeader)
	if len(values) == 0 {
		return "", errNoKey
	}
	value := values[0]
	if strings.HasPrefix(value, `"`) {
		var ok bool
		if value, ok = unquote(value); !ok {
			return "", errMalformedKey
		}
	}
	invisible := func(r rune) bool { return r <= ' ' || r > '~' }
	if len(values) > 1 || value == "" || len(value) > keyBytesMax || strings.ContainsFunc(value, invisible) {
		return "", errMalformedKey
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
