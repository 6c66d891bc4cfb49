package main_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

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

// Row S6 of guarantees.md: every command that asks the brokers does it over TLS and with each
// mechanism of SASL, also with Kafka's transactions; the secret is in no output.
func TestCommandsReachSecuredBrokers(t *testing.T) {
	t.Parallel()
	for _, mechanism := range []string{"plain", "scram-sha-256", "scram-sha-512"} {
		t.Run(mechanism, func(t *testing.T) {
			t.Parallel()
			signer := newAuthority(t)
			fake := kafkatest.Fake(t, kfake.TLS(signer.server(t, nil)), kfake.EnableSASL(), kfake.SeedTopics(1, orders),
				kfake.Superuser(strings.ToUpper(mechanism), "relay", kafkaCanary), kfake.Superuser("SCRAM-SHA-256", "reader", "reader"))
			address := pgtest.Database(t)
			environment := secured(fake, address, map[string]string{
				"KAFKA_TLS": "true", "KAFKA_CA_FILE": signer.file, "KAFKA_SASL_MECHANISM": mechanism,
				"KAFKA_USERNAME": "relay", "KAFKA_PASSWORD_FILE": file(t, kafkaCanary+"\n"),
			})
			// The second one finds what the first one noted, which with --exactly-once is in Kafka.
			for n := 1; n <= 2; n++ {
				execSQL(t, connect(t, address), "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
				written, end := inBackground(t, environment, "run", "--log-level", "debug", fmt.Sprint("--exactly-once=", mechanism == "scram-sha-512"))
				awaitOrders(t, fake, n, kgo.DialTLSConfig(&tls.Config{RootCAs: signer.pool(), MinVersion: tls.VersionTLS12}),
					kgo.SASL(scram.Auth{User: "reader", Pass: "reader"}.AsSha256Mechanism()))
				assert.Zero(t, end(), written)
				assert.NotContains(t, written.String(), "level=WARN")
				assertNoCanary(t, result{stderr: written.String()}, "run")
			}
			for _, c := range []struct{ command, want string }{
				{"doctor", brokersAnswer},
				{"verify", ""},
				{"positions", "\ndefault  0 "},
				{"explain " + orders + "/0/0", "  topic "},
				{"replay --from 2000-01-01T00:00:00Z --to 2100-01-01T00:00:00Z", "2 of 2 rows published again"},
			} {
				r := run(t, environment, strings.Fields(c.command)...)
				assert.Contains(t, r.stdout, c.want, c.command)
				assert.Empty(t, r.stderr, c.command)
				assert.True(t, r.code == 0 || c.command == "doctor", "%s: %+v", c.command, r) // which also judges the test's database
				assertNoCanary(t, r, c.command)
			}
		})
	}
}

// Row S6 of guarantees.md: a server that is not trusted, or does not trust us, gets nothing, and
// the error names the reason.
func TestBrokersAreRefused(t *testing.T) {
	t.Parallel()
	signer := newAuthority(t)
	for name, c := range map[string]struct {
		server *tls.Config // nil: no TLS
		more   map[string]string
		want   string
	}{
		"unknown authority": {signer.server(t, nil), map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": newAuthority(t).file}, "certificate signed by unknown authority"},
		"system's":          {signer.server(t, nil), map[string]string{"KAFKA_TLS": "1"}, "certificate signed by unknown authority"},
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
		"no TLS there": {nil, map[string]string{"KAFKA_TLS": "1", "KAFKA_CA_FILE": signer.file}, "and whether it requires --kafka-tls and --kafka-sasl-mechanism"},
		"no TLS here":  {signer.server(t, nil), nil, "is TLS missing?"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var opts []kfake.Opt
			if c.server != nil {
				opts = append(opts, kfake.TLS(c.server))
			}
			fake := kafkatest.Fake(t, opts...)
			r := run(t, secured(fake, pgtest.Database(t), c.more), "doctor", "--timeout", "5s")
			assert.Equal(t, 1, r.code)
			assert.Contains(t, r.stdout, c.want)
		})
	}
}

// Row S6 of guarantees.md: a broker that asks for a certificate gets the one of the files.
func TestClientCertificate(t *testing.T) {
	t.Parallel()
	signer := newAuthority(t)
	server := signer.server(t, nil)
	server.ClientAuth, server.ClientCAs = tls.RequireAndVerifyClientCert, signer.pool()
	fake := kafkatest.Fake(t, kfake.TLS(server))
	certificate, key := signer.issue(t, nil)
	environment := secured(fake, pgtest.Database(t), map[string]string{
		"KAFKA_TLS": "true", "KAFKA_CA_FILE": signer.file, "KAFKA_CERT_FILE": file(t, string(certificate)), "KAFKA_KEY_FILE": file(t, string(key)),
	})
	r := run(t, environment, "doctor")
	assert.Contains(t, r.stdout, brokersAnswer)
	delete(environment, "OUTBOX_KAFKA_CERT_FILE")
	delete(environment, "OUTBOX_KAFKA_KEY_FILE")
	r = run(t, environment, "doctor", "--timeout", "5s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "certificate required")
}

// Rows S3, S6 of guarantees.md: while the brokers refuse the password rows wait, none is dead, and
// what is said does not hold it: at the start and in the middle. The right one, written to the
// file, is taken at the next connection.
func TestRotatedKafkaPassword(t *testing.T) {
	t.Parallel()
	var wanted atomic.Value
	var refused atomic.Int64
	wanted.Store(kafkaCanary)
	fake := gatekeeper(t, 3*time.Second, func(mechanism, credentials string) bool {
		fits := mechanism == "PLAIN" && credentials == "\x00relay\x00"+wanted.Load().(string)
		if !fits {
			refused.Add(1)
		}
		return fits
	}, kfake.SeedTopics(1, orders))
	address := pgtest.Database(t)
	conn := connect(t, address)
	password := file(t, canaryHead+"wrong"+canaryTail)
	environment := secured(fake, address, map[string]string{"KAFKA_SASL_MECHANISM": "plain", "KAFKA_USERNAME": "relay", "KAFKA_PASSWORD_FILE": password})
	r := run(t, environment, "doctor", "--timeout", "5s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "SASL_AUTHENTICATION_FAILED")
	assertNoCanary(t, r, "doctor")

	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
	written, end := inBackground(t, environment, "run", "--log-level", "debug")
	written.await(t, `no broker answers`)
	written.await(t, `SASL_AUTHENTICATION_FAILED`)
	rewrite(t, password, kafkaCanary)
	awaitOrders(t, fake, 1)

	const next = canaryHead + "next"
	wanted.Store(next)
	before, published := refused.Load(), 1
	require.Eventually(t, func() bool {
		execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
		published++
		return refused.Load() > before+2
	}, commandMax, 100*time.Millisecond)
	rewrite(t, password, next)
	awaitOrders(t, fake, published)
	assert.Zero(t, end(), written)
	assertNoCanary(t, result{stderr: written.String()}, "run")
	var dead int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox_dead").Scan(&dead))
	assert.Zero(t, dead)
}

// Row S6 of guarantees.md: a token is read again when the broker asks for reauthentication
// (KIP-368) on an open connection.
func TestRotatedKafkaToken(t *testing.T) {
	t.Parallel()
	const first, second = canaryHead + ".first", canaryHead + ".second"
	var accepted atomic.Value
	fake := gatekeeper(t, 3*time.Second, func(mechanism, credentials string) bool {
		_, rest, _ := strings.Cut(credentials, "auth=Bearer ")
		token, _, _ := strings.Cut(rest, "\x01")
		accepted.Store(token)
		return mechanism == "OAUTHBEARER" && (token == first || token == second)
	}, kfake.SeedTopics(1, orders))
	address := pgtest.Database(t)
	conn := connect(t, address)
	token := file(t, first+"\n")
	written, end := inBackground(t, secured(fake, address, map[string]string{"KAFKA_SASL_MECHANISM": "oauthbearer", "KAFKA_TOKEN_FILE": token}), "run")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
	awaitOrders(t, fake, 1)
	require.Equal(t, first, accepted.Load())
	rewrite(t, token, second)
	published := 1
	require.Eventually(t, func() bool {
		execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
		published++
		return accepted.Load() == second
	}, commandMax, 100*time.Millisecond)
	awaitOrders(t, fake, published)
	assert.Zero(t, end(), written)
	assertNoCanary(t, result{stderr: written.String()}, "run")
}

// Row S6 of guarantees.md: if a broker on this machine names brokers on others, no unencrypted
// connection to those is made, neither with a secret nor without one. (0.0.0.0 leads to this
// machine, but does not look like it.)
func TestAdvertisedBrokersGetNothingInTheClear(t *testing.T) {
	t.Parallel()
	credentials := map[string]string{"KAFKA_SASL_MECHANISM": "plain", "KAFKA_USERNAME": "relay", "KAFKA_PASSWORD_FILE": file(t, kafkaCanary)}
	for name, more := range map[string]map[string]string{"no secret": nil, "secret": credentials} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			outside := newDowngrade(t)
			address := "0.0.0.0:" + outside.port(t)
			fake := gatekeeper(t, 0, func(string, string) bool { return true }, kfake.SeedTopics(1, orders))
			advertise(t, fake, address)
			database := pgtest.Database(t)
			environment := secured(fake, database, more)
			r := run(t, environment, "doctor", "--timeout", "5s")
			assert.Equal(t, 1, r.code, r)
			assert.Contains(t, r.stdout, "broker "+address+", at "+address+", is on another machine, and without TLS")

			execSQL(t, connect(t, database), "INSERT INTO effectonce.outbox (topic) VALUES ($1)", orders)
			written, end := inBackground(t, environment, "run", "--log-level", "debug")
			written.await(t, `broker `+address+`, at `+address+`, is on another machine`)
			assert.Zero(t, end(), written)
			assertNoCanary(t, result{stdout: r.stdout, stderr: written.String()}, name)
			assert.Empty(t, outside.stop(), "what the other machine got")
		})
	}
}

// Row S6 of guarantees.md: with --insecure, another machine is reached unencrypted.
func TestInsecureReachesAdvertisedBrokers(t *testing.T) {
	t.Parallel()
	outside := newDowngrade(t)
	fake := kafkatest.Fake(t)
	advertise(t, fake, "0.0.0.0:"+outside.port(t))
	r := run(t, secured(fake, pgtest.Database(t), map[string]string{"INSECURE": "true"}), "doctor", "--timeout", "5s")
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
