package protobuf_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/consumer/protobuf"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func encoded(t *testing.T, message proto.Message) *consumer.Message {
	t.Helper()
	value, err := proto.Marshal(message)
	require.NoError(t, err)
	return &consumer.Message{Value: value}
}

// lists nests n lists in each other; each is two messages.
func lists(n int) *structpb.Value {
	inner := structpb.NewNullValue()
	for range n {
		inner = structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{inner}})
	}
	return inner
}

// Property: what was encoded is decoded, each time into a message of its own.
func TestMessageIsDecoded(t *testing.T) {
	t.Parallel()
	decoder := protobuf.Decoder[structpb.Value]()
	sent := encoded(t, lists(45))
	first, err := decoder.Decode(sent)
	require.NoError(t, err)
	require.True(t, proto.Equal(lists(45), first))
	second, err := decoder.Decode(sent)
	require.NoError(t, err)
	require.NotSame(t, first, second)

	zero, err := decoder.Decode(&consumer.Message{Value: []byte{}})
	require.NoError(t, err)
	require.True(t, proto.Equal(&structpb.Value{}, zero), "an empty value is a message without fields")
}

// Property: what is no message of the type is an error that names the type, and never a panic or a
// message with a part of the fields.
func TestUndecodableValues(t *testing.T) {
	t.Parallel()
	text := protobuf.Decoder[wrapperspb.StringValue]()
	for name, value := range map[string][]byte{
		"truncated":            {0x0a, 5, 'a'},
		"broken UTF-8":         {0x0a, 1, 0xff},
		"JSON":                 []byte(`{"value":"a"}`),
		"field number 0":       {0x02, 0},
		"length of 2^63":       {0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f},
		"end of an open group": {0x0c},
	} {
		body, err := text.Decode(&consumer.Message{Value: value})
		require.ErrorContains(t, err, "value is no google.protobuf.StringValue: ", name)
		require.Nil(t, body, name)
	}
	_, err := text.Decode(&consumer.Message{})
	require.ErrorContains(t, err, "tombstone")

	_, err = protobuf.Decoder[structpb.Value]().Decode(encoded(t, lists(60)))
	require.ErrorContains(t, err, "recursion", "120 messages in each other")

	// name_part and is_extension are required.
	_, err = protobuf.Decoder[descriptorpb.UninterpretedOption_NamePart]().Decode(&consumer.Message{Value: []byte{}})
	require.ErrorContains(t, err, "required field")
}

// Property: no value makes the decoder panic or change the message; what decodes is the same after
// it was encoded and decoded again.
func FuzzDecoder(f *testing.F) {
	decoder := protobuf.Decoder[structpb.Struct]()
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, value []byte) {
		before := bytes.Clone(value)
		body, err := decoder.Decode(&consumer.Message{Value: value})
		require.Equal(t, before, value)
		if err != nil {
			require.True(t, value == nil || strings.HasPrefix(err.Error(), "value is no google.protobuf.Struct: "), "%v", err)
			return
		}
		again, err := proto.MarshalOptions{Deterministic: true}.Marshal(body)
		require.NoError(t, err)
		same, err := decoder.Decode(&consumer.Message{Value: append([]byte{}, again...)})
		require.NoError(t, err)
		third, err := proto.MarshalOptions{Deterministic: true}.Marshal(same)
		require.NoError(t, err)
		require.Equal(t, again, third) // NaN is not equal to itself, its bytes are
	})
}
