package httpkey_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// Property: whitespace does not count in JSON. Two bodies that decode to different values, with
// their numbers as written, have different canonical forms; a canonical form is its own; and a body
// that is not JSON is left as it is.
func FuzzCanonical(f *testing.F) {
	f.Add([]byte(`{"a": 1, "b": [true, null]}`), []byte(`{"b":[true,null],"a":1}`))
	f.Add([]byte(`{"a":9007199254740993}`), []byte(`{"a":9007199254740992}`))
	f.Add([]byte(`{"a":1,"a":2}`), []byte(`{"a":2,"a":1}`))
	f.Add([]byte(`{"a":1,"A":2}`), []byte(`{"A":2,"a":1}`))
	f.Add([]byte(`"\u00e9"`), []byte(`"é"`))
	f.Add([]byte(`1e2`), []byte(`100`))
	f.Add([]byte(`{`), []byte{0xff})
	request := func() *http.Request {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(""))
		r.Header.Set("Content-Type", "application/json")
		return r
	}
	decode := func(text []byte) (value any, ok bool) {
		in := json.NewDecoder(bytes.NewReader(text))
		in.UseNumber()
		return value, in.Decode(&value) == nil && !in.More()
	}
	f.Fuzz(func(t *testing.T, one, other []byte) {
		before := bytes.Clone(one)
		canonical, err := httpkey.Canonical(request(), one)
		require.NoError(t, err)
		require.Equal(t, before, one, "the body is left as it is")
		again, err := httpkey.Canonical(request(), canonical)
		require.NoError(t, err)
		require.Equal(t, canonical, again)
		if !json.Valid(one) {
			require.Equal(t, one, canonical)
			return
		}
		spaced := &bytes.Buffer{}
		require.NoError(t, json.Indent(spaced, one, "", "  "))
		indented, err := httpkey.Canonical(request(), spaced.Bytes())
		require.NoError(t, err)
		if !bytes.Equal(canonical, one) || bytes.Equal(indented, canonical) {
			require.Equal(t, canonical, indented)
		}
		second, err := httpkey.Canonical(request(), other)
		require.NoError(t, err)
		value, ok := decode(one)
		otherValue, otherOK := decode(other)
		if ok && otherOK && bytes.Equal(canonical, second) {
			require.True(t, reflect.DeepEqual(value, otherValue), "%s and %s have one canonical form: %s", one, other, canonical)
		}
	})
}
