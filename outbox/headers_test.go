package outbox_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// byName groups values by name, in order: what the stored form keeps.
func byName(headers []outbox.Header) map[string][][]byte {
	values := map[string][][]byte{}
	for _, h := range headers {
		values[h.Name] = append(values[h.Name], h.Value)
	}
	return values
}

// O36: headers are read from the database byte for byte: null is not empty, binary values are kept,
// and the order and the number of several headers of one name stay.
func TestHeadersComeBackFromTheDatabase(t *testing.T) {
	t.Parallel()
	sets := [][]outbox.Header{
		nil,
		{},
		{{Name: "null"}, {Name: "empty", Value: []byte{}}},
		{{Name: "text", Value: []byte("ü☃😀\n\"\\<>&\u2028")}},
		{{Name: "looks like the binary form", Value: []byte(`{"base64": "AA=="}`)}},
		{{Name: "binary", Value: []byte{0, 0xff}}, {Name: "broken UTF-8", Value: []byte("a\xffb")}, {Name: "NUL", Value: []byte("a\x00b")}},
		{{Name: "a", Value: []byte("2")}, {Name: "b", Value: []byte("x")}, {Name: "a", Value: []byte("1")}, {Name: "a"}, {Name: "a", Value: []byte{0}}, {Name: "a", Value: []byte("1")}},
		{{Name: "two nulls"}, {Name: "two nulls"}},
		{{Name: "ü \"'\\", Value: []byte("x")}, {Name: strings.Repeat("n", 1000), Value: bytes.Repeat([]byte("v"), 100_000)}},
	}
	random := rand.New(rand.NewPCG(3, 4))
	for range 1000 {
		sets = append(sets, randomHeaders(random))
	}
	msgs := make([]outbox.Message, len(sets))
	for i, headers := range sets {
		msgs[i] = outbox.Message{Topic: "orders", Headers: headers}
	}

	pool := pgtest.Pool(t)
	publishAlone(t, pool, msgs...)
	stored := rows(t, pool)
	require.Len(t, stored, len(sets))
	for i, r := range stored {
		decoded, err := outbox.DecodeHeaders([]byte(r.Headers))
		require.NoError(t, err, r.Headers)
		require.Len(t, decoded, len(sets[i]))
		require.Equal(t, byName(sets[i]), byName(decoded), r.Headers)
	}
}

func randomHeaders(random *rand.Rand) []outbox.Header {
	headers := make([]outbox.Header, random.IntN(6))
	for i := range headers {
		headers[i].Name = []string{"a", "b", "base64", "ü", " "}[random.IntN(5)]
		switch random.IntN(4) {
		case 0: // null
		case 1:
			headers[i].Value = []byte(strings.Repeat("ü\"\\", random.IntN(3)))
		default:
			headers[i].Value = make([]byte, random.IntN(5))
			for j := range headers[i].Value {
				headers[i].Value[j] = byte(random.Uint32())
			}
		}
	}
	return headers
}

// Headers are decoded in the order of the text, so that a record does not depend on the order of a
// map.
func TestDecodingKeepsTheOrderOfTheText(t *testing.T) {
	t.Parallel()
	decoded, err := outbox.DecodeHeaders([]byte(`{"z": "1", "a": ["2", null], "m": {"base64": "AP8="}}`))
	require.NoError(t, err)
	assert.Equal(t, []outbox.Header{
		{Name: "z", Value: []byte("1")}, {Name: "a", Value: []byte("2")}, {Name: "a"}, {Name: "m", Value: []byte{0, 0xff}},
	}, decoded)
}

// What another program may write by plain SQL is understood: numbers and booleans are their text.
func TestForeignHeadersAreUnderstood(t *testing.T) {
	t.Parallel()
	for stored, want := range map[string][]outbox.Header{
		`{}`:                            nil,
		` { } `:                         nil,
		`{"n": 1}`:                      {{Name: "n", Value: []byte("1")}},
		`{"n": -1.50e3}`:                {{Name: "n", Value: []byte("-1.50e3")}},
		`{"n": 12345678901234567890.1}`: {{Name: "n", Value: []byte("12345678901234567890.1")}},
		`{"n": 1e999}`:                  {{Name: "n", Value: []byte("1e999")}},
		`{"t": true, "f": false}`:       {{Name: "t", Value: []byte("true")}, {Name: "f", Value: []byte("false")}},
		`{"z": null}`:                   {{Name: "z"}},
		`{"e": ""}`:                     {{Name: "e", Value: []byte{}}},
		`{"l": [1, "2", true, null]}`:   {{Name: "l", Value: []byte("1")}, {Name: "l", Value: []byte("2")}, {Name: "l", Value: []byte("true")}, {Name: "l"}},
		`{"none": []}`:                  nil,
		`{"b": {"base64": ""}}`:         {{Name: "b", Value: []byte{}}},
		`{"": "no name"}`:               {{Name: "", Value: []byte("no name")}},
	} {
		decoded, err := outbox.DecodeHeaders([]byte(stored))
		require.NoError(t, err, stored)
		assert.Equal(t, want, decoded, stored)
	}
}

// A value in no documented form is an error that names the header, and shows neither its value nor
// an unbounded name.
func TestGarbageInHeadersIsNamed(t *testing.T) {
	t.Parallel()
	const want = `want a string, number, boolean, null, {"base64": "…"} or an array of these`
	for stored, message := range map[string]string{
		`{"a": {}}`:                            `header "a": ` + want,
		`{"ok": "x", "b": {"c": "d"}}`:         `header "b": ` + want,
		`{"c": [["nested"]]}`:                  `header "c": ` + want,
		`{"d": [{"base64": 1}]}`:               `header "d": ` + want,
		`{"e": {"base64": "AA==", "x": 1}}`:    `header "e": ` + want,
		`{"f": {"base64": "secret!"}}`:         `header "f": bad base64`,
		`{"g": {"Base64": "AA=="}}`:            `header "g": ` + want,
		`[]`:                                   "headers are not a JSON object",
		`null`:                                 "headers are not a JSON object",
		`"text"`:                               "headers are not a JSON object",
		`1`:                                    "headers are not a JSON object",
		``:                                     "headers are not JSON",
		`{`:                                    "headers are not JSON",
		`{"a"`:                                 "is not JSON",
		`{"a": }`:                              "not JSON",
		`{"a": 1,}`:                            "headers are not JSON",
		`{} {}`:                                "text follows it",
		`{"a": "x"} secret`:                    "text follows it",
		`{"a": ` + strings.Repeat("[", 20_000): `header "a" is not JSON`,
		`{"` + strings.Repeat("n", 100_000) + `": {}}`: "nnn",
	} {
		_, err := outbox.DecodeHeaders([]byte(stored))
		require.ErrorContains(t, err, message, "%.100s", stored)
		assert.NotContains(t, err.Error(), "secret")
		assert.Less(t, len(err.Error()), 500)
	}
}

// O36: encoded headers are JSON that jsonb accepts, and decode to the same headers.
func FuzzHeadersRoundTrip(f *testing.F) {
	f.Add("a", []byte("1"), "a", []byte(nil), "b", []byte{0})
	f.Add("base64", []byte("{}"), "ü", []byte("\xff"), "base64", []byte{})
	f.Add("", []byte(`{"base64": "AA=="}`), "\u2028", []byte("\u2028"), "<", []byte("</script>"))
	f.Fuzz(func(t *testing.T, name1 string, value1 []byte, name2 string, value2 []byte, name3 string, value3 []byte) {
		headers := []outbox.Header{{Name: name1, Value: value1}, {Name: name2, Value: value2}, {Name: name3, Value: value3}}
		for _, h := range headers {
			if !utf8.ValidString(h.Name) {
				t.Skip("Publish refuses such a name")
			}
		}
		encoded, err := outbox.EncodeHeaders(headers)
		require.NoError(t, err)
		require.True(t, json.Valid(encoded), "%s", encoded)
		if !strings.Contains(name1+name2+name3, "\x00") {
			require.NotContains(t, string(encoded), `\u0000`, "jsonb has no NUL")
		}
		decoded, err := outbox.DecodeHeaders(encoded)
		require.NoError(t, err, "%s", encoded)
		require.Equal(t, byName(headers), byName(decoded), "%s", encoded)
	})
}

// The decoder reads what any program may have stored: it never panics, refuses what is not a JSON
// object, and what it accepts once it accepts again after re-encoding.
func FuzzDecodeHeaders(f *testing.F) {
	for _, stored := range []string{
		`{}`, `{"a": "b"}`, `{"a": [1, true, null, {"base64": "AP8="}]}`, `{"a": {"base64": "!"}}`, `[]`, `{"a": {}}`,
		`{} {}`, `{"a": 1, "a": 2}`, "{\"a\": \"\\ud83d\"}", "\xff", `{"a":`, `{"a"}`, `{1: 2}`,
	} {
		f.Add([]byte(stored))
	}
	f.Fuzz(func(t *testing.T, stored []byte) {
		headers, err := outbox.DecodeHeaders(stored)
		var object map[string]json.RawMessage
		isObject := json.Unmarshal(stored, &object) == nil && object != nil
		if err != nil {
			require.Nil(t, headers)
			return
		}
		require.True(t, isObject, "taken, but no JSON object: %q", stored)
		require.Subset(t, slices.Collect(maps.Keys(object)), slices.Collect(maps.Keys(byName(headers))))
		encoded, err := outbox.EncodeHeaders(headers)
		require.NoError(t, err)
		again, err := outbox.DecodeHeaders(encoded)
		require.NoError(t, err)
		require.Equal(t, byName(headers), byName(again))
	})
}
