package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// ownCluster is a harness on a database server that the test may stop.
func ownCluster(t *testing.T) (*harness, *servers.Postgres) {
	t.Helper()
	cluster := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, cluster.URL)
	pool, err := pgxpool.New(t.Context(), cluster.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	h := &harness{t: t, pool: pool, topic: kafkatest.Topic(t, 1), log: &logLines{}}
	h.exec(`CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, message_id uuid, value text)`)
	return h, cluster
}

// Property: a database that crashes and comes back, each time while a handler is in an open
// transaction, costs only time: no message fails because of it, no attempt is counted, and each
// message has its effect once. There are effects between the crashes. Row C31 of guarantees.md.
func TestDatabaseAwayIsWaitedOut(t *testing.T) {
	t.Parallel()
	h, cluster := ownCluster(t)
	const crashes, each = 3, 15
	for i := range (crashes + 1) * each {
		h.produceAs(fmt.Sprint(i), fmt.Sprint(i))
	}
	var failed atomic.Int64
	var begun, crashed [crashes]chan struct{}
	for i := range crashes {
		begun[i], crashed[i] = make(chan struct{}), make(chan struct{})
	}
	var reached [crashes]sync.Once
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if err := effect(ctx, tx, msg); err != nil {
			return err
		}
		if i := int(msg.Offset) / each; i > 0 && msg.Offset%each == 1 { // 16, 31, 46: in the middle of a transaction
			reached[i-1].Do(func() {
				close(begun[i-1])
				select {
				case <-crashed[i-1]:
				case <-ctx.Done():
				}
			})
		}
		return nil
	}), func(c *consumer.Config) {
		c.BatchMax = 3
		c.Hooks.Failed = func(consumer.Failed) { failed.Add(1) }
	})
	before := 0
	for i := range crashes {
		select {
		case <-begun[i]:
		case <-time.After(2 * time.Minute):
			require.FailNow(t, "the message at which the database crashes is not handled", "crash %d", i)
		}
		effects := h.number(`SELECT count(*) FROM effects`)
		require.Greater(t, effects, before, "effects before crash %d, and after the one before", i)
		require.LessOrEqual(t, effects, (i+1)*each+1)
		before = effects
		require.NoError(t, cluster.Kill(t.Context()))
		close(crashed[i])
		require.NoError(t, cluster.Restart(t.Context()))
		h.pool.Reset()
	}
	h.wait("effects", func() bool {
		var n int
		return h.pool.QueryRow(t.Context(), `SELECT count(*) FROM effects`).Scan(&n) == nil && n >= 60
	})
	require.NoError(t, stop())
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.parked_messages`))
	require.Equal(t, 60, h.number(`SELECT count(*) FROM effects`))
	require.Equal(t, 60, h.number(`SELECT count(DISTINCT value) FROM effects`))
	require.Zero(t, failed.Load(), "the database's trouble is no message's failure")
}

// faultyConn loses the next request or the answer to it, when told to.
type faultyConn struct {
	net.Conn
	fault *atomic.Int32
	mute  bool
}

const (
	loseRequest int32 = 1 // it never reaches the server
	loseAnswer  int32 = 2 // the server has executed it, and the answer is lost
)

var errCut = errors.New("connection cut by the test")

func (c *faultyConn) Write(p []byte) (int, error) {
	switch c.fault.Swap(0) {
	case loseRequest:
		_ = c.Close()
		return 0, errCut
	case loseAnswer:
		c.mute = true
	}
	return c.Conn.Write(p)
}

func (c *faultyConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.mute {
		_ = c.Close()
		return 0, errCut
	}
	return n, err
}

// Property: a connection that breaks in COMMIT leaves the outcome unknown, and running the batch
// again resolves it: there is one effect, whether the COMMIT arrived or not. Row C43 of
// guarantees.md.
func TestConnectionLostInCommit(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]int32{"not committed": loseRequest, "committed": loseAnswer} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			var armed atomic.Int32
			var once sync.Once
			config := h.pool.Config()
			config.MaxConns = 1 // so that its statements are prepared, and COMMIT is one request
			config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				var d net.Dialer
				conn, err := d.DialContext(ctx, network, address)
				return &faultyConn{Conn: conn, fault: &armed}, err
			}
			pool := pgtest.PoolOf(t, config)
			engine := consumer.NewEngine(t, pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if err := effect(ctx, tx, msg); err != nil {
					return err
				}
				if msg.Offset == 1 {
					once.Do(func() { armed.Store(fault) }) // the next request is the COMMIT
				}
				return nil
			}), consumer.Config{Group: "g", Topics: []string{h.topic}})
			at, err := engine.Hold(t.Context(), 0)
			require.NoError(t, err)
			_, err = engine.Apply(t.Context(), at, 0, 1)
			require.NoError(t, err)

			_, err = engine.Apply(t.Context(), at, 1, 1)
			require.Error(t, err)
			require.Equal(t, fault == loseAnswer, h.number(`SELECT count(*) FROM effects`) == 2, "the test's own premise")
			fresh, err := engine.Apply(t.Context(), at, 1, 1)
			require.NoError(t, err)
			require.Equal(t, fault == loseRequest, fresh == 1)
			require.Equal(t, 2, h.number(`SELECT count(*) FROM effects`))
			require.Equal(t, 2, h.number(`SELECT next_offset FROM effectonce.consumer_positions`))
		})
	}
}

// Property: a consumer that is stopped while its COMMIT waits for a synchronous standby does not
// cancel the COMMIT: cancelled, it would be visible without being replicated, and a failover would
// lose what others have seen. Run again, the message has its effect once. Row C44 of guarantees.md.
func TestStopDoesNotCancelCommit(t *testing.T) {
	t.Parallel()
	h, _ := ownCluster(t)
	h.produceAs("a", "a")
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.DrainMax = 10 * time.Millisecond })
	h.waitEffects(1)

	h.exec(`ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
	h.exec(`SELECT pg_reload_conf()`)
	waiting := `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query ILIKE 'commit%'` // statements of the engine by themselves wait, too
	h.produceAs("b", "b")
	h.wait("a commit that waits for the standby", func() bool { return h.number(waiting) > 0 })
	require.NoError(t, stop())
	require.Positive(t, h.number(waiting), "the server still waits: nobody cancelled")
	require.Equal(t, []string{"a"}, h.values(), "not visible before it is replicated")

	h.exec(`ALTER SYSTEM RESET synchronous_standby_names`)
	h.exec(`SELECT pg_reload_conf()`)
	h.waitEffects(2)
	stop = h.run(consumer.Each(effect), nil)
	h.wait("position", func() bool { return h.position() == 2 })
	require.NoError(t, stop())
	require.Equal(t, []string{"a", "b"}, h.values())
}

// Property: a holder that is fenced by a later one commits nothing, and a position never goes back.
// Row C10 of guarantees.md.
func TestEarlierHolderIsFenced(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	engine := consumer.NewEngine(t, h.pool, consumer.Each(effect), consumer.Config{Group: "g", Topics: []string{h.topic}})
	zombie, err := engine.Hold(t.Context(), 0)
	require.NoError(t, err)
	_, err = engine.Apply(t.Context(), zombie, 0, 5)
	require.NoError(t, err)
	heir, err := engine.Hold(t.Context(), 0)
	require.NoError(t, err)
	_, err = engine.Apply(t.Context(), zombie, 5, 5)
	require.True(t, consumer.IsFenced(err), "%v", err)
	require.Equal(t, 5, h.number(`SELECT count(*) FROM effects`), "rolled back, claims and all")
	fresh, err := engine.Apply(t.Context(), heir, 5, 5)
	require.NoError(t, err)
	require.Equal(t, 5, fresh)
	_, err = engine.Apply(t.Context(), heir, 0, 5)
	require.NoError(t, err, "a batch of redeliveries")
	require.Equal(t, 10, h.number(`SELECT next_offset FROM effectonce.consumer_positions`))
}

// Property: the transaction's own limits hold whatever the role's defaults are, and commits are
// durable. Rows C9, C33 of guarantees.md.
func TestTransactionSetsItsOwnLimits(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	config := h.pool.Config()
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	config.ConnConfig.RuntimeParams["statement_timeout"] = "0"
	pool := pgtest.PoolOf(t, config)
	var seen string
	engine := consumer.NewEngine(t, pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, _ *consumer.Message) error {
		return tx.QueryRow(ctx, `SELECT concat_ws(' ', current_setting('synchronous_commit'), current_setting('statement_timeout'),
			current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'))`).Scan(&seen)
	}), consumer.Config{Group: "g", Topics: []string{h.topic}, StatementTimeout: 7 * time.Second, LockTimeout: 6 * time.Second, IdleTimeout: 5 * time.Second})
	at, err := engine.Hold(t.Context(), 0)
	require.NoError(t, err)
	_, err = engine.Apply(t.Context(), at, 0, 1)
	require.NoError(t, err)
	require.Equal(t, "on 7s 6s 5s", seen)
}
