package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/sr"
	"github.com/twmb/franz-go/pkg/sr/srfake"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Property: the example needs only Go. Orders of both versions have their effects although the
// registry was unavailable at first. Only the message that is not Avro and the one with an unknown
// schema are parked.
func TestAvro(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, os.Getenv("DATABASE_URL")))
	require.Contains(t, out.String(), "2 invoices in EUR and CHF, 2 undecodable messages parked, the registry was unavailable 3 times")
}

func newRegistry(tb testing.TB, schemas ...string) (*srfake.Registry, *decoder[Order]) {
	tb.Helper()
	registry := srfake.New()
	tb.Cleanup(registry.Close)
	for i, schema := range schemas {
		registry.SeedSchema("orders-value", i+1, i+1, sr.Schema{Schema: schema, Type: sr.TypeAvro})
	}
	client, err := sr.NewClient(sr.URLs(registry.URL()))
	require.NoError(tb, err)
	orders, err := newDecoder[Order](client, orderV2)
	require.NoError(tb, err)
	return registry, orders
}

// Property: a value that is not exactly one value of a schema that can be read as an order is an
// error.
func TestOnlyWholeOrdersAreDecoded(t *testing.T) {
	t.Parallel()
	_, orders := newRegistry(t, orderV1, orderV2, `{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}`, `"string"`)
	good := encode(1, orderV1, Order{ID: "order-1", Cents: 100})
	order, err := orders.Decode(&consumer.Message{Value: good})
	require.NoError(t, err)
	require.Equal(t, Order{"order-1", 100, "EUR"}, order)
	for name, tc := range map[string]struct {
		value []byte
		want  string
	}{
		"null":                {nil, "header"},
		"no magic byte":       {append([]byte{1}, good[1:]...), "header"},
		"cut in a number":     {good[:len(good)-1], "short buffer"},
		"trailing byte":       {append(bytes.Clone(good), 0), "extra bytes after the value"},
		"incompatible schema": {binary.BigEndian.AppendUint32([]byte{0}, 3), "cannot be read as main.Order"},
		"schema of no record": {binary.BigEndian.AppendUint32([]byte{0}, 4), "cannot be read as main.Order"},
		"unknown schema":      {binary.BigEndian.AppendUint32([]byte{0}, 5), "has no schema 5"},
	} {
		_, err := orders.Decode(&consumer.Message{Value: tc.value})
		require.ErrorContains(t, err, tc.want, name)
	}
	for n := range good {
		_, err := orders.Decode(&consumer.Message{Value: good[:n]})
		require.Error(t, err, "the first %d bytes", n)
	}
}
