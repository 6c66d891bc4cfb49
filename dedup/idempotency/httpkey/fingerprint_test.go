package httpkey_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math/rand/v2"
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

// Property: a retry that differs only in what Without leaves out is replayed.
func TestRetryWithAnotherTimeIsReplayed(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{Fingerprint: httpkey.Without("/sent_at")}).Handler(insert(201)))
	ask := func(body string) answer { return s.post(t, "k", body, "Content-Type", "application/json") }
	require.Equal(t, 201, ask(`{"amount":9007199254740993,"sent_at":1}`).status)
	require.True(t, ask(`{"sent_at":2, "amount":9007199254740993}`).replayed())
	requireProblem(t, ask(`{"amount":9007199254740992,"sent_at":1}`), 422, httpkey.ProblemKeyReused)
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

// Property: the default fingerprint of ordinary requests is the one that releases before this one stored: another one would answer
// each retry of a request that the other release executed with 422.
func TestFingerprintIsThatOfOlderReleases(t *testing.T) {
	t.Parallel()
	ask := fingerprints(t, httpkey.Config{})
	const media = "application/json"
	for _, c := range []struct{ method, target, media, body, want string }{
		{
			"POST", "/orders", media, `{"b": 2, "a": {"y": [1, {"d": null, "c": "x"}], "x": true}}`,
			"a5a2ae3e5f98627ca7e5d6e464d4aea57f5d8842e2ca2a335ffb42cca91d48f4",
		},
		{
			"POST", "/orders", media, `{"amount":9007199254740993,"rate":1.10,"note":"\u00e9\u20ac \/ \ud83d\ude00"}`,
			"7db7a63ed5a3cd36d86576e052934e0deb9b70d3c6b863d8dc6f663871cb9324",
		},
		{
			"POST", "/orders", "application/vnd.api+json; charset=utf-8", `[{"b":1,"a":2},{"b":1,"a":2}]`,
			"c914d4894e3850a8df8fe90dc799992fcef5c2f030d1e3d87cd73fb98ba3dcab",
		},
		{
			"POST", "/orders", media, `{"a":1,"a":2}`,
			"e5960603088a58f614d2e2a793df1fa09b3905150813469cef598a77a2bfab8c",
		},
		{
			"POST", "/orders", media, `{"a":1`,
			"a279bfd4cf5a7fbd4daf38c2a0aa42f1d9738fd29400415a95066b0567a52d8f",
		},
		{
			"POST", "/orders", media, "{\"a\":\"\xff\"}",
			"e6da0408ae6d058a40f7b6b209df487fbaa7126e4dafa66f409d1c394d4347a8",
		},
		{
			"POST", "/orders", media, strings.Repeat(`{"b":1,"a":`, 64) + "1" + strings.Repeat("}", 64),
			"9fa98458db6a0fc08470da162e244d75e561fcc1a2675a60f81f4dab60622a25",
		},
		{
			"POST", "/orders", media, ``,
			"b9a3d945d879717904b99a943e69af8981b13fb25a6156986c1cf866ab2ef6c0",
		},
		{
			"POST", "/orders", "text/plain", `{"b":1, "a":2}`,
			"962df9d8f2829b7db8e010592f7d56b4843112f04baf068cbecb0f5b7a716eb1",
		},
		{
			"POST", "/a%2Fb/%7Ec?b=2&a=1&b=%31&&c", "text/plain", "x",
			"3dab229d57175a545c542be0ce90d84c5cd8209f6bc5cb4e1b76c6be32751203",
		},
		{
			"PATCH", "/orders/7?x", "application/merge-patch+json", `{"Name":null,"other":"name"}`,
			"3723cd026295aba9c832f2ca3ecec2902315aa6ec879c56aec3753e8caaa6a03",
		},
		{
			"POST", "/orders", "multipart/form-data; boundary=x", "--x\r\n",
			"e7f92a2fa334f226bde6b4953e7a69e4dab6932d87324a5972c60117cafe0884",
		},
	} {
		require.Equal(t, c.want, ask(c.method, c.target, c.media, c.body), "%s %s %s %.100s", c.method, c.target, c.media, c.body)
	}
}

// Property: members that differ only in case are one to encoding/json, which takes the last: bodies
// of which it makes two amounts are two requests.
func TestMembersThatDifferInCase(t *testing.T) {
	t.Parallel()
	s := serve(t, newMiddleware(t, newPool(t), httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var order struct{ Amount int }
		if err := json.NewDecoder(r.Body).Decode(&order); err != nil {
			httpkey.Fail(r, err)
			return
		}
		_, _ = fmt.Fprint(w, order.Amount)
	})))
	a := s.post(t, "k", `{"amount":1,"Amount":2}`, "Content-Type", "application/json")
	require.Equal(t, "2", a.body)
	requireProblem(t, s.post(t, "k", `{"Amount":2,"amount":1}`, "Content-Type", "application/json"), 422, httpkey.ProblemKeyReused)
}

// Property: a body that is nested deeper than JSONDepthMax is refused before any SQL, one that is
// as deep is not; brackets in strings do not count, nor does what is no JSON.
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
		"arrays":             {0, "application/hal+json", nested(`[`, `]`, 65), true},
		"both":               {0, "application/json", nested(`[{"a":`, `}]`, 33), true},
		"as deep as allowed": {0, "application/json", nested(`{"a":`, `}`, 64), false},
		"side by side":       {2, "application/json", `[` + strings.Repeat(`{"a":1},`, 100) + `[]]`, false},
		"in a string":        {1, "application/json", `{"a[{\"[{":"[{\\\"[{"}`, false},
		"behind a string":    {1, "application/json", `{"a\\":[]}`, true},
		"less is allowed":    {1, "application/json", `[[]]`, true},
		"more is allowed":    {1000, "application/json", nested(`{"a":`, `}`, 1000), false},
		"no JSON":            {1, "text/plain", `[[]]`, false},
		"does not end":       {0, "application/json", strings.Repeat(`[`, 1<<19), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, fingerprint := range []func(*http.Request, []byte) ([]byte, error){nil, httpkey.Without("/b")} {
				cfg := httpkey.Config{JSONDepthMax: c.max, Fingerprint: fingerprint}
				a := serve(t, newMiddleware(t, pgtest.NoPool(t), cfg).Handler(insert(201))).post(t, "k", c.body, "Content-Type", c.media)
				if c.deep {
					requireProblem(t, a, 400, httpkey.ProblemTooDeep)
				} else {
					requireProblem(t, a, 503, httpkey.ProblemUnavailable) // it asked the database
				}
			}
		})
	}
}

// Property: a compressed body, which something inside of the middleware decompresses, is not taken
// for JSON that is nested too deep, whatever its bytes; nor is other content that cannot be JSON.
func TestCompressedBodyIsNotDeep(t *testing.T) {
	t.Parallel()
	s := serve(t, newMiddleware(t, pgtest.NoPool(t), httpkey.Config{RequestBytesMax: 4 << 20}).Handler(insert(201)))
	bodies := []string{"'" + strings.Repeat("[", 100), "\"\x1f" + `"` + strings.Repeat("[", 100)}
	for seed := range uint64(4) {
		random := rand.New(rand.NewPCG(seed, 0))
		var body bytes.Buffer
		compressed := gzip.NewWriter(&body)
		for body.Len() < 1<<20 {
			_, err := fmt.Fprintf(compressed, `{"a":[%d,"%x"]}`, random.Uint64(), random.Uint64())
			require.NoError(t, err)
		}
		require.NoError(t, compressed.Close())
		bodies = append(bodies, body.String())
	}
	for _, body := range bodies {
		a := s.post(t, "k", body, "Content-Type", "application/json", "Content-Encoding", "gzip")
		requireProblem(t, a, 503, httpkey.ProblemUnavailable) // it asked the database
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
