package consumer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Decoder makes a T of a message. It is called from several goroutines.
type Decoder[T any] interface {
	// Decode reads the message and changes nothing. An error or a panic means that the message is no T and
	// never will be: it is parked at once, as undecodable. An error marked by RetryAfter means that it
	// cannot be told now, because a schema registry is away, for example: the message is tried again.
	Decode(msg *Message) (T, error)
}

// DecoderFunc is a function as a Decoder.
type DecoderFunc[T any] func(msg *Message) (T, error)

// Decode calls the function.
func (f DecoderFunc[T]) Decode(msg *Message) (T, error) { return f(msg) }

// Decoded makes a handler like Each that gets the decoded message, too.
func Decoded[T any](decoder Decoder[T], handle func(ctx context.Context, tx pgx.Tx, msg *Message, body T) error) Handler {
	return Each(func(ctx context.Context, tx pgx.Tx, msg *Message) error {
		body, err := decode(decoder, msg)
		if err != nil {
			return err
		}
		return handle(ctx, tx, msg, body)
	})
}

// DecodedQueued makes a handler like Queued that gets the decoded message, too.
func DecodedQueued[T any](decoder Decoder[T], handle func(ctx context.Context, q *Queue, msg *Message, body T) error) Handler {
	return Queued(func(ctx context.Context, q *Queue, msg *Message) error {
		body, err := decode(decoder, msg)
		if err != nil {
			return err
		}
		return handle(ctx, q, msg, body)
	})
}

// JSON is short for Decoded with a JSONDecoder.
func JSON[T any](handle func(ctx context.Context, tx pgx.Tx, msg *Message, body T) error) Handler {
	return Decoded(JSONDecoder[T](), handle)
}

// JSONDecoder decodes values as encoding/json does. The value must be one JSON text and nothing behind it
// but white space; no value (Kafka's null, a tombstone) is undecodable. Fields that T does not have are
// ignored, fields that are not there stay zero, a JSON null gives the zero T. Names match whatever their
// case, and of a name that occurs several times the last one counts. Broken UTF-8 becomes U+FFFD. For other
// rules, such as no unknown fields, write a DecoderFunc.
func JSONDecoder[T any]() Decoder[T] {
	return DecoderFunc[T](func(msg *Message) (T, error) {
		var body T
		if err := json.Unmarshal(msg.Value, &body); err != nil {
			return body, fmt.Errorf("value is no JSON of the expected form: %w", withoutPayload(err))
		}
		return body, nil
	})
}

// withoutPayload takes out what encoding/json quotes of the value: errors go to logs and tables.
func withoutPayload(err error) error {
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) {
		what, _, _ := strings.Cut(kind.Value, " ") // "number 4711"
		return fmt.Errorf("%s at offset %d where %s wants %s", what, kind.Offset, cmp.Or(kind.Field, "the value"), kind.Type)
	}
	return err
}

// decode calls a decoder and says of its errors what becomes of the message.
func decode[T any](decoder Decoder[T], msg *Message) (body T, err error) {
	err = guard(func() (err error) {
		body, err = decoder.Decode(msg)
		return err
	})
	var later *retryAfterError
	if err == nil || errors.As(err, &later) && !IsPermanent(err) {
		return body, err
	}
	return body, &undecodableError{Permanent(err)}
}

// undecodableError marks a message that its decoder refused.
type undecodableError struct{ err error }

func (e *undecodableError) Error() string { return e.err.Error() }
func (e *undecodableError) Unwrap() error { return e.err }

func isUndecodable(err error) bool {
	var target *undecodableError
	return errors.As(err, &target)
}
