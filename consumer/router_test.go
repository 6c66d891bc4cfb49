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

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// produceTyped sends messages of the form type:value to partition 0, with new IDs and without keys.
// Without a colon there is no type.
func (h *harness) produceTyped(messages ...string) {
	h.t.Helper()
	for _, message := range messages {
		record := &kgo.Record{Value: []byte(message), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(uuid.Must(uuid.NewV7()).String())}}}
		if name, _, ok := strings.Cut(message, ":"); ok {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: "ce_type", Value: []byte(name)})
		}
		h.produceRecords(record)
	}
}

// router routes the topic of the harness.
func (h *harness) router(routes consumer.TopicRoutes, typeHeaders ...string) *consumer.Router {
	h.t.Helper()
	router, err := consumer.Route(consumer.Routes{h.topic: routes}, typeHeaders...)
	require.NoError(h.t, err)
	require.Equal(h.t, []string{h.topic}, router.Topics())
	return router
}

// Property: the message that failed is the one that is parked, whatever the shape of its handler
// and wherever its run is among the others; all others have their effects in order. Row C17 of
// guarantees.md.
func TestRouterBlamesTheRightMessage(t *testing.T) {
	t.Parallel()
	isBad := func(msg *consumer.Message) bool { return strings.HasSuffix(string(msg.Value), "bad") }
	failing := shapes(func(msg *consumer.Message) error {
		if isBad(msg) {
			return consumer.Permanent(errBad)
		}
		return nil
	})
	failing["queued statement"] = consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		sql := `INSERT INTO effects (message_id, value) VALUES ($1, $2)`
		if isBad(msg) {
			sql = `INSERT INTO effects (message_id, value) VALUES ($1, (1 / length(left($2, 0)))::text)`
		}
		q.Queue(sql, [16]byte(msg.ID), string(msg.Value))
		return nil
	})
	var together atomic.Int64
	failing["named by batch"] = consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
		together.Store(max(together.Load(), int64(len(msgs))))
		for _, msg := range msgs {
			if isBad(msg) {
				return consumer.Blame(msg, consumer.Permanent(errBad))
			}
			if err := effect(ctx, tx, msg); err != nil {
				return err
			}
		}
		return nil
	})
	each(t, failing, func(t *testing.T, h *harness, name string, handler consumer.Handler) {
		t.Helper()
		nested := h.router(consumer.TopicRoutes{Default: handler})
		h.produceTyped("good:1", "good:2", "x:1", "x:2", "x:bad", "x:3", "good:3", "x:bad", "good:4", "nested:1", "nested:bad", "nested:2")
		stop := h.run(h.router(consumer.TopicRoutes{
			Types: map[string]consumer.Handler{"good": consumer.Each(effect), "x": handler, "nested": nested},
		}), func(c *consumer.Config) {
			parkAll(c)
			c.AttemptsMax = 1
		})
		h.waitHandled(12)
		require.Equal(t, []string{"good:1", "good:2", "x:1", "x:2", "x:3", "good:3", "good:4", "nested:1", "nested:2"}, h.values())
		why := "permanent"
		if name == "queued statement" {
			why = "failed" // nothing marks the error of a statement
		}
		require.Equal(t, []string{"x:bad " + why + " parked", "x:bad " + why + " parked", "nested:bad " + why + " parked"}, h.parked())
		require.NoError(t, stop())
		if name == "named by batch" {
			require.EqualValues(t, 4, together.Load(), "messages of one type that follow each other reach a Batch together")
		}
	})
}

// Property: a message without a route is parked with its reason before the handlers of its batch
// did anything; the others have their effects.
func TestUnknownTypesAreParked(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceTyped("good:1", "strange:1", "untyped", "good:2")
	h.produceRecords(&kgo.Record{Value: []byte("ambiguous"), Headers: []kgo.RecordHeader{{Key: "ce_type", Value: []byte("good")}, {Key: "ce_type", Value: []byte("bad")}}})
	h.produceRecords(&kgo.Record{Value: []byte("said twice"), Headers: []kgo.RecordHeader{{Key: "ce_type", Value: []byte("good")}, {Key: "ce_type"}, {Key: "ce_type", Value: []byte("good")}}})
	stop := h.run(h.router(consumer.TopicRoutes{Types: map[string]consumer.Handler{"good": consumer.Each(effect)}}), parkAll)
	h.waitHandled(6)
	require.Equal(t, []string{"good:1", "good:2", "said twice"}, h.values())
	require.Equal(t, []string{"strange:1 unknown_type parked", "untyped unknown_type parked", "ambiguous unknown_type parked"}, h.parked())
	for _, why := range []string{`type "strange" has no route in topic`, `message has no type in headers:ce_type,type`, `two different values of header "ce_type"`} {
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE attempts = 1 AND strpos(error, $1) > 0`, why), why)
	}
	require.NoError(t, stop())
}

// Property: the type is read from the first of the configured headers that is present and not
// empty; a message of another type, or of none, goes to Default.
func TestTypeIsReadFromTheConfiguredHeaders(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	say := func(what string) consumer.Handler {
		return consumer.Each(func(ctx context.Context, tx pgx.Tx, _ *consumer.Message) error {
			_, err := tx.Exec(ctx, `INSERT INTO effects (value) VALUES ($1)`, what)
			return err
		})
	}
	for _, with := range [][]kgo.RecordHeader{
		headers("event=a", "kind=b"),
		headers("kind=b", "event=a"),
		headers("event=", "kind=b"),
		headers("kind=b"),
		headers("ce_type=a"),
		headers("event=A"),
		nil,
	} {
		h.produceRecords(&kgo.Record{Headers: with})
	}
	stop := h.run(h.router(consumer.TopicRoutes{
		Types: map[string]consumer.Handler{"a": say("a"), "b": say("b")}, Default: say("other"),
	}, "event", "kind"), nil)
	h.waitHandled(7)
	require.Equal(t, []string{"a", "a", "b", "b", "other", "other", "other"}, h.values())
	require.NoError(t, stop())
}

// All problems of routes are reported at once.
func TestRouteReportsAllProblems(t *testing.T) {
	t.Parallel()
	router, err := consumer.Route(consumer.Routes{
		"no topic!": {Default: consumer.Each(effect)},
		"empty":     {},
		"orders":    {Types: map[string]consumer.Handler{"": consumer.Each(effect), "placed": nil}},
	}, "")
	require.Nil(t, router)
	for _, part := range []string{
		"typeHeaders: header \"\": want 1 to 255", `topic "no topic!": want 1 to 249`, `topic "empty": want Types or Default`,
		`topic "orders": a type is empty`, `topic "orders", type "placed": handler is nil`,
	} {
		require.ErrorContains(t, err, part)
	}
	_, err = consumer.Route(nil)
	require.EqualError(t, err, "routes are empty: want at least one topic")
	router, err = consumer.Route(consumer.Routes{"orders": {Default: consumer.Each(effect)}})
	require.NoError(t, err)
	_, err = consumer.New(nil, nil, router, consumer.Config{Group: "g", Topics: []string{"other"}})
	require.ErrorContains(t, err, `"other" has no routes`)
}

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
		"each": consumer.Decode(decoder, func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, body payment) error {
			_, err := tx.Exec(ctx, insert, [16]byte(msg.ID), body.Order)
			return err
		}),
		"queued": consumer.Decode(decoder, func(_ context.Context, q *consumer.Queue, msg *consumer.Message, body payment) error {
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
	each(t, decoded(picky), func(t *testing.T, h *harness, _ string, handler consumer.Handler) {
		t.Helper()
		h.produce(`{"order":"a"}`, `{broken`, `{"order":"b"}`, `panic`, `{"order":"c"}`)
		h.produceRecords(&kgo.Record{}) // Kafka's null
		var permanent atomic.Int32
		stop := h.run(handler, func(c *consumer.Config) {
			parkAll(c)
			c.Hooks.Failed = func(f consumer.Failed) {
				if f.Permanent && consumer.IsPermanent(f.Err) {
					permanent.Add(1)
				}
			}
		})
		h.waitHandled(6)
		require.Equal(t, []string{"a", "b", "c"}, h.values())
		require.Equal(t, []string{"{broken undecodable parked", "panic undecodable parked", " undecodable parked"}, h.parked())
		require.Equal(t, 3, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE attempts = 1`), "tried once")
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%panicked: no idea%'`))
		require.Equal(t, 2, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%value is no JSON of the expected form: %'`))
		require.EqualValues(t, 3, permanent.Load())
		require.NoError(t, stop())
		require.NotContains(t, h.log.String(), "{broken", "no payload in a log")
	})
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
