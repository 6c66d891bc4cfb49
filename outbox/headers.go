package outbox

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// orderedObject reads a JSON object in the order of its text, so that decoding is deterministic.
type orderedObject struct {
	dec *json.Decoder
}

func newOrderedObject(stored []byte) orderedObject {
	dec := json.NewDecoder(bytes.NewReader(stored))
	dec.UseNumber()
	return orderedObject{dec: dec}
}

func (o orderedObject) headers() ([]Header, error) {
	open, err := o.dec.Token()
	if err != nil {
		return nil, fmt.Errorf("headers are not JSON: %w", err)
	}
	if open != json.Delim('{') {
		return nil, errors.New("headers are not a JSON object")
	}
	var headers []Header
	for o.dec.More() {
		token, err := o.dec.Token()
		if err != nil {
			return nil, fmt.Errorf("headers are not JSON: %w", err)
		}
		name, _ := token.(string) // a name is always a string here
		var value any
		if err := o.dec.Decode(&value); err != nil {
			return nil, fmt.Errorf("header %.60q is not JSON: %w", name, err)
		}
		values, isList := value.([]any)
		if !isList {
			values = []any{value}
		}
		for _, v := range values {
			raw, err := headerValue(v)
			if err != nil {
				return nil, fmt.Errorf("header %.60q: %w", name, err)
			}
			headers = append(headers, Header{Name: name, Value: raw})
		}
	}
	if _, err := o.dec.Token(); err != nil {
		return nil, fmt.Errorf("headers are not JSON: %w", err)
	}
	if _, err := o.dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("headers are not a JSON object: text follows it")
	}
	return headers, nil
}

func headerValue(v any) ([]byte, error) {
	switch v := v.(type) {
	case nil:
		return nil, nil
	case string:
		return []byte(v), nil
	case json.Number:
		return []byte(v), nil
	case bool:
		return fmt.Append(nil, v), nil
	case map[string]any:
		if text, ok := v["base64"].(string); ok && len(v) == 1 {
			raw, err := base64.StdEncoding.DecodeString(text)
			if err != nil {
				return nil, fmt.Errorf("bad base64: %w", err)
			}
			return raw, nil
		}
	}
	return nil, errors.New(`want a string, number, boolean, null, {"base64": "…"} or an array of these`)
}
