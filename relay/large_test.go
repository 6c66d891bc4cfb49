package relay_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// countedConn counts what a server sends.
type countedConn struct {
	net.Conn
	read *atomic.Int64
}

func (c countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Add(int64(n))
	return n, err
}

// Property: large rows behind small ones are read once: a page is cut by bytes on the server. Order
// and values are kept, also where small and large rows alternate, with and without keys, and where
// a single row is larger than a page. Row O47 of guarantees.md.
func TestLargeRowsAreReadOnce(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "10000000")
	var read atomic.Int64
	config := pool.Config()
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return countedConn{conn, &read}, err
	}
	counted, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(counted.Close)

	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
		SELECT $1, CASE WHEN n % 3 > 0 THEN 'k'::bytea END, convert_to(n || '-' || repeat('x', CASE WHEN n <= 3000 THEN 10
			WHEN n % 50 = 0 THEN 3000000 WHEN n % 5 = 0 THEN 5 ELSE 100000 END), 'UTF8') FROM generate_series(1, 3250) AS n`, topic)
	var want int64
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT sum(octet_length(payload) + 100) FROM effectonce.outbox`).Scan(&want))

	drain(t, newRelay(t, counted, relay.Config{InFlightBytesMax: 8 << 20}))
	got := values(t, topic)
	require.Len(t, got, 3250)
	for i, value := range got {
		number, _, _ := strings.Cut(value, "-")
		require.Equal(t, fmt.Sprint(i+1), number)
	}
	t.Logf("%d bytes of rows, %d bytes read", want, read.Load())
	require.Less(t, float64(read.Load()), 1.3*float64(want))
}
