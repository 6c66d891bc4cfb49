package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/avro"
	"github.com/twmb/franz-go/pkg/sr"

	"github.com/effectonce/effectonce/consumer"
)

// decoder decodes values with the header of schema registries: a zero byte, the ID of the writer's
// schema, and the Avro bytes. Schemas are fetched once and kept: an ID never changes its meaning.
type decoder[T any] struct {
	registry *sr.Client
	reader   *avro.Schema // the schema of T
	known    *sr.Serde
}

func newDecoder[T any](registry *sr.Client, readerSchema string) (*decoder[T], error) {
	reader, err := avro.Parse(readerSchema)
	if err != nil {
		return nil, err
	}
	return &decoder[T]{registry, reader, sr.NewSerde()}, nil
}

// Decode implements consumer.Decoder.
func (d *decoder[T]) Decode(msg *consumer.Message) (body T, err error) {
	if err = d.known.Decode(msg.Value, &body); !errors.Is(err, sr.ErrNotRegistered) {
		return body, err
	}
	id, _, err := d.known.DecodeID(msg.Value)
	if err != nil {
		return body, err
	}
	if err = d.learn(id); err != nil {
		return body, err
	}
	return body, d.known.Decode(msg.Value, &body)
}

// fetchTimeout bounds a request to the registry. Keep it below consumer.Config.HandlerTimeout.
const fetchTimeout = 5 * time.Second

// learn fetches a schema from the registry. Only one response is about the message: that there is
// no such schema. Any other error may be temporary, and must not park a message.
func (d *decoder[T]) learn(id int) error {
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	schema, err := d.registry.SchemaByID(ctx, id)
	var answer *sr.ResponseError
	if errors.As(err, &answer) && errors.Is(answer.SchemaError(), sr.ErrSchemaNotFound) {
		return fmt.Errorf("the registry has no schema %d", id)
	}
	if err != nil {
		return consumer.RetryAfter(100*time.Millisecond, fmt.Errorf("read schema %d from the registry: %w", id, err))
	}
	// A name that this schema does not define must not be resolved from another one: hence no
	// avro.SchemaCache.
	writer, err := avro.Parse(schema.Schema)
	if err != nil {
		return fmt.Errorf("schema %d: %w", id, err)
	}
	var body T
	resolved, err := avro.Resolve(writer, d.reader)
	if err != nil {
		return fmt.Errorf("schema %d cannot be read as %T: %w", id, body, err)
	}
	d.known.Register(id, body, sr.DecodeFn(func(value []byte, v any) error { return unmarshal(resolved, value, v) }))
	return nil
}

// unmarshal reads exactly one value. Decode alone returns bytes after the value to its caller.
func unmarshal(schema *avro.Schema, value []byte, v any) error {
	rest, err := schema.Decode(value, v)
	if err != nil {
		return err
	}
	if len(rest) > 0 {
		return errors.New("extra bytes after the value")
	}
	return nil
}
