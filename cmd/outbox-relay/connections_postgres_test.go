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
	"github.com/effectonce/effectonce/internal/testwait"
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
	testwait.True(t, "the server shows the certificate", func() bool {
		tried, err := pgx.ConnectConfig(t.Context(), config)
		if err == nil {
			_ = tried.Close(t.Context())
		}
		return err == nil
	})
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

// Row S6 of guarantees.md: with verify-full a server that the authority does not vouch for, under
// this name and now, gets neither a password nor a query, and the remedy is said; and so does one
// that offers no TLS. Every connection of a relay, also those for its metrics, is over TLS 1.2 or
// later.
func TestDatabaseOverTLS(t *testing.T) {
	t.Parallel()
	cluster, signer := pgtest.Cluster(t, nil), newAuthority(t)
	pgtest.Migrate(t, cluster.URL)
	trusted := verified(t, cluster.URL, signer)
	r := runOn(t, trusted, "run", "--brokers", "127.0.0.1:1")
	assert.Equal(t, 1, r.code, r)
	assert.Contains(t, r.stderr, "it does not offer TLS", "before it does")
	for name, change := range map[string]func(*x509.Certificate){
		"other host": func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 2)} },
		"expired":    func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) },
		"client's":   func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} },
		"right":      nil,
	} {
		certificate, key := signer.issue(t, change)
		offerTLS(t, cluster.URL, certificate, key)
		for address, refused := range map[string]bool{trusted: change != nil, verified(t, cluster.URL, newAuthority(t)): true} {
			r := runOn(t, address, "migrate", "status")
			assert.Equal(t, refused, r.code == 1, "%s: %+v", name, r)
			assert.Equal(t, refused, strings.Contains(r.stderr, "its TLS certificate is not trusted, or is of another host"), "%s: %+v", name, r)
		}
	}

	certificate, key := signer.issue(t, nil)
	offerTLS(t, cluster.URL, certificate, key)
	conn, topic := connect(t, cluster.URL), kafkatest.Topic(t, 1)
	environment := relayEnvironment(t, trusted)
	environment["OUTBOX_LISTEN"] = "127.0.0.1:0"
	written, end := inBackground(t, environment, "run", "--metrics-interval", "1s")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	awaitRecords(t, topic, 1)
	awaitGet(t, listening(t, written)+"/metrics", func(_ int, body string) bool { return strings.Contains(body, "\neffectonce_outbox_table_bytes") })
	var connections, protected int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE s.ssl AND s.version IN ('TLSv1.2', 'TLSv1.3'))
		FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE a.application_name = 'outbox-relay'`).Scan(&connections, &protected))
	assert.GreaterOrEqual(t, connections, 2)
	assert.Equal(t, connections, protected)
	require.Zero(t, end(), written)
}

// Row S6 of guarantees.md: on the way to another machine, no one can turn TLS off by answering that
// there is none, whatever the sslmode: no byte is sent unencrypted, and the error names the remedy.
// To this machine, and with --insecure, bytes are sent unencrypted. (0.0.0.0 leads to this machine,
// but does not look like it.)
func TestNobodyTurnsTLSOff(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		host, mode string
		args       []string
		bare       bool
	}{
		{"0.0.0.0", "", nil, false},
		{"0.0.0.0", "?sslmode=prefer", nil, false},
		{"0.0.0.0", "?sslmode=allow", nil, false},
		{"0.0.0.0", "?sslmode=verify-full", []string{"--insecure"}, false},
		{"0.0.0.0", "?sslmode=allow", []string{"--insecure"}, true},
		{"127.0.0.1", "?sslmode=require", nil, false},
		{"127.0.0.1", "", nil, true},
	} {
		between := newDowngrade(t)
		r := runOn(t, "postgres://"+canaryHead+"@"+net.JoinHostPort(c.host, between.port(t))+"/d"+c.mode, append([]string{"migrate", "status"}, c.args...)...)
		assert.Equal(t, 1, r.code, r)
		assert.Equal(t, c.bare, strings.Contains(between.stop(), canaryHead), "%+v", c)
		if !c.bare {
			assert.Contains(t, r.stderr, "it does not offer TLS: turn ssl on there", "%+v", c)
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
