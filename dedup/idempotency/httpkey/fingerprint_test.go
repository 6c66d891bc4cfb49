package httpkey_test

import (
	"fmt"
	"net/http"
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

// Property: JSON that says the same is the same request, amounts that differ in any digit are not, and what is not proper
// JSON counts byte for byte. Row H6.
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

// Property: Without leaves out the members that are named, with all that is in them, and nothing else.
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
