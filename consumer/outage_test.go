package consumer_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
)

// ownCluster is a harness on a database server that the test may stop.
func ownCluster(t *testing.T) (*harness, *servers.Postgres) {
	t.Helper()
	cluster := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, cluster.URL)
	pool, err := pgxpool.New(t.Context(), cluster.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return newHarnessOn(t, pool, 1), cluster
}

// Property: a database that crashes and comes back, each time while a handler is in an open
// transaction, costs only time: no message fails because of it, no attempt is counted, and each
// message has its effect once. There are effects between the crashes. Row C31 of guarantees.md.
func TestDatabaseAwayIsWaitedOut(t *testing.T) {
	t.Parallel()
	h, cluster := ownCluster(t)
	const crashes, each = 3, 15
	h.produce(numbered((crashes + 1) * each)...)
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
	each(t, map[string]int32{"not committed": loseRequest, "committed": loseAnswer}, func(t *testing.T, h *harness, _ string, fault int32) {
		t.Helper()
		var armed atomic.Int32
		var once sync.Once
		pool := h.poolWith(func(config *pgxpool.Config) {
			config.MaxConns = 1 // so that its statements are prepared, and COMMIT is one request
			config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
				return &faultyConn{Conn: conn, fault: &armed}, err
			}
		})
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

// Property: a consumer that is stopped while its COMMIT waits for a synchronous standby does not
// cancel the COMMIT: cancelled, it would be visible without being replicated, and a failover would
// lose what others have seen. Run again, the message has its effect once. Row C44 of guarantees.md.
func TestStopDoesNotCancelCommit(t *testing.T) {
	t.Parallel()
	h, _ := ownCluster(t)
	h.produceAs("a", "a")
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.DrainMax = 10 * time.Millisecond })
	h.waitEffects(1)

	h.exec(`ALTER SYSTEM SET synchronous_standby_names = 'missing'`)
	h.exec(`SELECT pg_reload_conf()`)
	h.wait("commits wait, once the server has read its configuration", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := h.pool.Exec(ctx, `SELECT pg_logical_emit_message(true, 'test', '')`)
		return err != nil
	})
	waiting := `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query ILIKE 'commit%'` // statements of the engine by themselves wait, too
	h.produceAs("b", "b")
	h.wait("a commit that waits for the standby", func() bool { return h.number(waiting) > 0 })
	require.NoError(t, stop())
	require.Positive(t, h.number(waiting), "the server still waits: nobody cancelled")
	require.Equal(t, []string{"a"}, h.values(), "not visible before it is replicated")

	h.exec(`ALTER SYSTEM RESET synchronous_standby_names`)
	h.exec(`SELECT pg_reload_conf()`)
	h.waitEffects(2)
	h.untilHandled(2, h.run(consumer.Each(effect), nil))
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
	pool := h.poolWith(func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
		config.ConnConfig.RuntimeParams["statement_timeout"] = "0"
	})
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

// network is a way to the database on which bytes can get lost without a reset, as behind a
// firewall that forgot a connection.
type network struct {
	t       *testing.T
	listen  net.Listener
	address string

	mu    sync.Mutex
	links map[string]*link // by the client's address
}

// link is one connection through the network.
type link struct {
	client, server net.Conn
	up, down       atomic.Bool // nothing arrives any more at the server, at the client
}

func newNetwork(t *testing.T, config *pgxpool.Config) *network {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n := &network{t: t, listen: listener, address: net.JoinHostPort(config.ConnConfig.Host, itoa(config.ConnConfig.Port)), links: map[string]*link{}}
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	config.ConnConfig.Host, config.ConnConfig.Port, config.ConnConfig.Fallbacks = "127.0.0.1", port, nil
	var serving sync.WaitGroup
	serving.Go(func() { n.serve(&serving) })
	t.Cleanup(func() {
		_ = listener.Close()
		n.mu.Lock()
		for _, l := range n.links {
			_, _ = l.client.Close(), l.server.Close()
		}
		n.mu.Unlock()
		serving.Wait()
	})
	return n
}

// networkPool is a small pool that goes through such a network. ping makes it look at a connection
// before it hands it out.
func (h *harness) networkPool(ping bool) (pool *pgxpool.Pool, n *network) {
	h.t.Helper()
	pool = h.poolWith(func(config *pgxpool.Config) {
		n, config.MaxConns = newNetwork(h.t, config), 4
		config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return ping }
	})
	return pool, n
}

func itoa(port uint16) string { return (&net.TCPAddr{Port: int(port)}).String()[1:] }

func (n *network) serve(serving *sync.WaitGroup) {
	for {
		client, err := n.listen.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", n.address)
		if err != nil {
			_ = client.Close()
			continue
		}
		l := &link{client: client, server: server}
		n.mu.Lock()
		n.links[client.RemoteAddr().String()] = l
		n.mu.Unlock()
		serving.Go(func() { pass(client, server, &l.up) })
		serving.Go(func() { pass(server, client, &l.down) })
	}
}

// pass copies bytes until they are to be lost. A close is lost, too.
func pass(from, to net.Conn, lost *atomic.Bool) {
	buffer := make([]byte, 64<<10)
	for {
		read, err := from.Read(buffer)
		if lost.Load() {
			if err != nil {
				return
			}
			continue
		}
		if err != nil {
			_ = to.Close()
			return
		}
		if _, err := to.Write(buffer[:read]); err != nil {
			return
		}
	}
}

// of is the link of a handler's connection.
func (n *network) of(tx pgx.Tx) *link {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.links[tx.Conn().PgConn().Conn().LocalAddr().String()]
}

// silence loses everything on the connections that there are now.
func (n *network) silence() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.links {
		l.up.Store(true)
		l.down.Store(true)
	}
}

// Property: bytes that get lost without a reset, wherever that happens, hold a partition up for a
// bounded time: it recovers by itself, each message has its effect once, and nothing stays parked. In
// a handler the silence costs an attempt, elsewhere none.
func TestSilentConnectionIsReplaced(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	type fault struct {
		inHandler func(l *link) // before its statement
		atEnd     func(l *link) // after it
		idle      bool          // all connections, while they are idle
		ping      bool          // the pool looks at a connection before it hands it out
	}
	both := func(l *link) { l.up.Store(true); l.down.Store(true) }
	each(t, map[string]fault{
		"claim":              {idle: true},
		"ping":               {idle: true, ping: true},
		"statement not sent": {inHandler: both},
		"statement's answer": {inHandler: func(l *link) { l.down.Store(true) }},
		"COMMIT not sent":    {atEnd: both},
		"COMMIT's answer":    {atEnd: func(l *link) { l.down.Store(true) }},
	}, func(t *testing.T, h *harness, _ string, f fault) {
		t.Helper()
		pool, n := h.networkPool(f.ping)
		var failed failures
		var once sync.Once
		stop := h.runOn(pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if string(msg.Value) != "b" {
				return effect(ctx, tx, msg)
			}
			if f.inHandler != nil {
				once.Do(func() { f.inHandler(n.of(tx)) })
			}
			err := effect(ctx, tx, msg)
			if f.atEnd != nil {
				once.Do(func() { f.atEnd(n.of(tx)) })
			}
			return err
		}), func(c *consumer.Config) {
			// A healthy statement that takes as long counts as an attempt, and there is one.
			c.StatementTimeout, c.HandlerTimeout, c.LockTimeout, c.IdleTimeout = 3*time.Second, 6*time.Second, 3*time.Second, 12*time.Second
			c.AttemptsMax, c.AbandonedMax, c.BatchMax = 1, 1, 1 // the fault is in the transaction of "b" alone
			if f.inHandler != nil {
				c.AttemptsMax = 2
			}
			failed.hook(c)
		})
		h.produce("a")
		h.waitEffects(1)
		if f.idle {
			n.silence()
		}
		h.produce("b", "c")
		begun := time.Now()
		h.require("effects", 2*time.Minute, func() bool { return h.position() == 3 })
		h.waitEffects(3)
		t.Logf("recovered after %v", time.Since(begun))
		require.NoError(t, stop())
		require.ElementsMatch(t, []string{"a", "b", "c"}, h.values())
		require.Empty(t, h.parked())
		if f.inHandler != nil {
			require.Equal(t, []string{"b"}, failed.all())
		} else {
			require.Empty(t, failed.all())
		}
	})
}

func (h *harness) require(what string, within time.Duration, condition func() bool) {
	h.t.Helper()
	begun := time.Now()
	testwait.True(h.t, what, condition)
	require.Less(h.t, time.Since(begun), within, what)
}

// Property: while the network is silent to an idle partition, its poll recovers in bounded time: a
// message that an operator retries then is run.
func TestSilentPollRecovers(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	h := newHarness(t, 1)
	pool, n := h.networkPool(false)
	var works atomic.Bool
	stop := h.runOn(pool, failing(&works), func(c *consumer.Config) { c.StatementTimeout = time.Second })
	h.produce("bad")
	h.waitParked("permanent")
	works.Store(true)
	n.silence()
	h.retry()
	h.untilEffects(1, stop)
}

// Property: a consumer that starts on a connection which went silent begins in bounded time.
func TestStartOnASilentConnection(t *testing.T) {
	longtest.Only(t, "a limit of 30 seconds")
	t.Parallel()
	h := newHarness(t, 1)
	pool, n := h.networkPool(false)
	require.NoError(t, pool.Ping(t.Context()), "a connection that is idle now")
	n.silence()
	h.produce("a")
	stop := h.runOn(pool, consumer.Each(effect), nil)
	h.require("an effect", 2*time.Minute, func() bool { return h.number(`SELECT count(*) FROM effects`) == 1 })
	require.NoError(t, stop())
}

// Property: a COMMIT that waits for a synchronous standby for longer than the engine waits for it
// is abandoned, not cancelled: cancelled, it would be visible without being replicated. The message
// has its effect once.
func TestCommitWithoutAnswerIsNotCancelled(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	h, _ := ownCluster(t)
	h.produceAs("a", "a")
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.StatementTimeout, c.AbandonedMax = time.Second, 1 })
	h.waitEffects(1)
	h.exec(`ALTER SYSTEM SET synchronous_standby_names = 'missing'`)
	h.exec(`SELECT pg_reload_conf()`)
	const waiting = `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`
	h.produceAs("b", "b")
	h.wait("a commit that waits for the standby", func() bool { return h.number(waiting) > 0 })
	h.wait("the engine waits no longer", func() bool { return strings.Contains(h.log.String(), "did not answer COMMIT in time") })
	h.wait("the next attempt waits behind it", func() bool {
		return h.number(`SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'`) > 0 || strings.Contains(h.log.String(), "lock timeout") ||
			strings.Contains(h.log.String(), "statement timeout")
	})
	require.Positive(t, h.number(waiting), "the server still waits")
	require.Equal(t, []string{"a"}, h.values(), "not visible before it is replicated")
	h.exec(`ALTER SYSTEM RESET synchronous_standby_names`)
	h.exec(`SELECT pg_reload_conf()`)
	h.waitEffects(2)
	h.waitHandled(2)
	h.produceAs("c", "c")
	h.untilEffects(3, stop)
	require.Equal(t, []string{"a", "b", "c"}, h.values())
	require.Empty(t, h.parked())
}
