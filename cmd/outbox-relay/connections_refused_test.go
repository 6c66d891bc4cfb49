package main_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Row S6: settings that contradict each other, or would show a secret, are refused all at once.
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
			[]string{"--kafka-token-file: want --kafka-sasl-mechanism oauthbearer"},
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
		"plain to others":     {append(away, plain...), []string{"plain without TLS to another machine"}},
		"token to others":     {append(away, "--kafka-sasl-mechanism", "oauthbearer", "--kafka-token-file", secret), []string{"oauthbearer without TLS to another machine"}},
		"database in the clear": {
			[]string{"--database-url", "postgres://u@127.0.0.1:1,db.invalid:1/d?sslmode=disable"},
			[]string{"--database-url: sslmode=disable to db.invalid"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, command := range []string{"doctor", "status"} {
				r := run(t, map[string]string{"DATABASE_URL": "postgres://u@127.0.0.1:1/d"}, append([]string{command}, c.args...)...)
				assert.Equal(t, 2, r.code, r)
				for _, want := range c.want {
					assert.Contains(t, r.stderr, want)
				}
				assert.Len(t, strings.Split(strings.TrimSpace(r.stderr), "\n"), len(c.want), r.stderr)
				assertNoCanary(t, r, name)
			}
		})
	}
}

// Row S6: what is asked for by name is done; what uses no connection takes no offence; and demo, which has no
// TLS, does not go on without it.
func TestInsecureIsSpelledOut(t *testing.T) {
	t.Parallel()
	secret := file(t, "s")
	args := []string{
		"status", "--database-url", "postgres://u@db.invalid:1/d?sslmode=disable",
		"--brokers", "kafka.invalid:9092", "--kafka-sasl-mechanism", "plain", "--kafka-username", "u", "--kafka-password-file", secret,
	}
	r := run(t, nil, append(args, "--insecure")...)
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "error: cannot connect to the database at db.invalid:1/d: the host name is not known: check the host\n", r.stderr)
	r = run(t, map[string]string{"OUTBOX_KAFKA_PASSWORD_FILE": "/nowhere", "OUTBOX_KAFKA_SASL_MECHANISM": "?"}, "version")
	assert.Zero(t, r.code, r)
	for _, command := range [][]string{{"demo"}, {"bench", "relay"}, {"bench", "consume"}} {
		r = run(t, nil, append(command, "--brokers", "127.0.0.1:1", "--kafka-tls")...)
		assert.Equal(t, 2, r.code, command)
		assert.Contains(t, r.stderr, "knows neither TLS nor SASL")
	}
}

// Row S6: a server on another machine that is not known for certain gives one line of warning with the remedy;
// this machine, and what was asked for, give none.
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
		assert.Equal(t, 1, r.code, query)
		lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
		if mode == "" {
			assert.Len(t, lines, 1, "%s: %s", query, r.stderr)
			continue
		}
		require.Len(t, lines, 2, "%s: %s", query, r.stderr)
		assert.Contains(t, lines[0], "set sslmode=verify-full")
		assert.Contains(t, lines[0], "host=db.invalid sslmode="+mode, query)
		r = run(t, nil, "status", "--insecure", "--database-url", "postgres://u@"+query)
		assert.NotContains(t, r.stderr, "verify-full", query)
	}
	r := runOn(t, "postgres://u@127.0.0.1:1/d", "doctor", "--brokers", "kafka.invalid", "--timeout", "200ms")
	assert.Contains(t, r.stderr, "give --kafka-tls; --insecure if you trust that network")
	assert.Contains(t, r.stderr, "brokers=kafka.invalid:9092")
	for _, flag := range []string{"--kafka-tls", "--insecure"} {
		r = runOn(t, "postgres://u@127.0.0.1:1/d", "doctor", "--brokers", "kafka.invalid", "--timeout", "200ms", flag)
		assert.Empty(t, r.stderr, flag)
	}
}

// Row S6: a password in a file is taken before one in the URL, and one that changed with the next connection,
// also by a relay that runs.
func TestRotatedDatabasePassword(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	role := plainRole(t, address)
	grant(t, address, role)
	conn := connect(t, address)
	password := file(t, canaryPassword+"\n")
	withWrong := strings.Replace(role, canaryPassword, "wrong", 1)
	environment := relayEnvironment(t, withWrong)
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
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	awaitRecords(t, topic, 2)
	assert.Zero(t, end(), written)
	assertNoCanary(t, result{stderr: written.String()}, "run")
	assert.NotContains(t, written.String(), canaryPassword)

	r := run(t, environment, "doctor")
	assert.Contains(t, r.stdout, "ok    database: ")
	rewrite(t, password, canaryHead+"old")
	r = run(t, environment, "doctor")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "user or password is wrong (28P01)")
	assertNoCanary(t, r, "doctor")
}
