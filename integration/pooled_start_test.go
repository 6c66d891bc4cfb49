package integration_test

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// Property: a relay and a consumer that start behind a PgBouncer while its server starts wait for it,
// and then work; the command line waits as long as it is told. PgBouncer has one SQLSTATE for that and for a wrong password, with
// which the command line ends at once.
func TestStartBehindPgBouncerWhileTheDatabaseStarts(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Volatile: true})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, server.Stop(context.WithoutCancel(ctx))) })
	pgtest.Migrate(t, server.URL)
	db := open(t, server.URL)
	createWorkload(t, db)
	topic, forward := kafkatest.Topic(t, 1), kafkatest.Topic(t, 1)
	producedAt(t, kafkatest.Brokers(t), db, topic, "k", 2, 5, 0)
	there, err := url.Parse(server.URL)
	require.NoError(t, err)
	gate := newGate(t, there.Host)
	there.Host = gate.listener.Addr().String()
	p := newPooler(t, there.String(), "server_login_retry = 1")
	address := p.url(describeOnly)
	conn, err := pgx.Connect(ctx, address) // PgBouncer lets clients in that follow, and refuses their statements
	require.NoError(t, err)
	gate.shut()
	_ = conn.Close(ctx)

	c := child{Role: "consumer", URL: address, Brokers: kafkatest.Brokers(t), Topic: topic, Group: topic, Forward: forward, SessionTimeout: sessionTimeout, BatchMax: 10, IdleTimeout: 2 * time.Second}
	consuming := start(t, c)
	c.Role, c.Lease = "relay", 3*time.Second
	relaying := start(t, c)
	for name, m := range map[string]*process{"waiting for the database": consuming, "relay interrupted": relaying} {
		eventually(t, time.Minute, name, func() (bool, any) {
			said := m.log.String()
			return strings.Contains(said, name), said
		})
	}
	eventually(t, time.Minute, "PgBouncer has refused them with its own error", func() (bool, any) {
		said := p.Log()
		return strings.Count(said, "server login has been failing") >= 5, said
	})
	program := build(t, ".", "../cmd/outbox-relay")
	run := func(address string) string {
		cmd := exec.CommandContext(ctx, program, "run", "--listen=off", "--insecure", "--database-wait=3s")
		cmd.Env = append(os.Environ(), "OUTBOX_DATABASE_URL="+address, "OUTBOX_BROKERS="+c.Brokers[0])
		said, err := cmd.CombinedOutput()
		require.Error(t, err)
		return string(said)
	}
	require.Contains(t, run(address), "gave up after 3s (--database-wait)")
	u, err := url.Parse(address)
	require.NoError(t, err)
	u.User = url.UserPassword("postgres", "wrong")
	said := run(u.String())
	require.Contains(t, said, "the server refuses with SQLSTATE 08P01")
	require.NotContains(t, said, "retrying")
	gate.open()
	handled(ctx, t, db, time.Minute)
	requirePublished(t, db, forward)
	require.NoError(t, consuming.terminate())
	require.NoError(t, relaying.terminate())
}

// gate leads to a PostgreSQL, or answers like one that starts.
type gate struct {
	listener net.Listener

	mu     sync.Mutex
	starts bool
	conns  []net.Conn // all that there were
}

// shut ends all connections, too.
func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.starts = true
	for _, conn := range g.conns {
		_ = conn.Close()
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.starts = false
}

func newGate(t *testing.T, to string) *gate {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	g := &gate{listener: listener}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			g.mu.Lock()
			g.conns = append(g.conns, conn)
			if g.starts {
				go refuse(conn)
			} else {
				go pipe(conn, to)
			}
			g.mu.Unlock()
		}
	}()
	return g
}

func pipe(conn net.Conn, to string) {
	defer func() { _ = conn.Close() }()
	server, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	go func() {
		defer func() { _ = server.Close() }()
		_, _ = io.Copy(server, conn)
	}()
	_, _ = io.Copy(conn, server)
}

// refuse reads a startup message, and a request for TLS before it.
func refuse(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	for {
		var head [8]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		if binary.BigEndian.Uint32(head[4:]) == 80877103 { // SSLRequest
			_, _ = conn.Write([]byte{'N'})
			continue
		}
		if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(head[:4]))-8); err != nil {
			return
		}
		answer, err := (&pgproto3.ErrorResponse{Severity: "FATAL", Code: "57P03", Message: "the database system is starting up"}).Encode(nil)
		if err == nil {
			_, _ = conn.Write(answer)
		}
		return
	}
}
