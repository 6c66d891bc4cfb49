package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hamba/avro/v2"
	"github.com/twmb/franz-go/pkg/sr"

	"github.com/effectonce/effectonce/consumer"
)

// decoder decodes values with the header of schema registries: a zero byte, the ID of the schema that the
// writer used, and the Avro bytes. Schemas are fetched once and kept: an ID never changes its meaning.
type decoder[T any] struct {
	registry *sr.Client
	reader   avro.Schema // what T looks like
	known    *sr.Serde
}

func newDecoder[T any](registry *sr.Client, readerSchema string) (*decoder[T], error) {
	reader, err := parse(readerSchema)
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

// fetchTimeout bounds a question to the registry. Keep it below consumer.Config.HandlerTimeout.
const fetchTimeout = 5 * time.Second

// learn asks the registry for a schema. Only one answer is about the message: that there is no such schema.
// Whatever else goes wrong may pass, and must not park a single message.
func (d *decoder[T]) learn(id int) error {
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	schema, err := d.registry.SchemaByID(ctx, id)
	var answer *sr.ResponseError
	if errors.As(err, &answer) && errors.Is(answer.SchemaError(), sr.ErrSchemaNotFound) {
		return fmt.Errorf("the registry knows no schema %d", id)
	}
	if err != nil {
		return consumer.RetryAfter(100*time.Millisecond, fmt.Errorf("ask the registry for schema %d: %w", id, err))
	}
	writer, err := parse(schema.Schema)
	if err != nil {
		return fmt.Errorf("schema %d: %w", id, err)
	}
	resolved, err := avro.NewSchemaCompatibility().Resolve(d.reader, writer)
	if err != nil {
		return fmt.Errorf("schema %d cannot be read as %s: %w", id, d.reader.(avro.NamedSchema).FullName(), err)
	}
	var body T
	d.known.Register(id, body, sr.DecodeFn(func(value []byte, v any) error { return unmarshal(resolved, value, v) }))
	return nil
}

// unmarshal reads exactly one value. avro.Unmarshal would take what ends in the middle of a number for whole,
// with zero for the number, and would not see bytes behind the value.
func unmarshal(schema avro.Schema, value []byte, v any) error {
	r := avro.NewReader(nil, 0).Reset(value)
	if r.ReadVal(schema, v); r.Error != nil {
		return r.Error
	}
	if r.Peek(); !errors.Is(r.Error, io.EOF) {
		return errors.New("there are bytes behind the value")
	}
	return nil
}

// parse keeps schemas apart: a name that one does not define must not be found in another.
func parse(schema string) (avro.Schema, error) {
	parsed, err := avro.ParseWithCache(schema, "", &avro.SchemaCache{})
	if err != nil {
		return nil, err
	}
	if _, ok := parsed.(avro.NamedSchema); !ok {
		return nil, fmt.Errorf("schema of type %s: want a record", parsed.Type())
	}
	return parsed, nil
}
