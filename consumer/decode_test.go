package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// parkAll parks failures whatever their share is.
func parkAll(c *consumer.Config) { c.ParkShareMax = 1 }

type payment struct {
	Order string `json:"order"`
	Cents int    `json:"cents"`
}

// decoded are the two shapes of handlers with a decoder, with the same effect.
func decoded(decoder consumer.Decoder[payment]) map[string]consumer.Handler {
	const insert = `INSERT INTO effects (message_id, value) VALUES ($1, $2)`
	return map[string]consumer.Handler{
		"each": consumer.Decoded(decoder, func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, body payment) error {
			_, err := tx.Exec(ctx, insert, [16]byte(msg.ID), body.Order)
			return err
		}),
		"queued": consumer.DecodedQueued(decoder, func(_ context.Context, q *consumer.Queue, msg *consumer.Message, body payment) error {
			q.Queue(insert, [16]byte(msg.ID), body.Order)
			return nil
		}),
	}
}

// Property: a message that its decoder refuses, or panics at, is parked at once as undecodable,
// with the reason; the other messages of its batch have their effects. Row C15 of guarantees.md.
func TestUndecodableMessagesAreParked(t *testing.T) {
	t.Parallel()
	picky := consumer.DecoderFunc[payment](func(msg *consumer.Message) (payment, error) {
		if strings.Contains(string(msg.Value), "panic") {
			panic("no idea")
		}
		return consumer.JSONDecoder[payment]().Decode(msg)
	})
	for name, handler := range decoded(picky) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produce(`{"order":"a"}`, `no JSON`, `{"order":"b"}`, `panic`, `{"order":"c"}`)
			h.produceRecord(&kgo.Record{}) // Kafka's null
			var permanent atomic.Int32
			stop := h.run(handler, func(c *consumer.Config) {
				parkAll(c)
				c.Hooks.Failed = func(f consumer.Failed) {
					if f.Permanent && consumer.IsPermanent(f.Err) {
						permanent.Add(1)
					}
				}
			})
			h.wait("position", func() bool { return h.position() == 6 })
			require.Equal(t, []string{"a", "b", "c"}, h.values())
			require.Equal(t, []string{"no JSON undecodable parked", "panic undecodable parked", " undecodable parked"}, h.parked())
			require.Equal(t, 3, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE attempts = 1`), "tried once")
			require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%panicked: no idea%'`))
			require.Equal(t, 2, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE 'value is no JSON of the expected form: %'`))
			require.EqualValues(t, 3, permanent.Load())
			require.NoError(t, stop())
		})
	}
}

// Property: a decoder that returns RetryAfter is called again, and the message is not parked.
func TestDecoderThatCannotTellIsAskedAgain(t *testing.T) {
	t.Parallel()
	for _, shape := range []string{"each", "queued"} {
		t.Run(shape, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int32
			handler := decoded(consumer.DecoderFunc[payment](func(msg *consumer.Message) (payment, error) {
				if asked.Add(1) <= 3 {
					return payment{}, consumer.RetryAfter(time.Millisecond, errors.New("registry is away"))
				}
				return consumer.JSONDecoder[payment]().Decode(msg)
			}))[shape]
			h := newHarness(t, 1)
			h.produce(`{"order":"a"}`)
			stop := h.run(handler, nil)
			h.waitEffects(1)
			require.EqualValues(t, 4, asked.Load())
			require.Empty(t, h.parked())
			require.NoError(t, stop())
		})
	}
}

// Property: only a decoder's error makes a message undecodable: an error of the handler after it is
// the handler's.
func TestHandlersErrorIsNotTheDecoders(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce(`{"order":"a"}`)
	stop := h.run(consumer.JSON(func(_ context.Context, _ pgx.Tx, _ *consumer.Message, body payment) error {
		return consumer.Permanent(json.Unmarshal([]byte("no JSON"), &body))
	}), parkAll)
	h.waitParked("permanent")
	require.NoError(t, stop())
}

// The rules of JSON are the documented ones.
func TestJSONIsAsStrictAsDocumented(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		value string
		want  *payment // nil: undecodable
	}{
		{`{"order":"a","cents":5}`, &payment{"a", 5}},
		{" {\"order\":\"a\"}\r\n\t", &payment{"a", 0}},
		{`{"order":"a","unknown":[1,{}]}`, &payment{"a", 0}},
		{`{"order":"a","order":"b"}`, &payment{"b", 0}},
		{`{"ORDER":"a"}`, &payment{"a", 0}},
		{"{\"order\":\"\xff\"}", &payment{"\ufffd", 0}},
		{`null`, &payment{}},
		{`{}`, &payment{}},
		{``, nil},
		{`{"order":"a"} x`, nil},
		{`{"order":"a"}{"order":"b"}`, nil},
		{`{"order":"a"`, nil},
		{`{"order":5}`, nil},
		{`{"cents":1.5}`, nil},
		{`{"cents":99999999999999999999}`, nil},
		{`[]`, nil},
		{strings.Repeat("[", 1_000_000), nil},
		{`{"order":"a",}`, nil},
		{"\ufeff{}", nil},
	} {
		body, err := consumer.JSONDecoder[payment]().Decode(&consumer.Message{Value: []byte(tc.value)})
		if tc.want == nil {
			require.Error(t, err, "%.40q", tc.value)
			continue
		}
		require.NoError(t, err, "%.40q", tc.value)
		assert.Equal(t, *tc.want, body, "%.40q", tc.value)
	}
}

// Property: no value makes the decoder panic or change the message; a value that decodes is one
// JSON text, and is the same after it was encoded and decoded again.
func FuzzJSONDecoder(f *testing.F) {
	type anything struct {
		Text   string         `json:"text"`
		Number int64          `json:"number"`
		List   []float64      `json:"list"`
		Map    map[string]any `json:"map"`
		Time   *time.Time     `json:"time"`
		Next   *anything      `json:"next"`
	}
	decoder := consumer.JSONDecoder[anything]()
	f.Add([]byte(`{"text":"a","number":-1,"list":[1e300],"map":{"":null},"time":"2026-11-21T00:00:00Z","next":{}}`))
	f.Fuzz(func(t *testing.T, value []byte) {
		before := bytes.Clone(value)
		body, err := decoder.Decode(&consumer.Message{Value: value})
		require.Equal(t, before, value)
		if !json.Valid(value) {
			require.Error(t, err)
		}
		if err != nil {
			return
		}
		again, err := json.Marshal(body)
		if err != nil {
			return // a year that JSON has no form for
		}
		same, err := decoder.Decode(&consumer.Message{Value: again})
		require.NoError(t, err)
		third, err := json.Marshal(same)
		require.NoError(t, err)
		require.JSONEq(t, string(again), string(third))
	})
}
