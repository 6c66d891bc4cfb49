package outbox_test

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sort"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// A message that Kafka would refuse is refused, and the text names the message and its problem.
// Nothing of the call is inserted, not even its valid messages, and the transaction stays usable.
func TestInvalidMessagesAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	header := func(name string) outbox.Message {
		return outbox.Message{Topic: "orders", Headers: []outbox.Header{{Name: name, Value: []byte("secret")}}}
	}
	const topic = "Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens"
	for _, tc := range []struct {
		name    string
		message outbox.Message
		want    string
	}{
		{"no topic", outbox.Message{}, `topic "": ` + topic},
		{"topic of 250 letters", outbox.Message{Topic: strings.Repeat("a", 250)}, topic},
		{"topic is a dot", outbox.Message{Topic: "."}, `topic ".": ` + topic},
		{"topic is two dots", outbox.Message{Topic: ".."}, `topic "..": ` + topic},
		{"topic with a space", outbox.Message{Topic: "or ders"}, topic},
		{"topic with a slash", outbox.Message{Topic: "or/ders"}, topic},
		{"topic beyond ASCII", outbox.Message{Topic: "aufträge"}, topic},
		{"topic with NUL", outbox.Message{Topic: "orders\x00"}, topic},
		{"topic with a newline", outbox.Message{Topic: "orders\n"}, topic},
		{"topic is no UTF-8", outbox.Message{Topic: "\xff"}, topic},
		{"header without a name", header(""), "header without a name"},
		{"header of the relay: ID", header("message-id"), `header "message-id" is written by the relay: set Message.ID instead`},
		{"header of the relay: time", header("occurred-at"), `header "occurred-at" is written by the relay`},
		{"header of the relay: partition", header("effectonce-partition"), `header "effectonce-partition" is written by Publish: set Message.Partition instead`},
		{"negative partition", outbox.Message{Topic: "orders", Partition: new(int32(-1))}, "Partition -1: want 0 or more, or nil"},
		{"header name with NUL", header("a\x00b"), `header name "a\x00b": want UTF-8 without NUL`},
		{"header name is no UTF-8", header("\xff"), `header name "\xff": want UTF-8 without NUL`},
		{"too large", outbox.Message{Topic: "orders", Payload: []byte(strings.Repeat("secret", 200_000))}, "RecordBytesMax is 1000000: store the body elsewhere"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tx := begin(t, pool)
			err := outbox.Publish(t.Context(), tx, outbox.Message{Topic: "valid"}, tc.message)
			require.ErrorIs(t, err, outbox.ErrInvalid)
			require.ErrorContains(t, err, "message 1: ")
			require.ErrorContains(t, err, tc.want)
			assert.NotContains(t, err.Error(), "secret", "errors go to logs: no header value and no payload in them")
			assert.Less(t, len(err.Error()), 1000)

			require.ErrorIs(t, outbox.NewBuffer().Add(t.Context(), tc.message), outbox.ErrInvalid)
			assert.Empty(t, rows(t, tx))
			require.NoError(t, outbox.Publish(t.Context(), tx, outbox.Message{Topic: "valid"}), "the transaction stays usable")
			require.NoError(t, tx.Rollback(t.Context()))
		})
	}
}

// What Kafka accepts is accepted: names at their bounds, and headers that only look like the
// relay's.
func TestValidMessagesAtTheirBounds(t *testing.T) {
	t.Parallel()
	msgs := []outbox.Message{
		{Topic: "a"},
		{Topic: strings.Repeat("a", 249)},
		{Topic: "..."},
		{Topic: "AZaz09._-"},
		{Topic: "orders", Headers: []outbox.Header{{Name: "Message-ID"}, {Name: "ü☃"}, {Name: " "}, {Name: strings.Repeat("n", 1000)}}},
	}
	pool := pgtest.Pool(t)
	publishAlone(t, pool, msgs...)
	assert.Len(t, rows(t, pool), len(msgs), "the database's own check takes them too")
}

// All problems of all messages are reported at once.
func TestAllProblemsComeAtOnce(t *testing.T) {
	t.Parallel()
	o := newOutbox(t, outbox.Config{RecordBytesMax: 1024})
	err := o.Publish(t.Context(), nil,
		outbox.Message{Topic: "no topic", Payload: make([]byte, 2000), Headers: []outbox.Header{{Name: ""}, {Name: "message-id"}, {Name: "\x00"}}},
		outbox.Message{Topic: "orders"},
		outbox.Message{Topic: "neither?"})
	require.ErrorIs(t, err, outbox.ErrInvalid)
	for _, want := range []string{
		`message 0: topic "no topic"`, "message 0: key, payload and headers take", "message 0: header without a name",
		`message 0: header "message-id"`, `message 0: header name "\x00"`, `message 2: topic "neither?"`,
	} {
		require.ErrorContains(t, err, want)
	}
	assert.NotContains(t, err.Error(), "message 1")
}

// O11: a record of exactly RecordBytesMax is accepted and one byte more is refused, wherever the
// byte is.
func TestRecordBytesMaxIsExact(t *testing.T) {
	t.Parallel()
	const relayAdds = 192
	for _, limit := range []int{1024, 1_000_000} {
		o := newOutbox(t, outbox.Config{RecordBytesMax: limit})
		for _, tc := range []struct {
			name  string
			sized func(n int) outbox.Message
		}{
			{"payload", func(n int) outbox.Message { return outbox.Message{Topic: "orders", Payload: make([]byte, n)} }},
			{"key", func(n int) outbox.Message { return outbox.Message{Topic: "orders", Key: make([]byte, n)} }},
			{"both", func(n int) outbox.Message {
				return outbox.Message{Topic: "orders", Key: make([]byte, n/3), Payload: make([]byte, n-n/3)}
			}},
		} {
			require.NoError(t, o.Buffer().Add(t.Context(), tc.sized(limit-relayAdds)), "%s, %d", tc.name, limit)
			err := o.Buffer().Add(t.Context(), tc.sized(limit-relayAdds+1))
			require.ErrorIs(t, err, outbox.ErrInvalid, "%s, %d", tc.name, limit)
		}
	}

	o := newOutbox(t, outbox.Config{RecordBytesMax: 1024})
	for _, h := range []outbox.Header{{Name: "h", Value: make([]byte, 1024)}, {Name: strings.Repeat("n", 1024)}} {
		err := o.Buffer().Add(t.Context(), outbox.Message{Topic: "orders", Headers: []outbox.Header{h}})
		require.ErrorIs(t, err, outbox.ErrInvalid, "headers count")
	}
	injecting := newOutbox(t, outbox.Config{RecordBytesMax: 1024, Inject: func(_ context.Context, h map[string]string) {
		h["baggage"] = strings.Repeat("b", 1024)
	}})
	err := injecting.Buffer().Add(t.Context(), outbox.Message{Topic: "orders"})
	require.ErrorIs(t, err, outbox.ErrInvalid, "injected headers count")
}

// O11: the largest accepted message fits into a topic whose max.message.bytes is RecordBytesMax, as
// a batch of one record with the headers of the relay, whatever its shape.
func TestWhatIsTakenFitsIntoTheTopic(t *testing.T) {
	t.Parallel()
	zeros := make([]byte, 10_000_000)
	for _, limit := range []int{1024, 1_000_000, 1 << 20, 10_000_000} {
		o := newOutbox(t, outbox.Config{RecordBytesMax: limit})
		for _, keyShare := range []int{0, 50, 100} { // percent of the bytes
			for _, headers := range []int{0, 1, 40} {
				message := func(size int) outbox.Message {
					m := outbox.Message{Topic: "orders", Key: zeros[:size*keyShare/100], Payload: zeros[:size-size*keyShare/100]}
					for range headers {
						m.Headers = append(m.Headers, outbox.Header{Name: "h", Value: []byte("v")})
					}
					return m
				}
				tooLarge := sort.Search(limit, func(bytes int) bool {
					return o.Buffer().Add(t.Context(), message(bytes)) != nil
				})
				require.Positive(t, tooLarge)
				largest := message(tooLarge - 1)
				assert.LessOrEqual(t, batchBytes(&largest), limit, "limit %d, %d bytes of key, %d headers", limit, len(largest.Key), headers)
			}
		}
	}
}

// batchBytes is what the broker compares with max.message.bytes for a batch of this one message.
func batchBytes(m *outbox.Message) int {
	record := kmsg.Record{Key: m.Key, Value: m.Payload, Headers: []kmsg.Header{
		{Key: outbox.HeaderMessageID, Value: make([]byte, len("0191d3a7-5c1e-7abc-9def-0123456789ab"))},
		{Key: outbox.HeaderOccurredAt, Value: make([]byte, len("2026-11-21T12:00:00.000000Z"))},
	}}
	for _, h := range m.Headers {
		record.Headers = append(record.Headers, kmsg.Header{Key: h.Name, Value: h.Value})
	}
	// The length in front of a record counts what follows it.
	record.Length = int32(len(record.AppendTo(nil))) - 1
	return len((&kmsg.RecordBatch{Records: record.AppendTo(nil)}).AppendTo(nil))
}

// A transaction that collects its messages itself gets them checked and with the injected headers,
// and nothing is sent: from Publish and from a buffer.
func TestCollectorGetsTheMessages(t *testing.T) {
	t.Parallel()
	o := newOutbox(t, outbox.Config{Inject: func(_ context.Context, h map[string]string) { h["traceparent"] = "x" }})
	tx := &collectingTx{}
	message := outbox.Message{Topic: "orders", Key: []byte("k")}

	require.NoError(t, o.Publish(t.Context(), tx, message))
	require.NoError(t, o.Publish(t.Context(), tx))
	require.ErrorIs(t, o.Publish(t.Context(), tx, outbox.Message{Topic: "?"}), outbox.ErrInvalid)
	buffer := o.Buffer()
	require.NoError(t, buffer.Add(t.Context(), message))
	require.NoError(t, buffer.Flush(t.Context(), tx))
	assert.Zero(t, buffer.Len())

	want := message
	want.Headers = []outbox.Header{{Name: "traceparent", Value: []byte("x")}}
	assert.Equal(t, []outbox.Message{want, want}, tx.collected)
	assert.Equal(t, []*outbox.Outbox{o, o}, tx.from)

	tx.err = pgx.ErrTxClosed
	require.ErrorIs(t, o.Publish(t.Context(), tx, message), pgx.ErrTxClosed)
	require.NoError(t, buffer.Add(t.Context(), message))
	require.ErrorIs(t, buffer.Flush(t.Context(), tx), pgx.ErrTxClosed)
	assert.Equal(t, 1, buffer.Len())
}

// collectingTx is a transaction as package consumer has it. It panics if a statement is sent.
type collectingTx struct {
	pgx.Tx

	collected []outbox.Message
	from      []*outbox.Outbox
	err       error
}

func (c *collectingTx) CollectOutbox(o *outbox.Outbox, msgs []outbox.Message) error {
	if c.err != nil {
		return c.err
	}
	c.collected = append(c.collected, msgs...)
	c.from = append(c.from, o)
	return nil
}

// byName groups values by name, in order: what the stored form keeps.
func byName(headers []outbox.Header) map[string][][]byte {
	values := map[string][][]byte{}
	for _, h := range headers {
		values[h.Name] = append(values[h.Name], h.Value)
	}
	return values
}

// What another program may write by plain SQL is understood: numbers and booleans are their text. Headers
// are decoded in the order of the text, so that a record does not depend on the order of a map.
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
		`{"z": "1", "a": ["2", null], "m": {"base64": "AP8="}}`: {
			{Name: "z", Value: []byte("1")}, {Name: "a", Value: []byte("2")}, {Name: "a"}, {Name: "m", Value: []byte{0, 0xff}},
		},
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
