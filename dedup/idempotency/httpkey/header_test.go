package httpkey_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// Property: a key comes once, has 1 to 255 visible ASCII characters, and is the same key with and
// without quotes. Row H9 of guarantees.md.
func TestKeysOfHeaders(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 255)
	for _, good := range []struct{ header, key string }{
		{`a`, `a`},
		{`"a"`, `a`},
		{`"a\"b\\c"`, `a"b\c`},
		{`a"b`, `a"b`},
		{`~!`, `~!`},
		{long, long},
		{`"` + long + `"`, long},
		{`charge-order-4127`, `charge-order-4127`},
	} {
		key, err := httpkey.ParseKey(http.Header{"Idempotency-Key": {good.header}})
		require.NoError(t, err, good.header)
		require.Equal(t, good.key, key)
	}
	for _, bad := range [][]string{
		nil,
		{},
		{``},
		{`""`},
		{`"a`},
		{`"`},
		{`"a"b`},
		{`"a\n"`},
		{`"a\`},
		{`"a";p=1`},
		{`a b`},
		{`"a b"`},
		{"a\x00"},
		{"a\x7f"},
		{"ä"},
		{long + "k"},
		{`"` + long + `k"`},
		{`a`, `a`},
		{`a, b`},
		{`a`, ``},
	} {
		_, err := httpkey.ParseKey(http.Header{"Idempotency-Key": bad})
		require.Error(t, err, bad)
	}
}

// Property: no header makes the parser panic; what it accepts is within bounds, and quoting it
// gives the same key.
func FuzzParseKey(f *testing.F) {
	for _, seed := range []string{`a`, `"a"`, `"a\"\\"`, `"`, `"\`, `"a";b`, ``, "\x00", `a b`, strings.Repeat("x", 256)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		key, err := httpkey.ParseKey(http.Header{"Idempotency-Key": {header}})
		if err != nil {
			require.Empty(t, key)
			return
		}
		require.True(t, key != "" && len(key) <= 255, "%q", key)
		for _, c := range []byte(key) {
			require.True(t, c > ' ' && c < 0x7f, "%q", key)
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
		again, err := httpkey.ParseKey(http.Header{"Idempotency-Key": {quoted}})
		require.NoError(t, err)
		require.Equal(t, key, again)
	})
}
