// Package protobuf decodes Kafka messages whose values are protocol buffers.
//
//	handler := consumer.Decode(protobuf.Decoder[orderpb.Order](),
//		func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, order *orderpb.Order) error {
//			_, err := tx.Exec(ctx, `INSERT INTO invoice (order_id, cents) VALUES ($1, $2)`, order.GetId(), order.GetCents())
//			return err
//		})
//
// A value is the bare message, without the header that schema registries put before it. If there is
// one, write a consumer.DecoderFunc that removes it.
//
// The encoding does not identify the type: bytes of another type often decode, with fields missing
// or wrong. Distinguish types by topic or header (see consumer.Route), and check the fields that an
// effect needs.
package protobuf

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/effectonce/effectonce/consumer"
)

// RecursionMax is how deeply messages may be nested. It is the limit of the C++ and Java
// implementations. (The Go implementation would accept 10,000.) consumer.Config.MessageBytesMax
// bounds the size.
const RecursionMax = 100

// Pointer is the pointer to a generated type T; the pointer implements proto.Message.
type Pointer[T any] interface {
	*T
	proto.Message
}

// Decoder decodes values as messages of the generated type T. A message without a value (Kafka's
// null, a tombstone) is undecodable: it would decode as a message whose fields are all zero. An
// empty value decodes as such a message. Unknown fields are kept, as the library does; required
// fields (proto2) must be present.
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
