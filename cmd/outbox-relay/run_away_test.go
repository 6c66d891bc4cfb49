package main_test

import (
	"io"
	"net"
	"net/url"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: a relay that starts while its database is unreachable waits for it, logs that, and
// publishes once it answers; it gives up after --database-wait, and at once if the database
// refuses.
func TestRunWaitsForADatabaseThatIsAway(t *testing.T) {
	longtest.Only(t, "it measures a wait of two seconds")
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1)
	role := plainRole(t, address)
	grant(t, address, role)
	execSQL(t, connect(t, address), "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	there, err := url.Parse(role)
	require.NoError(t, err)
	gone := *there
	gone.Host = spare(t)
	environment := func(wait string) map[string]string {
		e := relayEnvironment(t, gone.String())
		e["OUTBOX_DATABASE_WAIT"] = wait
		return e
	}

	r := run(t, environment("0s"), "run")
	assert.Equal(t, 1, r.code)
	assert.NotContains(t, r.stderr, "retrying")
	assert.NotContains(t, r.stderr, "gave up")
	r = run(t, environment("1500ms"), "run")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "the database is unreachable: retrying")
	assert.Contains(t, r.stderr, "connection refused")
	assert.Contains(t, r.stderr, "gave up after 2s (--database-wait)")
	assertNoCanary(t, r, "run")

	stderr, end := inBackground(t, environment("1h"), "run")
	stderr.await(t, "the database is unreachable: retrying")
	forward(t, gone.Host, there.Host)
	awaitRecords(t, topic, 1)
	assert.Zero(t, end(), stderr)
	refused := *there
	refused.User = url.UserPassword(there.User.Username(), "wrong")
	e := relayEnvironment(t, refused.String())
	e["OUTBOX_DATABASE_WAIT"] = "1h"
	r = run(t, e, "run")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "user or password is wrong (28P01)")
	assert.NotContains(t, r.stderr, "retrying")
}

// spare returns an address at which no server listens, and none will: where this machine has more
// than one address of its own, other tests have no port of this one.
func spare(t *testing.T) string {
	t.Helper()
	for _, host := range []string{"127.0.0.77", "127.0.0.1"} {
		free, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", net.JoinHostPort(host, "0"))
		if err == nil {
			require.NoError(t, free.Close())
			return free.Addr().String()
		}
	}
	require.FailNow(t, "there is no address of this machine")
	return ""
}

// forward lets connections to one address lead to another.
func forward(t *testing.T, from, to string) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", from)
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			there, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", to)
			if err != nil {
				_ = conn.Close()
				continue
			}
			go func() { _, _ = io.Copy(there, conn); _ = there.Close() }()
			go func() { _, _ = io.Copy(conn, there); _ = conn.Close() }()
		}
	}()
}
