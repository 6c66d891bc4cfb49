package main_test

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// severities reads "doctor --json": what each check found worst.
func severities(t *testing.T, r result) map[string]string {
	t.Helper()
	worst := map[string]string{}
	failed := false
	for _, f := range r.object(t)["findings"].([]any) {
		finding := f.(map[string]any)
		check, severity := finding["check"].(string), finding["severity"].(string)
		if severity != "ok" {
			assert.NotEmpty(t, finding["remedy"], finding)
		}
		failed = failed || severity == "fail"
		if worst[check] != "fail" {
			worst[check] = severity
		}
	}
	assert.Equal(t, !failed, r.object(t)["well"])
	assert.Equal(t, failed, r.code == 1)
	return worst
}

// Every check runs where everything is there, and the topics of rows are among them.
func TestDoctorChecksEverything(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), "INSERT INTO effectonce.outbox (topic) VALUES ('never-created')")
	progress := kafkatest.Topic(t, 1, "cleanup.policy", "compact", "segment.bytes", "8388608", "delete.retention.ms", "600000")
	found := severities(t, runOn(t, address, "doctor", "--json", "--brokers", strings.Join(kafkatest.Brokers(t), ","), "--progress-topic", progress))
	delete(found, "durability") // the server that tests share does not sync
	assert.Equal(t, map[string]string{
		"database": "ok", "server": "ok", "writable": "ok", "transactions": "ok", "rights": "ok",
		"schema": "ok", "sequence": "ok", "definitions": "ok", "pooler": "ok", "replication": "ok", "status": "fail", "keys": "ok",
		"brokers": "ok", "message size": "ok", "topic never-created": "fail", "progress topic " + progress: "ok", "consumers": "ok",
	}, found)
	r := runOn(t, address, "doctor")
	assert.Empty(t, r.stderr)
	assert.Contains(t, r.stdout, "warn  brokers: ")
}

// What is missing stops only the checks that need it, and each says what to do.
func TestDoctorGoesOnWithWhatIsThere(t *testing.T) {
	t.Parallel()
	empty := severities(t, runOn(t, pgtest.EmptyDatabase(t), "doctor", "--json", "--timeout", "2s", "--brokers", "127.0.0.1:1"))
	assert.Equal(t, "fail", empty["schema"])
	assert.Equal(t, "fail", empty["brokers"])
	assert.NotContains(t, empty, "sequence")
	assert.NotContains(t, empty, "rights")

	away := severities(t, runOn(t, "postgres://u@127.0.0.1:1/d", "doctor", "--json", "--brokers", strings.Join(kafkatest.Brokers(t), ",")))
	assert.Equal(t, map[string]string{"database": "fail", "brokers": "ok"}, away)
}

// Property: a server that refuses TLS and then stays silent is reported as not answering in time:
// TLS is not the problem.
func TestDoctorNamesTheCauseOfSilence(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				request := make([]byte, 8)
				if _, err := io.ReadFull(conn, request); err == nil && request[7] == 0x2f { // SSLRequest
					_, _ = conn.Write([]byte("N"))
				}
				_, _ = io.Copy(io.Discard, conn)
			}()
		}
	}()
	r := runOn(t, "postgres://u@"+listener.Addr().String()+"/d?sslmode=prefer", "doctor", "--timeout", "300ms")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "no answer in time")
	assert.NotContains(t, r.stdout, "TLS")
}
