package idempotency_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// meter counts what goes over the connections of a pool.
type meter struct{ sent, received atomic.Int64 }

type meteredConn struct {
	net.Conn
	meter *meter
}

func (c meteredConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.meter.sent.Add(int64(n))
	return n, err
}

func (c meteredConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.meter.received.Add(int64(n))
	return n, err
}

// Property: who probes for a key that another tenant has, finished or held at this moment, learns
// nothing: the request is executed like one under a key that no tenant has, and the same bytes go
// to the server and back, whatever the library sends. The number of bytes stands for the duration,
// which no test can compare. Row H14 of guarantees.md.
func TestProbingLearnsNothing(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), newPool(t)
	owners := newOperation(t, pool, idempotency.Config{})
	of := func(scope, value string) idempotency.Key { return idempotency.Key{Scope: scope, Value: value} }
	// Of one length, and of 2024: such keys are looked up before they are claimed.
	const finished, held, nobodys = "01900000-0000-7000-8000-00000000000a", "01900000-0000-7000-8000-00000000000b", "01900000-0000-7000-8000-00000000000c"
	_, err := owners.Once(ctx, of("owner", finished), insertOnce("owner"))
	require.NoError(t, err)
	holds, released, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	release := sync.OnceFunc(func() { close(released) })
	defer release()
	go func() {
		_, err := owners.Once(ctx, of("owner", held), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			close(holds)
			<-released
			return insertOnce("owner")(ctx, tx)
		})
		ended <- err
	}()
	<-holds

	var m meter
	config := pool.Config()
	config.MaxConns = 1
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return meteredConn{conn, &m}, err
	}
	metered := pgtest.PoolOf(t, config)
	probe := func(key idempotency.Key, do func(*idempotency.Operation, idempotency.Key)) [2]int64 {
		o := newOperation(t, metered, idempotency.Config{}) // it knows no outcome
		m.sent.Store(0)
		m.received.Store(0)
		do(o, key)
		pgtest.Unused(t, metered)
		return [2]int64{m.sent.Load(), m.received.Load()}
	}
	looks := func(o *idempotency.Operation, key idempotency.Key) {
		_, err := o.Look(ctx, key)
		require.ErrorIs(t, err, idempotency.ErrNotStored)
	}
	executes := func(o *idempotency.Operation, key idempotency.Key) {
		response, err := o.Once(ctx, key, insertOnce("prober"))
		require.NoError(t, err)
		require.False(t, response.Replayed)
	}
	for _, c := range []struct {
		name string
		do   func(*idempotency.Operation, idempotency.Key)
	}{{"look", looks}, {"execute", executes}} { // in this order: what was executed is stored
		name, do := c.name, c.do
		probe(of("warm-up", nobodys), do) // statements are prepared
		want := probe(of("prober1", nobodys), do)
		require.Positive(t, want[0])
		require.Equal(t, want, probe(of("prober2", finished), do), "%s: finished", name)
		require.Equal(t, want, probe(of("prober3", held), do), "%s: held", name)
	}
	release()
	require.NoError(t, <-ended)
	require.Equal(t, 4, effects(t, pool, "prober"))
	require.Equal(t, 2, effects(t, pool, "owner"))
}
