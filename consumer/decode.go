package consumer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Decoder decodes messages into values of type T. It is called from several goroutines.
type Decoder[T any] interface {
	// Decode reads the message and does not change it. An error or a panic means that the message
	// can never be decoded as T: it is parked at once, as undecodable. An error marked by
	// RetryAfter means that it cannot be decoded now, for example because a schema registry is
	// unavailable: the message is retried.
	Decode(msg *Message) (T, error)
}

// DecoderFunc is a function as a Decoder.
type DecoderFunc[T any] func(msg *Message) (T, error)

// Decode calls the function.
func (f DecoderFunc[T]) Decode(msg *Message) (T, error) { return f(msg) }

// DecodedHandler is a function for Decode: what Each, Queued and Batch take, with the decoded value.
type DecodedHandler[T any] interface {
	func(ctx context.Context, tx pgx.Tx, msg *Message, body T) error |
		func(ctx context.Context, q *Queue, msg *Message, body T) error |
		func(ctx context.Context, tx pgx.Tx, msgs []Decoded[T]) error
}

// Decoded is a message of a batch with its decoded value.
type Decoded[T any] struct {
	*Message

	Body T
}

// Decode returns a handler like Each, Queued or Batch, by the type of the function, that also gets
// the decoded messages.
func Decode[T any, H DecodedHandler[T]](decoder Decoder[T], handle H) Handler {
	switch h := any(handle).(type) {
	case func(ctx context.Context, tx pgx.Tx, msg *Message, body T) error:
		return Each(func(ctx context.Context, tx pgx.Tx, msg *Message) error {
			body, err := decode(decoder, msg)
			if err != nil {
				return err
			}
			return h(ctx, tx, msg, body)
		})
	case func(ctx context.Context, q *Queue, msg *Message, body T) error:
		return Queued(func(ctx context.Context, q *Queue, msg *Message) error {
			body, err := decode(decoder, msg)
			if err != nil {
				return err
			}
			return h(ctx, q, msg, body)
		})
	case func(ctx context.Context, tx pgx.Tx, msgs []Decoded[T]) error:
		return Batch(func(ctx context.Context, tx pgx.Tx, msgs []*Message) error {
			list := make([]Decoded[T], len(msgs))
			for i, msg := range msgs {
				body, err := decode(decoder, msg)
				if err != nil {
					return Blame(msg, err)
				}
				list[i] = Decoded[T]{msg, body}
			}
			return h(ctx, tx, list)
		})
	}
	return nil // New refuses it: handle is nil
}

// JSON is short for Decode with a JSONDecoder.
func JSON[T any](handle func(ctx context.Context, tx pgx.Tx, msg *Message, body T) error) Handler {
	return Decode(JSONDecoder[T](), handle)
}

// JSONDecoder decodes values as encoding/json does. The value must be one JSON text, followed only
// by white space. A message without a value (Kafka's null, a tombstone) is nil if T is a pointer; for
// another T it is an error; see Config.OnTombstone. Fields that
// T does not have are ignored, missing fields stay zero, and a JSON null gives the zero T. Names
// match regardless of case; if a name occurs several times, the last one counts. Invalid UTF-8
// becomes U+FFFD. For other rules, such as rejecting unknown fields, write a DecoderFunc.
func JSONDecoder[T any]() Decoder[T] {
	return DecoderFunc[T](func(msg *Message) (T, error) {
		var body T
		if msg.Value == nil && reflect.TypeFor[T]().Kind() == reflect.Pointer {
			return body, nil
		}
		if err := json.Unmarshal(msg.Value, &body); err != nil {
			return body, fmt.Errorf("value is no JSON of the expected form: %w", withoutPayload(err))
		}
		return body, nil
	})
}

// withoutPayload removes the parts of the value that encoding/json quotes: errors go to logs and
// tables.
func withoutPayload(err error) error {
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) {
		what, _, _ := strings.Cut(kind.Value, " ") // "number 4711"
		return fmt.Errorf("%s at offset %d where %s wants %s", what, kind.Offset, cmp.Or(kind.Field, "the value"), kind.Type)
	}
	return err
}

// decode calls a decoder and marks its errors as permanent, unless RetryAfter marked them.
func decode[T any](decoder Decoder[T], msg *Message) (body T, err error) {
	err = guard(func() (err error) {
		body, err = decoder.Decode(msg)
		return err
	})
	var later *retryAfterError
	if err == nil || errors.As(err, &later) && !IsPermanent(err) {
		return body, err
	}
	if msg.Value == nil {
		err = errors.Join(errTombstone, err)
	}
	return body, &permanentError{reasonUndecodable, err}
}

// errTombstone marks a message without a value that its decoder rejected. See Config.OnTombstone.
var errTombstone = errors.New("message has no value (a tombstone)")
