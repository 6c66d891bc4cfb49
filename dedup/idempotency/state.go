package idempotency

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// memory is the state of a flow as it is stored, and the part of it that this program's type has.
// During a deployment an older release meets the state of a newer one, and must keep the members
// that it does not know.
type memory struct{ text, known []byte }

// remembered unmarshals a stored state into this program's type.
func remembered[S any](text []byte, state *S) (memory, error) {
	if err := json.Unmarshal(text, state); err != nil {
		return memory{}, err
	}
	known, err := json.Marshal(*state)
	return memory{text, known}, err
}

// with returns the memory of a changed state.
func (m memory) with(state any) (memory, error) {
	changed, err := json.Marshal(state)
	if err != nil {
		return memory{}, fmt.Errorf("write the state: %w", err)
	}
	text, err := merge(m.text, m.known, changed)
	return memory{text, changed}, err
}

// merge returns changed, plus the members of objects in text that known does not have; known is
// text as this program's type reads it. What did not change stays as it is in text. Lists are not
// merged: a changed list is taken from changed.
func merge(text, known, changed json.RawMessage) (json.RawMessage, error) {
	if text == nil || len(known) == 0 {
		return changed, nil
	}
	if bytes.Equal(known, changed) {
		return text, nil
	}
	if !isObject(text) || !isObject(known) || !isObject(changed) {
		return changed, nil
	}
	var was, knew, is map[string]json.RawMessage
	for part, into := range map[*json.RawMessage]*map[string]json.RawMessage{&text: &was, &known: &knew, &changed: &is} {
		if err := json.Unmarshal(*part, into); err != nil {
			return nil, fmt.Errorf("merge the state with what is stored: %w", err)
		}
	}
	read := map[string][]string{} // names in the text, by the name in this program's type
	for name := range was {
		mine, ok := member(knew, name)
		if ok {
			read[mine] = append(read[mine], name)
		} else if _, ok := member(is, name); !ok {
			is[name] = was[name]
		}
	}
	for mine, names := range read {
		if _, ok := is[mine]; !ok || len(names) > 1 { // the member was removed; or text has it twice, and the value that was read counts
			continue
		}
		var err error
		if is[mine], err = merge(was[names[0]], knew[mine], is[mine]); err != nil {
			return nil, err
		}
	}
	return json.Marshal(is)
}

// member returns the name under which an object has a member, as encoding/json matches it: exactly,
// or ignoring case.
func member(object map[string]json.RawMessage, name string) (string, bool) {
	if _, ok := object[name]; ok {
		return name, true
	}
	for other := range object {
		if strings.EqualFold(other, name) {
			return other, true
		}
	}
	return "", false
}

func isObject(text []byte) bool { return bytes.HasPrefix(bytes.TrimLeft(text, " \t\r\n"), []byte("{")) }
