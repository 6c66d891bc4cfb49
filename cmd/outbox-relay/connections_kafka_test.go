package main_test

import (
	"context"
	"crypto/tls"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// guarded is a Kafka, in a container where an engine answers, that takes clients over TLS only, and
// logs them in by PLAIN or SCRAM. The returned options are those of an administrator.
func guarded(t *testing.T, signer *authority) (k *servers.Kafka, admin []kgo.Opt) {
	t.Helper()
	certificate, key := signer.issue(t, nil)
	quoted := strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(kafkaCanary)
	const listener, login = "listener.name.plaintext.", "org.apache.kafka.common.security."
	settings := map[string]string{
		// The names of listeners stay as they are: the image asks for files of keys if one is called SSL.
		"listener.security.protocol.map":            "PLAINTEXT:SASL_SSL,CONTROLLER:PLAINTEXT,BROKER:PLAINTEXT",
		listener + "ssl.keystore.type":              "PEM",
		listener + "ssl.keystore.key":               string(key),
		listener + "ssl.keystore.certificate.chain": string(certificate),
		listener + "sasl.enabled.mechanisms":        "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
		listener + "plain.sasl.jaas.config":         login + `plain.PlainLoginModule required user_admin="admin" user_relay="` + quoted + `";`,
		listener + "scram-sha-256.sasl.jaas.config": login + "scram.ScramLoginModule required;",
		listener + "scram-sha-512.sasl.jaas.config": login + "scram.ScramLoginModule required;",
	}
	line := strings.NewReplacer(`\`, `\\`, "\n", `\n`) // of a file of properties
	for name, value := range maps.Clone(settings) {
		settings[name] = line.Replace(value)
	}
	admin = []kgo.Opt{
		kgo.DialTLSConfig(&tls.Config{RootCAs: signer.pool(), MinVersion: tls.VersionTLS12}),
		kgo.SASL(plain.Auth{User: "admin", Pass: "admin"}.AsMechanism()),
	}
	users := []kfake.Opt{kfake.NumBrokers(1), kfake.TLS(signer.server(t, nil)), kfake.EnableSASL(), kfake.Superuser("PLAIN", "admin", "admin"), kfake.Superuser("PLAIN", "relay", kafkaCanary)}
	k, err := servers.StartKafka(t.Context(), servers.KafkaOptions{Own: true, Settings: settings, Client: admin, Fake: users})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, k.Stop(context.WithoutCancel(t.Context()))) })
	return k, admin
}

// Row S6 of guarantees.md: a real broker that asks for TLS and a login has both, with each mechanism
// and with Kafka's transactions, and the reason is named where it refuses or is not trusted.
func TestRealBrokerIsReachedOrNamesTheReason(t *testing.T) {
	t.Parallel()
	signer := newAuthority(t)
	kafka, admin := guarded(t, signer)
	brokers := kafka.Brokers
	client := kadm.NewClient(kafkatest.ClientAt(t, brokers, admin...))
	for _, mechanism := range []string{"plain", "scram-sha-256", "scram-sha-512"} {
		if scram, ok := map[string]kadm.ScramMechanism{"scram-sha-256": kadm.ScramSha256, "scram-sha-512": kadm.ScramSha512}[mechanism]; ok {
			done, err := client.AlterUserSCRAMs(t.Context(), nil, []kadm.UpsertSCRAM{{User: "relay", Mechanism: scram, Iterations: 4096, Password: kafkaCanary}})
			require.NoError(t, err)
			require.NoError(t, done.Error())
		}
		_, err := client.CreateTopic(t.Context(), 1, 1, nil, mechanism)
		require.NoError(t, err)
		commandsReach(t, brokers, mechanism, mechanism, signer, "ok    brokers: 1 of 1 brokers answer", admin...)
	}
	login := map[string]string{
		"KAFKA_TLS": "true", "KAFKA_CA_FILE": signer.file, "KAFKA_SASL_MECHANISM": "scram-sha-256", "KAFKA_USERNAME": "relay", "KAFKA_PASSWORD_FILE": file(t, kafkaCanary),
	}
	for name, c := range map[string]struct {
		more map[string]string
		want string
	}{
		"unknown authority": {map[string]string{"KAFKA_CA_FILE": newAuthority(t).file}, "certificate signed by unknown authority"},
		"wrong password":    {map[string]string{"KAFKA_PASSWORD_FILE": file(t, "another")}, "SASL"},
		"no login":          {map[string]string{"KAFKA_SASL_MECHANISM": "", "KAFKA_USERNAME": "", "KAFKA_PASSWORD_FILE": ""}, "--kafka-sasl-mechanism"},
	} {
		if name == "wrong password" && kafka.Fake != nil {
			t.Log("kfake hangs up at a wrong password: TestRotatedKafkaPassword has the answer of Kafka")
			continue
		}
		environment := maps.Clone(login)
		maps.Copy(environment, c.more)
		r := run(t, secured(brokers, pgtest.Database(t), environment), "doctor", "--timeout", "5s")
		assert.Equal(t, 1, r.code, name)
		assert.Contains(t, r.stdout, c.want, name)
		assertNoCanary(t, r, name)
	}
}
