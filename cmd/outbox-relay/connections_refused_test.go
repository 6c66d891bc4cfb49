package main_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

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
		"run", "doctor", "status", "positions", "explain 00000000-0000-7000-8000-000000000000", "verify", "replay --from 2000-01-01T00:00:00Z --to 2000-01-02T00:00:00Z",
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
