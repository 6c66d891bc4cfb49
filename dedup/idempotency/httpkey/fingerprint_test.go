package httpkey_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

func jsonRequest(t *testing.T, media string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	require.NoError(t, err)
	r.Header.Set("Content-Type", media)
	return r
}

// Property: JSON that says the same is the same request, amounts that differ in any digit are not,
// and what is not proper JSON counts byte for byte. Row H6 of guarantees.md.
func TestCanonicalJSON(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		media, a, b string
		same        bool
	}{
		"order and space":   {"application/json; charset=utf-8", `{"b":1,"a":[1, 2]}`, "{\"a\":[1,2],\n \"b\":1}", true},
		"escapes":           {"application/merge-patch+json", `{"a":"\u0041"}`, `{"a":"A"}`, true},
		"order of elements": {"application/json", `[1,2]`, `[2,1]`, false},
		"large integers":    {"application/json", `{"amount":9007199254740993}`, `{"amount":9007199254740992}`, false},
		"small digits":      {"application/json", `{"amount":1234567890123456.71}`, `{"amount":1234567890123456.72}`, false},
		"number and string": {"application/json", `{"amount":1}`, `{"amount":"1"}`, false},
		"member twice":      {"application/json", `{"a":1,"a":2}`, `{"a":2,"a":1}`, false},
		"member twice too":  {"application/json", `{"a":1, "a":2}`, `{"a":1,"a":2}`, false},
		"no JSON":           {"application/json", `{"a":1`, `{"a":1 `, false},
		"two values":        {"application/json", `{"a":1} {"b":1}`, `{"a":1}`, false},
		"other media":       {"text/plain", `{"a": 1}`, `{"a":1}`, false},
		"nested too deeply": {"application/json", strings.Repeat("[", 1<<19), strings.Repeat("[", 1<<19) + " ", false},
		"null and absent":   {"application/json", `{"a":null}`, `{}`, false},
	} {
		r := jsonRequest(t, c.media)
		a, err := httpkey.Canonical(r, []byte(c.a))
		require.NoError(t, err)
		b, err := httpkey.Canonical(r, []byte(c.b))
		require.NoError(t, err)
		require.Equal(t, c.same, string(a) == string(b), name)
	}
	body := []byte(`{"b":1, "a":2}`)
	_, err := httpkey.Canonical(jsonRequest(t, "application/json"), body)
	require.NoError(t, err)
	require.Equal(t, `{"b":1, "a":2}`, string(body), "the handler reads it")
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

// Property: a key comes once, has 1 to 255 visible ASCII characters, and is the same key with and
// without quotes. Row H9 of guarantees.md.
func TestKeysOfHeaders(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 255)
	for header, want := range map[string]string{
		`a`: `a`, `"a"`: `a`, `"a\"b\\c"`: `a"b\c`, `a"b`: `a"b`, `~!`: `~!`, long: long, `"` + long + `"`: long, `charge-order-4127`: `charge-order-4127`,
	} {
		key, err := httpkey.ParseKey(http.Header{"Idempotency-Key": {header}})
		require.NoError(t, err, header)
		require.Equal(t, want, key)
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
