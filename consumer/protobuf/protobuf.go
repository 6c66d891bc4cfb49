// Package protobuf decodes Kafka messages whose values are protocol buffers.
//
//	handler := consumer.Decoded(protobuf.Decoder[orderpb.Order](),
//		func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, order *orderpb.Order) error {
//			_, err := tx.Exec(ctx, `INSERT INTO invoice (order_id, cents) VALUES ($1, $2)`, order.GetId(), order.GetCents())
//			return err
//		})
//
// A value is the bare message, without the header that schema registries put before it: where there is one,
// write a consumer.DecoderFunc that takes it off.
//
// The encoding says little about itself: bytes of another type often decode, with fields missing or wrong.
// Tell types apart by topic or header (see consumer.Route), and check the fields that an effect needs.
package protobuf

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/effectonce/effectonce/consumer"
)

// RecursionMax is how deeply messages may be nested in each other: what the implementations for C++ and Java
// take. (The one for Go would take 10,000.) The size is bounded by consumer.Config.MessageBytesMax.
const RecursionMax = 100

// Pointer is the pointer to a generated type T, which is the message.
type Pointer[T any] interface {
	*T
	proto.Message
}

// Decoder decodes values as messages of the generated type T. No value (Kafka's null, a tombstone) is
// undecodable, for it would be a message whose fields are all zero; an empty value is such a message. Fields
// that T does not know are kept, as the library does; required fields (proto2) must be there.
func Decoder[T any, M Pointer[T]]() consumer.Decoder[M] {
	options := proto.UnmarshalOptions{RecursionLimit: RecursionMax}
	return consumer.DecoderFunc[M](func(msg *consumer.Message) (M, error) {
		if msg.Value == nil {
			return nil, errNull
		}
		body := M(new(T))
		if err := options.Unmarshal(msg.Value, body); err != nil {
			return nil, fmt.Errorf("value is no %s: %w", body.ProtoReflect().Descriptor().FullName(), err)
		}
		return body, nil
	})
}

var errNull = errors.New("message has no value (Kafka's null): it is a tombstone")
