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

// writeHeaders returns the stored form of the headers of a response; nil: nothing.
func writeHeaders(header map[string][]string) ([]byte, error) {
	kept := map[string][]headerValue{}
	for name, values := range headers.Select(header, jsonText) { // a name that is not valid text is never sent: net/http drops it
		var texts []headerValue
		for _, value := range values {
			texts = append(texts, headerValue(value))
		}
		kept[name] = texts
	}
	if len(kept) == 0 {
		return nil, nil
	}
	text, err := json.Marshal(kept)
	if err != nil {
		return nil, fmt.Errorf("write headers: %w", err)
	}
	return text, nil
}

func readHeaders(text []byte) (map[string][]string, error) {
	var stored map[string][]headerValue
	if err := json.Unmarshal(text, &stored); err != nil {
		return nil, err
	}
	header := make(map[string][]string, len(stored))
	for name, texts := range stored {
		var values []string
		for _, text := range texts {
			values = append(values, string(text))
		}
		header[name] = values
	}
	return header, nil
}

// headerValue is a JSON string, or {"base64": "…"} if it has bytes that JSON, or jsonb, would
// change or reject: headers may be Latin-1.
type headerValue string

type headerBytes struct {
	Base64 []byte `json:"base64"`
}

// MarshalJSON implements json.Marshaler.
func (v headerValue) MarshalJSON() ([]byte, error) {
	if jsonText(string(v)) {
		return json.Marshal(string(v))
	}
	return json.Marshal(headerBytes{[]byte(v)})
}

// UnmarshalJSON implements json.Unmarshaler.
func (v *headerValue) UnmarshalJSON(text []byte) error {
	if strings.HasPrefix(string(text), "{") {
		var raw headerBytes
		err := json.Unmarshal(text, &raw)
		*v = headerValue(raw.Base64)
		return err
	}
	return json.Unmarshal(text, (*string)(v))
}

// jsonText reports whether jsonb keeps a string unchanged.
func jsonText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }
