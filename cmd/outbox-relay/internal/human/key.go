package human

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Key is the key of a message; nil: it has none.
type Key []byte

// base64Prefix marks keys that are not text.
const base64Prefix = "base64:"

// String returns the key as text, or base64: and its bytes if it is not printable text.
func (k Key) String() string {
	text := string(k)
	if !Printable(text) || strings.HasPrefix(text, base64Prefix) {
		return base64Prefix + base64.StdEncoding.EncodeToString(k)
	}
	return text
}

// ParseKey parses the result of String.
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

// Printable reports whether a text is valid UTF-8 that a terminal only displays.
func Printable(text string) bool {
	return utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}
