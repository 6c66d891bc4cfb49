package main_test

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// offerTLS gives a cluster a certificate. The server writes the files itself, wherever it runs: no
// other user may be able to read its key.
func offerTLS(t *testing.T, address string, certificate, key []byte) {
	t.Helper()
	conn := connect(t, address)
	for name, text := range map[string][]byte{"server.crt": certificate, "server.key": key} {
		// COPY takes no arguments, and PEM has nothing that needs a quote.
		execSQL(t, conn, "COPY (SELECT line FROM regexp_split_to_table(rtrim('"+string(text)+"', E'\n'), E'\n') AS line) TO PROGRAM 'umask 077; cat > "+name+"'")
	}
	execSQL(t, conn, "ALTER SYSTEM SET ssl = on")
	execSQL(t, conn, "SELECT pg_reload_conf()")
	// By itself it would notice some time later.
	config, err := pgx.ParseConfig(at(t, address, url.Values{"sslmode": {"require"}}))
	require.NoError(t, err)
	block, _ := pem.Decode(certificate)
	config.TLSConfig.VerifyPeerCertificate = func(shown [][]byte, _ [][]*x509.Certificate) error {
		if !bytes.Equal(shown[0], block.Bytes) {
			return errors.New("still another one")
		}
		return nil
	}
	require.Eventually(t, func() bool {
		tried, err := pgx.ConnectConfig(t.Context(), config)
		if err == nil {
			_ = tried.Close(t.Context())
		}
		return err == nil
	}, commandMax, 20*time.Millisecond)
}

// at is an address with other parameters.
func at(t *testing.T, address string, parameters url.Values) string {
	t.Helper()
	u, err := url.Parse(address)
	require.NoError(t, err)
	u.RawQuery = parameters.Encode()
	return u.String()
}

// verified requires a server with a certificate of an authority.
func verified(t *testing.T, address string, signer *authority) string {
	t.Helper()
	return at(t, address, url.Values{"sslmode": {"verify-full"}, "sslrootcert": {signer.file}})
}

// Row S6 of guarantees.md: with verify-full every connection of a relay, also those for its
// metrics, and of the other commands is over TLS 1.2 or later, to a server that the authority
// vouches for.
func TestDatabaseOverTLS(t *testing.T) {
	t.Parallel()
	cluster, signer := pgtest.Cluster(t, nil), newAuthority(t)
	pgtest.Migrate(t, cluster.URL)
	certificate, key := signer.issue(t, nil)
	offerTLS(t, cluster.URL, certificate, key)
	conn, topic := connect(t, cluster.URL), kafkatest.Topic(t, 1)
	environment := relayEnvironment(t, verified(t, cluster.URL, signer))
	environment["OUTBOX_LISTEN"] = "127.0.0.1:0"
	require.Zero(t, run(t, environment, "migrate", "status").code)
	written, end := inBackground(t, environment, "run", "--metrics-interval", "1s")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	awaitRecords(t, topic, 1)
	awaitGet(t, listening(t, written)+"/readyz", func(code int, _ string) bool { return code == 200 })
	awaitGet(t, listening(t, written)+"/metrics", func(_ int, body string) bool { return strings.Contains(body, "\neffectonce_outbox_table_bytes") })
	var connections, protected int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE s.ssl AND s.version IN ('TLSv1.2', 'TLSv1.3'))
		FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE a.application_name = 'outbox-relay'`).Scan(&connections, &protected))
	assert.GreaterOrEqual(t, connections, 2)
	assert.Equal(t, connections, protected)
	require.Zero(t, end(), written)
	assert.NotContains(t, written.String(), "level=WARN")
	for _, command := range []string{"status --interval 0s", "positions"} {
		r := run(t, environment, strings.Fields(command)...)
		assert.Zero(t, r.code, "%s: %+v", command, r)
		assert.Empty(t, r.stderr, command)
	}
}

// Row S6 of guarantees.md: a server that the authority does not vouch for, under this name and now,
// gets neither a password nor a query, and the remedy is said; and so does one that offers no TLS.
func TestDatabaseIsRefused(t *testing.T) {
	t.Parallel()
	cluster, signer := pgtest.Cluster(t, nil), newAuthority(t)
	trusted := verified(t, cluster.URL, signer)
	for _, command := range [][]string{{"migrate", "status"}, {"run", "--brokers", "127.0.0.1:1"}} {
		r := runOn(t, trusted, command...)
		assert.Equal(t, 1, r.code, r)
		assert.Contains(t, r.stderr, "it does not offer TLS", "before it does")
	}
	for name, change := range map[string]func(*x509.Certificate){
		"right":      nil,
		"other host": func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 2)} },
		"expired":    func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) },
		"client's":   func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} },
	} {
		certificate, key := signer.issue(t, change)
		offerTLS(t, cluster.URL, certificate, key)
		others := verified(t, cluster.URL, newAuthority(t))
		for address, refused := range map[string]bool{trusted: change != nil, others: true} {
			for _, command := range [][]string{{"migrate", "status"}, {"run", "--brokers", "127.0.0.1:1"}, {"doctor", "--brokers", "127.0.0.1:1", "--timeout", "2s"}} {
				r := runOn(t, address, command...)
				assert.Equal(t, 1, r.code, "%s: %v: %+v", name, command, r) // the tables are missing
				assert.Equal(t, refused, strings.Contains(r.stdout+r.stderr, "its TLS certificate is not trusted, or is of another host"), "%s: %v: %+v", name, command, r)
			}
		}
	}
}

// Row S6 of guarantees.md: on the way to another machine, no one can turn TLS off by answering that
// there is none, whatever the sslmode: no byte is sent unencrypted, and the error names the remedy.
// To this machine, and with --insecure, bytes are sent unencrypted. (0.0.0.0 leads to this machine,
// but does not look like it.)
func TestNobodyTurnsTLSOff(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"", "?sslmode=prefer", "?sslmode=allow", "?sslmode=require", "?sslmode=verify-full"} {
		for _, c := range []struct {
			host string
			args []string
			bare bool
		}{
			{"0.0.0.0", nil, false},
			{"0.0.0.0", []string{"--insecure"}, mode != "?sslmode=require" && mode != "?sslmode=verify-full"},
			{"127.0.0.1", nil, mode != "?sslmode=require" && mode != "?sslmode=verify-full"},
		} {
			for _, command := range [][]string{{"migrate", "status"}, {"run", "--brokers", "127.0.0.1:1"}} {
				between := newDowngrade(t)
				r := runOn(t, "postgres://"+canaryHead+"@"+net.JoinHostPort(c.host, between.port(t))+"/d"+mode, append(command, c.args...)...)
				assert.Equal(t, 1, r.code, r)
				assert.Equal(t, c.bare, strings.Contains(between.stop(), canaryHead), "%s%s %v", c.host, mode, c.args)
				if !c.bare {
					assert.Contains(t, r.stderr, "it does not offer TLS: turn ssl on there", "%s%s %v", c.host, mode, c.args)
				}
			}
		}
	}
}

// downgrade is a machine in the middle: it answers that there is no TLS, and listens.
type downgrade struct {
	listener net.Listener
	work     sync.WaitGroup
	mu       sync.Mutex
	heard    bytes.Buffer
}

func newDowngrade(t *testing.T) *downgrade {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	d := &downgrade{listener: listener}
	d.work.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			d.work.Go(func() { d.answer(conn) })
		}
	})
	t.Cleanup(func() { d.stop() })
	return d
}

// answer records the first bytes sent after a request for TLS, or instead of one.
func (d *downgrade) answer(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(commandMax))
	said := make([]byte, 1024)
	n, err := io.ReadFull(conn, said[:8])
	if err != nil {
		return
	}
	if bytes.Equal(said[:8], []byte{0, 0, 0, 8, 4, 210, 22, 47}) {
		_, _ = conn.Write([]byte("N"))
		n = 0
	}
	more, _ := conn.Read(said[n:])
	d.mu.Lock()
	defer d.mu.Unlock()
	_, _ = d.heard.Write(said[:n+more])
}

func (d *downgrade) port(t *testing.T) string {
	t.Helper()
	_, port, err := net.SplitHostPort(d.listener.Addr().String())
	require.NoError(t, err)
	return port
}

// stop returns the bytes that were sent unencrypted.
func (d *downgrade) stop() string {
	_ = d.listener.Close()
	d.work.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.heard.String()
}
