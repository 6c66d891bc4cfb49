package httpkey_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
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
		"null and absent":   {"application/json", `{"a":null}`, `{}`, false},
		"case":              {"application/json", `{"amount":1,"Amount":2}`, `{"Amount":2,"amount":1}`, false},
		"case, inside":      {"application/json", `[{"x":{"z":{},"aMount":1,"y":[{}],"Amount":2}}]`, `[{"x":{"z":{},"Amount":2,"y":[{}],"aMount":1}}]`, false},
		"case, escaped":     {"application/json", `{"a":1,"\u0041":2}`, `{"\u0041":2,"a":1}`, false},
		"case, long s":      {"application/json", `{"sum":1,"\u017fum":2}`, `{"\u017fum":2,"sum":1}`, false},
		"case, Kelvin":      {"application/json", `{"key":1,"\u212aey":2}`, `{"\u212aey":2,"key":1}`, false},
		"case, two objects": {"application/json", `[{"a":1, "b":{"A":1}},{"A":1},"a",{"k":"A"}]`, `[{"b":{"A":1},"a":1},{"A":1},"a",{"k":"A"}]`, true},
		"case, no letters":  {"application/json", `{"a-b":1,"a_b":2}`, `{"a_b":2,"a-b":1}`, true},
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

// Property: Without leaves out the members that are named, with all that is in them, and nothing
// else.
func TestWithoutMembers(t *testing.T) {
	t.Parallel()
	r := jsonRequest(t, "application/json")
	hook := httpkey.Without("/sent_at", "/meta/attempt", "/a~1b", "/list/1/x")
	for in, want := range map[string]string{
		`{"sent_at":{"x":[1,2]},"amount":1}`:                   `{"amount":1}`,
		`{"meta":{"attempt":3,"sent_at":1},"attempt":2}`:       `{"attempt":2,"meta":{"sent_at":1}}`,
		`{"a/b":1,"a":{"b":2}}`:                                `{"a":{"b":2}}`,
		`{"list":[{"x":1},{"x":2},{"x":3}]}`:                   `{"list":[{"x":1},{},{"x":3}]}`,
		`{"k":"sent_at","amount":9007199254740993,"n":[null]}`: `{"amount":9007199254740993,"k":"sent_at","n":[null]}`,
		`[1]`:      `[1]`,
		`{"x":`:    `{"x":`,
		`{} {"a"}`: `{} {"a"}`,
		``:         ``,
	} {
		got, err := hook(r, []byte(in))
		require.NoError(t, err)
		require.Equal(t, want, string(got), in)
	}
	raw, err := hook(jsonRequest(t, "text/plain"), []byte(`{"sent_at":1}`))
	require.NoError(t, err)
	require.JSONEq(t, `{"sent_at":1}`, string(raw))
}

// Property: what is no pointer, and would leave out nothing, is refused at set-up.
func TestWithoutRefusesWhatIsNoPointer(t *testing.T) {
	t.Parallel()
	for _, pointer := range []string{"sent_at", "", "meta/attempt", "$.sent_at", "/a~b", "/a~", "/a~01~2"} {
		require.PanicsWithValue(t, fmt.Sprintf(`httpkey: Without(%q): want a JSON pointer: "/" before each name, and in names "~1" for a slash and "~0" for a tilde`, pointer),
			func() { httpkey.Without("/well", pointer) })
	}
	require.NotPanics(t, func() { httpkey.Without("/", "/a~0b", "/a~1b", "/a~01", "/list/0") })
}

// fingerprints returns what a middleware makes of requests, as a handler sees it.
func fingerprints(t *testing.T, cfg httpkey.Config) func(method, target, media, body string) string {
	t.Helper()
	s := serve(t, newMiddleware(t, newPool(t), cfg).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "%x", httpkey.Key(r).Fingerprint)
	})))
	return func(method, target, media, body string) string {
		a, err := s.ask(t.Context(), method, target, idempotency.NewKey(), body, "Content-Type", media)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, a.status, a.body)
		return a.body
	}
}

// Property: parameters of the query that do not count make no other request, the others do, as they
// are written and in their order.
func TestQueryThatDoesNotCount(t *testing.T) {
	t.Parallel()
	fingerprint := func(query func(string) bool) func(target string) string {
		ask := fingerprints(t, httpkey.Config{Query: query})
		return func(target string) string { return ask("POST", target, "text/plain", "a") }
	}
	all, none := fingerprint(nil), fingerprint(func(string) bool { return false })
	tracked := fingerprint(func(name string) bool { return name != "utm source" })
	require.Equal(t, all("/a"), none("/a?x=1&y"))
	require.NotEqual(t, none("/a?x=1"), none("/b?x=1"))
	for _, same := range []string{"/a?x=1&x=2", "/a?utm%20source=a&x=1&x=2", "/a?x=1&utm+source=b%26&&x=2&utm+source"} {
		require.Equal(t, all("/a?x=1&x=2"), tracked(same), same)
	}
	for _, other := range []string{"/a", "/a?x=2&x=1", "/a?x=1&x=%32", "/a?x=1&x=2&utm_source=a", "/a?x=1&x=2&%zz"} {
		require.NotEqual(t, all("/a?x=1&x=2"), tracked(other), other)
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

// Property: a body that is nested deeper than JSONDepthMax is refused before any SQL, one that is
// as deep is not; brackets in strings do not count, nor does what is no JSON, or is compressed.
func TestDeepBodyIsRefused(t *testing.T) {
	t.Parallel()
	nested := func(open, end string, depth int) string {
		return strings.Repeat(open, depth) + "1" + strings.Repeat(end, depth)
	}
	for name, c := range map[string]struct {
		max         int
		media, body string
		deep        bool
	}{
		"objects":            {0, "application/json", nested(`{"a":`, `}`, 65), true},
		"both":               {0, "application/hal+json", nested(`[{"a":`, `}]`, 33), true},
		"as deep as allowed": {0, "application/json", nested(`{"a":`, `}`, 64), false},
		"side by side":       {2, "application/json", `[` + strings.Repeat(`{"a":1},`, 100) + `[]]`, false},
		"in a string":        {1, "application/json", `{"a[{\"[{":"[{\\\"[{"}`, false},
		"behind a string":    {1, "application/json", `{"a\\":[]}`, true},
		"more is allowed":    {1000, "application/json", nested(`{"a":`, `}`, 1000), false},
		"no JSON":            {1, "text/plain", `[[]]`, false},
		"no JSON in fact":    {1, "application/json", "'" + strings.Repeat("[", 100), false},
		"compressed":         {1, "application/json", "\"\x1f\"" + strings.Repeat("[", 100), false},
		"does not end":       {0, "application/json", strings.Repeat(`[`, 1<<19), true},
	} {
		for _, fingerprint := range []func(*http.Request, []byte) ([]byte, error){nil, httpkey.Without("/b")} {
			cfg := httpkey.Config{JSONDepthMax: c.max, Fingerprint: fingerprint}
			a := serve(t, newMiddleware(t, pgtest.NoPool(t), cfg).Handler(insert(201))).post(t, "k", c.body, "Content-Type", c.media)
			if c.deep {
				requireProblem(t, a, 400, httpkey.ProblemTooDeep)
			} else {
				require.Equal(t, httpkey.ProblemUnavailable, a.problem.Type, name) // it asked the database
			}
		}
	}
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
