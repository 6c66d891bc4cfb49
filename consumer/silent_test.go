package consumer_test

import (
	"context"
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
	"github.com/effectonce/effectonce/internal/testwait"
)

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
	for name, f := range map[string]fault{
		"claim":              {idle: true},
		"ping":               {idle: true, ping: true},
		"statement not sent": {inHandler: both},
		"statement's answer": {inHandler: func(l *link) { l.down.Store(true) }},
		"COMMIT not sent":    {atEnd: both},
		"COMMIT's answer":    {atEnd: func(l *link) { l.down.Store(true) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			var n *network
			pool := h.smallPool(func(config *pgxpool.Config) {
				n = newNetwork(t, config)
				config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return f.ping }
			})
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
				c.AttemptsMax, c.AbandonedMax = 1, 1
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
				require.Equal(t, []string{"b"}, failed.list())
			} else {
				require.Empty(t, failed.list())
			}
		})
	}
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
	var n *network
	pool := h.smallPool(func(config *pgxpool.Config) {
		n = newNetwork(t, config)
		config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	})
	var works atomic.Bool
	stop := h.runOn(pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !works.Load() {
			return consumer.Permanent(errBad)
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.StatementTimeout = time.Second })
	h.produce("a")
	h.waitParked("permanent")
	works.Store(true)
	n.silence()
	h.retry()
	h.waitEffects(1)
	require.NoError(t, stop())
}

// Property: a consumer that starts on a connection which went silent begins in bounded time.
func TestStartOnASilentConnection(t *testing.T) {
	longtest.Only(t, "a limit of 30 seconds")
	t.Parallel()
	h := newHarness(t, 1)
	var n *network
	pool := h.smallPool(func(config *pgxpool.Config) {
		n = newNetwork(t, config)
		config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	})
	require.NoError(t, pool.Ping(t.Context()), "a connection that is idle now")
	n.silence()
	h.produce("a")
	stop := h.runOn(pool, consumer.Each(effect), nil)
	h.require("an effect", 2*time.Minute, func() bool { return h.number(`SELECT count(*) FROM effects`) == 1 })
	require.NoError(t, stop())
}

// Property: a statement that the server executes for too long is its message's failure, on a
// network that works.
func TestSlowStatementIsNotSilence(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	h := newHarness(t, 1)
	var failed failures
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "slow" {
			_, err := tx.Exec(ctx, `SELECT pg_sleep(60)`)
			return err
		}
		if string(msg.Value) == "many" {
			for {
				if _, err := tx.Exec(ctx, `SELECT 1`); err != nil {
					return err
				}
			}
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.HandlerTimeout, c.AttemptsMax = 5*time.Second, 1; failed.hook(c) }) // one slow attempt of "a" would park it
	h.produce("slow", "a", "many", "b")
	h.wait("position", func() bool { return h.position() == 4 })
	require.NoError(t, stop())
	require.Equal(t, []string{"a", "b"}, h.values())
	require.Equal(t, []string{"slow", "many"}, failed.list())
	require.Len(t, h.parked(), 2)
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
	h.exec(`ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
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
	h.wait("position", func() bool { return h.position() == 2 })
	h.produceAs("c", "c")
	h.waitEffects(3)
	require.NoError(t, stop())
	require.Equal(t, []string{"a", "b", "c"}, h.values())
	require.Empty(t, h.parked())
}
