package idempotency

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// Property: headers of a response read as they were written, whatever bytes their values have; none
// that names a credential is written; and the text can be stored as jsonb.
func FuzzStoredHeaders(f *testing.F) {
	f.Add("Location", "/orders/7", "Content-Type", "text/plain", "again")
	f.Add("Set-Cookie", "a=b", "X-Name", "caf\xe9", "\x00")
	f.Add("X-A", `{"base64":"AA=="}`, "x-a", "", "\u2028")
	f.Fuzz(func(t *testing.T, name, value, other, otherValue, second string) {
		given := map[string][]string{name: {value, second}, other: {otherValue}}
		text, err := writeHeaders(given)
		require.NoError(t, err)
		if text == nil {
			return
		}
		require.True(t, json.Valid(text) && utf8.Valid(text))
		require.NotContains(t, string(text), `\u0000`, "jsonb has no NUL")
		read, err := readHeaders(text)
		require.NoError(t, err)
		require.NotEmpty(t, read)
		for name, values := range read {
			require.False(t, NeverStored(name))
			require.Equal(t, given[name], values)
		}
	})
}
