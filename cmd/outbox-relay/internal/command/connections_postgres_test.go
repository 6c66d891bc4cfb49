package command_test

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"maps"
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

// Row S6 of guarantees.md: settings that contradict each other, or would show a secret, are refused
// all at once.
func TestContradictionsOfConnections(t *testing.T) {
	t.Parallel()
	signer := newAuthority(t)
	certificate, key := signer.issue(t, nil)
	certFile, keyFile := file(t, string(certificate)), file(t, string(key))
	secret, empty, lines := file(t, canaryHead), file(t, " \n"), file(t, canaryHead+"\n"+canaryTail)
	const missing = "/nowhere/at/all"
	away := []string{"--brokers", "kafka.invalid:9092"}
	plain := []string{"--kafka-sasl-mechanism", "plain", "--kafka-username", "u", "--kafka-password-file", secret}
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"certificate without key": {[]string{"--kafka-tls", "--kafka-cert-file", certFile}, []string{"want --kafka-key-file too"}},
		"key without certificate": {[]string{"--kafka-tls", "--kafka-key-file", keyFile}, []string{"want --kafka-cert-file too"}},
		"files without TLS":       {[]string{"--kafka-ca-file", signer.file}, []string{"want --kafka-tls too"}},
		"another's key":           {[]string{"--kafka-tls", "--kafka-cert-file", signer.file, "--kafka-key-file", keyFile}, []string{"private key does not match public key"}},
		"no certificates":         {[]string{"--kafka-tls", "--kafka-ca-file", secret}, []string{"want certificates in PEM form"}},
		"all of nothing":          {[]string{"--kafka-sasl-mechanism", "scram-sha-512"}, []string{"want --kafka-username too", "want --kafka-password-file too"}},
		"user without mechanism":  {[]string{"--kafka-username", "u"}, []string{"want --kafka-sasl-mechanism too"}},
		"unknown mechanism":       {[]string{"--kafka-sasl-mechanism", "PLAIN"}, []string{"want one of plain, scram-sha-256, scram-sha-512, oauthbearer"}},
		"token of a user": {
			append([]string{"--kafka-token-file", secret}, plain...),
			[]string{"--kafka-token-file: only --kafka-sasl-mechanism oauthbearer takes a token"},
		},
		"user of a token": {
			[]string{"--kafka-sasl-mechanism", "oauthbearer", "--kafka-username", "u"},
			[]string{"want --kafka-token-file too", "takes a token: want no --kafka-username"},
		},
		"files": {
			[]string{"--kafka-tls", "--kafka-ca-file", missing, "--kafka-cert-file", t.TempDir(), "--kafka-key-file", empty, "--database-password-file", lines},
			[]string{`--kafka-ca-file "/nowhere/at/all": want a file that exists`, "want a regular file", "the file is empty", "want a file of one line"},
		},
		"a secret for a file": {[]string{"--database-password-file", "pass" + canaryHead}, []string{"(value not shown, it might hold a password): want a file that exists"}},
		"brokers in the clear": {
			[]string{"--brokers", "127.0.0.1:1,kafka.invalid,10.0.0.7:9092"},
			[]string{"--brokers: kafka.invalid:9092 is another machine, and without TLS"},
		},
		"a password in the clear": {append(away, plain...), []string{"the traffic to it, secrets too, can be read and changed on the network: want --kafka-tls; --insecure if you trust that network"}},
		"name of this machine":    {[]string{"--brokers", "localhost.invalid:9092"}, []string{"--brokers: localhost.invalid:9092 is another machine"}},
		"database in the clear": {
			[]string{"--database-url", "postgres://u@127.0.0.1:1,db.invalid:1/d?sslmode=disable"},
			[]string{"--database-url: sslmode=disable to db.invalid"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, map[string]string{"DATABASE_URL": "postgres://u@127.0.0.1:1/d"}, append([]string{"doctor"}, c.args...)...)
			assert.Equal(t, 2, r.code, r)
			for _, want := range c.want {
				assert.Contains(t, r.stderr, want)
			}
			assert.Len(t, strings.Split(strings.TrimSpace(r.stderr), "\n"), len(c.want), r.stderr)
			assertNoCanary(t, r, name)
		})
	}
}

// Row S6 of guarantees.md: each command that connects to Kafka refuses remote brokers without TLS.
// Other commands do not, so they need no --insecure, which also applies to the database. demo and
// bench, which have no TLS, do not continue without it.
func TestBrokersInTheClearAreRefused(t *testing.T) {
	t.Parallel()
	environment := map[string]string{"DATABASE_URL": "postgres://u@127.0.0.1:1/d", "KAFKA_BROKERS": "kafka.invalid:9092"}
	const refused, remedy = "--brokers: kafka.invalid:9092 is another machine", "want --kafka-tls; --insecure if you trust that network"
	for _, command := range []string{
		"run", "doctor", "status", "positions", "explain 00000000-0000-7000-8000-000000000000", "verify",
		"topics pause orders", "consumer resume-at --group g --topic orders --partition 0 --at earliest --why w", "demo", "bench consume", "bench relay",
	} {
		r := run(t, environment, strings.Fields(command)...)
		assert.Equal(t, 2, r.code, command)
		assert.Contains(t, r.stderr, refused, command)
		plain := command == "demo" || strings.HasPrefix(command, "bench")
		assert.Equal(t, !plain, strings.Contains(r.stderr, remedy), "%s: %s", command, r.stderr)
		if plain {
			r = run(t, nil, append(strings.Fields(command), "--brokers", "127.0.0.1:1", "--kafka-tls")...)
			assert.Contains(t, r.stderr, "supports neither TLS nor SASL")
		}
	}
	for command, more := range map[string]string{
		"tail": "", "migrate status": "", "dead list": "", "topics resume orders": "", "topics list": "", "parked list": "",
		"status": "OUTBOX_INSECURE", "run": "OUTBOX_KAFKA_TLS",
	} {
		settings := maps.Clone(environment)
		settings[more] = "true"
		r := run(t, settings, strings.Fields(command)...)
		assert.Equal(t, 1, r.code, "%s: %+v", command, r)
		assert.NotContains(t, r.stderr, refused, command)
	}
}

// Row S6 of guarantees.md: a server on another machine whose identity is not verified causes one
// warning line with the remedy; this machine, and --insecure, cause none.
func TestWeakConnectionsWarn(t *testing.T) {
	t.Parallel()
	signer := newAuthority(t)
	for query, mode := range map[string]string{
		"db.invalid/d":                 "prefer",
		"db.invalid/d?sslmode=allow":   "prefer",
		"db.invalid/d?sslmode=require": "require",
		"db.invalid/d?sslmode=verify-ca&sslrootcert=" + signer.file:         "verify-ca",
		"db.invalid/d?sslmode=require&sslrootcert=" + signer.file:           "verify-ca",
		"127.0.0.1:1,db.invalid:1/d?sslmode=require":                        "require",
		"db.invalid/d?sslmode=verify-full":                                  "",
		"db.invalid/d?sslrootcert=system":                                   "",
		"127.0.0.1:1/d":                                                     "",
		"localhost:1,[::1]:1/d?sslmode=require":                             "",
		"/d?host=/nowhere/at/all":                                           "",
		"db.invalid/d?sslmode=verify-full&host=db.invalid,127.0.0.1&port=1": "",
	} {
		r := run(t, nil, "status", "--database-url", "postgres://u@"+query)
		assert.Equal(t, mode != "", strings.Contains(r.stderr, "set sslmode=verify-full"), "%s: %s", query, r.stderr)
		assert.Equal(t, mode != "", strings.Contains(r.stderr, "host=db.invalid sslmode="+mode), "%s: %s", query, r.stderr)
	}
	assert.NotContains(t, run(t, nil, "status", "--insecure", "--database-url", "postgres://u@db.invalid/d").stderr, "verify-full")
}

// Row S6 of guarantees.md: a password in a file is taken before one in the URL, and one that
// changed with the next connection, also by a relay that runs.
func TestRotatedDatabasePassword(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	role := plainRole(t, address)
	grant(t, address, role)
	conn := connect(t, address)
	password := file(t, canaryPassword+"\n")
	environment := relayEnvironment(t, strings.Replace(role, canaryPassword, "wrong", 1))
	environment["OUTBOX_DATABASE_PASSWORD_FILE"] = password
	topic := kafkatest.Topic(t, 1)
	written, end := inBackground(t, environment, "run", "--log-level", "debug")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	awaitRecords(t, topic, 1)

	name, _, _ := strings.Cut(strings.TrimPrefix(role, "postgres://"), ":")
	next := canaryHead + " '@%" + canaryTail
	rewrite(t, password, next)
	execSQL(t, conn, "ALTER ROLE "+name+" PASSWORD '"+strings.ReplaceAll(next, "'", "''")+"'")
	execSQL(t, conn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", name)
	execSQL(t, conn, "UPDATE effectonce.outbox_progress SET lease_until = NULL")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	awaitRecords(t, topic, 2)
	assert.Zero(t, end(), written)
	assertNoCanary(t, result{stderr: written.String()}, "run")
	assert.NotContains(t, written.String(), canaryPassword)
}
