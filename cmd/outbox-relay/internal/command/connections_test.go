package command_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// authority signs certificates of a test.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	file        string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	a.certificate = &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "authority of a test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	text, _ := a.sign(t, a.certificate)
	block, _ := pem.Decode(text)
	parsed, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	a.certificate, a.file = parsed, file(t, string(text))
	return a
}

// sign returns a certificate and its key in PEM form. The first one signs itself.
func (a *authority) sign(t *testing.T, template *x509.Certificate) (certificate, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	if a.key == nil {
		a.key = private
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &private.PublicKey, a.key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(private)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
}

// issue returns a certificate of this machine's address, for servers and clients.
func (a *authority) issue(t *testing.T, change func(*x509.Certificate)) (certificate, key []byte) {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "party of a test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	return a.sign(t, template)
}

func (a *authority) server(t *testing.T, change func(*x509.Certificate)) *tls.Config {
	t.Helper()
	pair, err := tls.X509KeyPair(a.issue(t, change))
	require.NoError(t, err)
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

// file writes a file of the test's own.
func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	rewrite(t, path, text)
	return path
}

// rewrite replaces a file as a whole, as those do that rotate secrets.
func rewrite(t *testing.T, path, text string) {
	t.Helper()
	next := path + ".next"
	require.NoError(t, os.WriteFile(next, []byte(text), 0o600))
	require.NoError(t, os.Rename(next, path))
}

// gatekeeper is a broker that answers about credentials as Apache Kafka does, where kfake hangs up.
// It takes any mechanism.
func gatekeeper(t *testing.T, lifetime time.Duration, accept func(mechanism, credentials string) bool, opts ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	fake := kafkatest.Fake(t, opts...)
	mechanism := make(chan string, 100)
	fake.ControlKey(int16(kmsg.SASLHandshake), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		mechanism <- request.(*kmsg.SASLHandshakeRequest).Mechanism
		return request.ResponseKind(), nil, true
	})
	fake.ControlKey(int16(kmsg.SASLAuthenticate), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		response := request.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		response.SessionLifetimeMillis = lifetime.Milliseconds()
		if !accept(<-mechanism, string(request.(*kmsg.SASLAuthenticateRequest).SASLAuthBytes)) {
			response.ErrorCode = kerr.SaslAuthenticationFailed.Code
		}
		return response, nil, true
	})
	return fake
}

// secured is the environment of commands at a cluster.
func secured(fake *kfake.Cluster, database string, more map[string]string) map[string]string {
	environment := map[string]string{"OUTBOX_DATABASE_URL": database, "OUTBOX_BROKERS": strings.Join(fake.ListenAddrs(), ",")}
	for name, value := range more {
		environment["OUTBOX_"+name] = value
	}
	return environment
}

// kafkaCanary is a password that breaks what parses it.
const kafkaCanary = canaryHead + `=,%s'"\ ` + canaryTail

const (
	orders        = "orders"
	brokersAnswer = "ok    brokers: 3 of 3 brokers answer"
)

// awaitOrders reads the topic of the test's own cluster.
func awaitOrders(t *testing.T, fake *kfake.Cluster, n int, opts ...kgo.Opt) {
	t.Helper()
	client := kafkatest.ClientAt(t, fake.ListenAddrs(), append(opts, kgo.ConsumeTopics(orders))...)
	for read := 0; read < n; {
		fetches := client.PollFetches(t.Context())
		require.NoError(t, fetches.Err())
		read += fetches.NumRecords()
	}
}

// Row S6 of guarantees.md: commands that ask the brokers do it over TLS, with the certificate of the
// files, and with SASL, also with Kafka's transactions; the secret is in no output.
func TestCommandsReachSecuredBrokers(t *testing.T) {
	t.Parallel()
	for mechanism, exactlyOnce := range map[string]bool{"plain": false, "scram-sha-256": false, "scram-sha-512": true} {
		t.Run(mechanism, func(t *testing.T) {
			t.Parallel()
			signer := newAuthority(t)
			server := signer.server(t, nil)
			server.ClientAuth, server.ClientCAs = tls.RequireAndVerifyClientCert, signer.pool()
			certificate, key := signer.issue(t, nil)
			pair, err := tls.X509KeyPair(certificate, key)
			require.NoError(t, err)
			fake := kafkatest.Fake(t, kfake.TLS(server), kfake.EnableSASL(), kfake.SeedTopics(1, orders),
				kfake.Superuser(strings.ToUpper(mechanism), "relay", kafkaCanary), kfake.Superuser("SCRAM-SHA-256", "reader", "reader"))
			address := pgtest.Database(t)
			environment := secured(fake, address, map[string]string{
				"KAFKA_TLS": "true", "KAFKA_CA_FILE": signer.file, "KAFKA_SASL_MECHANISM": mechanism,
				"KAFKA_USERNAME": "relay", "KAFKA_PASSWORD_FILE": file(t, kafkaCanary+"\n"), "KAFKA_CERT_FILE": file(t, string(certificate)), "KAFKA_KEY_FILE": file(t, string(key)),
			})
			execSQL(t, connect(t, address), "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
			written, end := inBackground(t, environment, "run", "--log-level", "debug", fmt.Sprint("--exactly-once=", exactlyOnce))
			awaitOrders(t, fake, 1, kgo.DialTLSConfig(&tls.Config{RootCAs: signer.pool(), MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}),
				kgo.SASL(scram.Auth{User: "reader", Pass: "reader"}.AsSha256Mechanism()))
			assert.Zero(t, end(), written)
			assertNoCanary(t, result{stderr: written.String()}, "run")
			r := run(t, environment, "doctor")
			assert.Contains(t, r.stdout, brokersAnswer)
			assertNoCanary(t, r, "doctor")
		})
	}
}

// Row S6 of guarantees.md: a server that is not trusted, or does not trust us, gets nothing, and
// the error names the reason.
func TestBrokersAreRefused(t *testing.T) {
	t.Parallel()
	signer := newAuthority(t)
	demanding := signer.server(t, nil)
	demanding.ClientAuth, demanding.ClientCAs = tls.RequireAndVerifyClientCert, signer.pool()
	for name, c := range map[string]struct {
		server *tls.Config // nil: no TLS
		more   map[string]string
		want   string
	}{
		"unknown authority": {signer.server(t, nil), map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": newAuthority(t).file}, "certificate signed by unknown authority"},
		"other host": {
			signer.server(t, func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 2)} }),
			map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": signer.file},
			"certificate is valid for 127.0.0.2, not 127.0.0.1",
		},
		"expired": {
			signer.server(t, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }),
			map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": signer.file},
			"certificate has expired",
		},
		"old version": {
			&tls.Config{Certificates: signer.server(t, nil).Certificates, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11},
			map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": signer.file},
			"protocol version",
		},
		"no certificate": {demanding, map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": signer.file}, "certificate required"},
		"no TLS there":   {nil, map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": signer.file}, "and whether it requires --kafka-tls and --kafka-sasl-mechanism"},
		"no TLS here":    {signer.server(t, nil), nil, "is TLS missing?"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var opts []kfake.Opt
			if c.server != nil {
				opts = append(opts, kfake.TLS(c.server))
			}
			fake := kafkatest.Fake(t, opts...)
			r := run(t, secured(fake, pgtest.Database(t), c.more), "doctor", "--timeout", "2s")
			assert.Equal(t, 1, r.code)
			assert.Contains(t, r.stdout, c.want)
		})
	}
}

// Rows S3, S6 of guarantees.md: while the brokers refuse the password, or the token, rows wait, none
// is dead, and what is said does not hold it. The right one, written to the file, is taken at the
// next connection, and when the broker asks for reauthentication (KIP-368).
func TestRotatedKafkaSecrets(t *testing.T) {
	t.Parallel()
	for mechanism, c := range map[string]struct {
		settings       map[string]string
		setting, login string
	}{
		"plain":       {map[string]string{"KAFKA_USERNAME": "relay"}, "KAFKA_PASSWORD_FILE", "\x00relay\x00%s"},
		"oauthbearer": {map[string]string{}, "KAFKA_TOKEN_FILE", "n,,\x01auth=Bearer %s\x01\x01"},
	} {
		t.Run(mechanism, func(t *testing.T) {
			t.Parallel()
			const wrong, first, second = canaryHead + "wrong" + canaryTail, canaryHead + ".first", canaryHead + ".second"
			var wanted atomic.Value
			var refused atomic.Int64
			wanted.Store(first)
			fake := gatekeeper(t, time.Second, func(_, credentials string) bool {
				fits := credentials == fmt.Sprintf(c.login, wanted.Load())
				if !fits {
					refused.Add(1)
				}
				return fits
			}, kfake.SeedTopics(1, orders))
			address := pgtest.Database(t)
			conn := connect(t, address)
			secret := file(t, wrong)
			c.settings["KAFKA_SASL_MECHANISM"], c.settings[c.setting] = mechanism, secret
			execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
			written, end := inBackground(t, secured(fake, address, c.settings), "run", "--log-level", "debug")
			written.await(t, `no broker answers: rows wait in the outbox until one does; check --brokers`)
			written.await(t, `SASL_AUTHENTICATION_FAILED`)
			rewrite(t, secret, first+"\n")
			awaitOrders(t, fake, 1)

			wanted.Store(second)
			before, published := refused.Load(), 1
			testwait.True(t, "the broker refuses what it took before", func() bool {
				execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
				published++
				return refused.Load() > before
			})
			rewrite(t, secret, second)
			awaitOrders(t, fake, published)
			assert.Zero(t, end(), written)
			assertNoCanary(t, result{stderr: written.String()}, "run")
			var dead int
			require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox_dead").Scan(&dead))
			assert.Zero(t, dead)
		})
	}
}

// Row S6 of guarantees.md: if a broker on this machine names brokers on others, no unencrypted
// connection to those is made, unless --insecure allows it. (0.0.0.0 leads to this machine, but does
// not look like it.)
func TestAdvertisedBrokersGetNothingInTheClear(t *testing.T) {
	t.Parallel()
	outside := newDowngrade(t)
	address := "0.0.0.0:" + outside.port(t)
	fake := gatekeeper(t, 0, func(string, string) bool { return true }, kfake.SeedTopics(1, orders))
	advertise(t, fake, address)
	database := pgtest.Database(t)
	environment := secured(fake, database, map[string]string{"KAFKA_SASL_MECHANISM": "plain", "KAFKA_USERNAME": "relay", "KAFKA_PASSWORD_FILE": file(t, kafkaCanary)})
	execSQL(t, connect(t, database), "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
	written, end := inBackground(t, environment, "run", "--log-level", "debug")
	written.await(t, `broker `+address+`, at `+address+`, is on another machine`)
	assert.Zero(t, end(), written)
	assertNoCanary(t, result{stderr: written.String()}, "run")
	assert.Empty(t, outside.stop(), "what the other machine got")

	outside, fake = newDowngrade(t), kafkatest.Fake(t)
	advertise(t, fake, "0.0.0.0:"+outside.port(t))
	r := run(t, secured(fake, database, map[string]string{"INSECURE": "true"}), "doctor", "--timeout", "2s")
	assert.Contains(t, r.stdout, "broker 77 does not answer", "it is none")
	assert.Contains(t, outside.stop(), "outbox-relay", "the client's name")
}

// advertise makes a cluster name one more broker, which leads all topics' partitions.
func advertise(t *testing.T, fake *kfake.Cluster, address string) {
	t.Helper()
	host, text, err := net.SplitHostPort(address)
	require.NoError(t, err)
	port, err := strconv.ParseUint(text, 10, 16)
	require.NoError(t, err)
	const id = 77
	fake.ControlKey(int16(kmsg.Metadata), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		response := request.ResponseKind().(*kmsg.MetadataResponse)
		for i, own := range fake.ListenAddrs() {
			ownHost, ownPort, _ := net.SplitHostPort(own)
			n, _ := strconv.ParseUint(ownPort, 10, 16)
			broker := kmsg.NewMetadataResponseBroker()
			broker.NodeID, broker.Host, broker.Port = int32(i), ownHost, int32(n)
			response.Brokers = append(response.Brokers, broker)
		}
		broker := kmsg.NewMetadataResponseBroker()
		broker.NodeID, broker.Host, broker.Port = id, host, int32(port)
		response.Brokers = append(response.Brokers, broker)
		for _, asked := range request.(*kmsg.MetadataRequest).Topics {
			topic := kmsg.NewMetadataResponseTopic()
			topic.Topic, topic.TopicID = asked.Topic, asked.TopicID
			partition := kmsg.NewMetadataResponseTopicPartition()
			partition.Leader, partition.Replicas, partition.ISR = id, []int32{id}, []int32{id}
			topic.Partitions = append(topic.Partitions, partition)
			response.Topics = append(response.Topics, topic)
		}
		return response, nil, true
	})
}
