package parked

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Key of a message; nil: it has none.
type Key []byte

// base64Prefix marks keys that are no text.
const base64Prefix = "base64:"

// String is the key as text, or base64: and its bytes where it is no printable text.
func (k Key) String() string {
	text := string(k)
	if !Printable(text) || strings.HasPrefix(text, base64Prefix) {
		return base64Prefix + base64.StdEncoding.EncodeToString(k)
	}
	return text
}

// ParseKey reads String.
func ParseKey(text string) (Key, error) {
	encoded, is := strings.CutPrefix(text, base64Prefix)
	if !is {
		return Key(text), nil
	}
	key, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, fmt.Errorf("want standard base64 after %q", base64Prefix)
	}
	return key, nil
}

// MarshalJSON writes String, or null.
func (k Key) MarshalJSON() ([]byte, error) {
	if k == nil {
		return []byte("null"), nil
	}
	return json.Marshal(k.String())
}

// Printable tells whether a text is UTF-8 and does nothing to a terminal but show.
func Printable(text string) bool {
	return utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}
