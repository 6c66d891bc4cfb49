package main_test

import (
	"context"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const canaryPassword = "canary-of-the-relay"

// plainRole returns the URL of a role that may connect and nothing else. Roles belong to the
// cluster, so it goes when the test ends.
func plainRole(t *testing.T, address string) string {
	t.Helper()
	role := fmt.Sprintf("effectonce_plain_%d", time.Now().UnixNano())
	conn := connect(t, address)
	execSQL(t, conn, "CREATE ROLE "+role+" LOGIN PASSWORD '"+canaryPassword+"'")
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		conn, err := pgx.Connect(ctx, address)
		if assert.NoError(t, err) {
			defer func() { _ = conn.Close(ctx) }()
			_, err = conn.Exec(ctx, "DROP OWNED BY "+role+"; DROP ROLE "+role)
			assert.NoError(t, err)
		}
	})
	u, err := url.Parse(address)
	require.NoError(t, err)
	u.User = url.UserPassword(role, canaryPassword)
	return u.String()
}

// grant runs what the doctor says a role lacks, as the owner.
func grant(t *testing.T, address, role string) {
	t.Helper()
	r := runOn(t, role, "doctor")
	remedy := regexp.MustCompile(`as the owner of the schema: (.*)`).FindStringSubmatch(r.stdout)
	require.NotNil(t, remedy, r.stdout)
	execSQL(t, connect(t, address), remedy[1])
}

func relayEnvironment(t *testing.T, address string) map[string]string {
	t.Helper()
	return map[string]string{"OUTBOX_DATABASE_URL": address, "KAFKA_BROKERS": strings.Join(kafkatest.Brokers(t), ",")}
}

// awaitRecords reads a topic until it has n records.
func awaitRecords(t *testing.T, topic string, n int) []*kgo.Record {
	t.Helper()
	client := kafkatest.Client(t, kgo.ConsumeTopics(topic))
	var records []*kgo.Record
	for len(records) < n {
		fetches := client.PollFetches(t.Context())
		require.NoError(t, fetches.Err())
		records = append(records, fetches.Records()...)
	}
	return records
}

// The relay publishes what is committed, with no more rights than the doctor asks for, and stops
// cleanly: nothing is left to publish, the lease is released and the log has no warning. Row S3 of
// guarantees.md: the log does not hold the password either.
func TestRunPublishesAndDrains(t *testing.T) {
	longtest.Only(t, "a slow machine warns in the log")
	t.Parallel()
	address := pgtest.Database(t)
	role := plainRole(t, address)
	grant(t, address, role)
	topic := kafkatest.Topic(t, 1)
	conn := connect(t, address)
	stderr, end := inBackground(t, relayEnvironment(t, role), "run", "--lease", "30s", "--log-format", "json", "--log-level", "debug")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, key, payload) SELECT $1, 'k', convert_to(n::text, 'UTF8') FROM generate_series(1, 20) n", topic)
	for i, record := range awaitRecords(t, topic, 20) {
		assert.Equal(t, fmt.Sprint(i+1), string(record.Value))
	}
	stderr.await(t, "relay took the lease")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('never-created')")
	stderr.await(t, "moved to outbox_dead")
	require.Zero(t, end(), stderr)
	assert.Contains(t, stderr.String(), "relay drains")
	assert.Contains(t, stderr.String(), "relay stopped")
	assert.NotContains(t, stderr.String(), `"level":"WARN"`)
	assert.NotContains(t, stderr.String(), canaryPassword)

	v := runOn(t, address, "status", "--interval", "0s", "--json").object(t)
	relay := v["relays"].([]any)[0].(map[string]any)
	assert.Equal(t, false, relay["live"])
	assert.InDelta(t, 0, relay["waiting"], 0)
	assert.InDelta(t, 20, relay["published"], 0)
}

// Row O25 of guarantees.md: the relay refuses a database that takes no writes, and says which of
// the two reasons it is.
func TestRunRefusesReadOnly(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, "ALTER DATABASE "+pgx.Identifier{conn.Config().Database}.Sanitize()+" SET default_transaction_read_only = on")
	r := runOn(t, address, "run", "--brokers", "127.0.0.1:1")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "it is read-only")
	assert.Contains(t, r.stderr, "RESET default_transaction_read_only")
	assert.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
}

// Row O25 of guarantees.md: the relay refuses a standby, which would show it commits in another
// order than the primary. With several hosts it looks for the primary among them.
func TestRunRefusesStandby(t *testing.T) {
	t.Parallel()
	standby := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, standby.URL)
	// A server that finds this file waits for a primary indefinitely, and answers reads.
	execSQL(t, connect(t, standby.URL), "CHECKPOINT")
	execSQL(t, connect(t, standby.URL), "COPY (SELECT) TO PROGRAM 'cat > standby.signal'")
	require.NoError(t, standby.Kill(t.Context()))
	require.NoError(t, standby.Restart(t.Context()))
	require.Zero(t, runOn(t, standby.URL, "migrate", "status").code, "a standby shows its schema")

	r := runOn(t, standby.URL, "run", "--brokers", "127.0.0.1:1")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "it is a standby: let the database URL name the primary")
	assert.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
	assert.Equal(t, 1, runOn(t, standby.URL, "migrate", "up").code)
	assert.Equal(t, "fail", severities(t, runOn(t, standby.URL, "doctor", "--json"))["writable"])
	assert.Zero(t, runOn(t, standby.URL, "status", "--interval", "0s").code, "looking is allowed")
}

// A database without the tables is refused before anything else happens.
func TestRunRefusesMissingSchema(t *testing.T) {
	t.Parallel()
	r := runOn(t, pgtest.EmptyDatabase(t), "run", "--brokers", "127.0.0.1:1")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "error: schema effectonce is not installed in this database: run \"outbox-relay migrate up\"\n", r.stderr)
}

// Unreachable brokers do not end the relay: it logs them, with the remedy, and stops on a signal.
func TestRunWaitsForBrokers(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	environment := map[string]string{"DATABASE_URL": address, "OUTBOX_BROKERS": "127.0.0.1:1"}
	stderr, end := inBackground(t, environment, "run", "--drain-max", "50ms")
	stderr.await(t, "no broker answers: rows wait in the outbox until one does; check --brokers and the network")
	stderr.await(t, "relay took the lease")
	execSQL(t, connect(t, address), insertTwo)
	stderr.await(t, "kafka: unable to open connection to broker")
	assert.Zero(t, end(), stderr)
	v := runOn(t, address, "status", "--interval", "0s", "--json").object(t)
	assert.InDelta(t, 2, v["relays"].([]any)[0].(map[string]any)["waiting"], 0)
}

// SIGTERM drains and exits with 0; a second signal ends the process at once, however long the drain
// may still take.
func TestSignals(t *testing.T) {
	t.Parallel()
	fake := kafkatest.Fake(t)
	// The broker takes the records and never answers, so that there is something to wait for.
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	arrived := make(chan struct{}, 1)
	fake.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		select {
		case arrived <- struct{}{}:
		default:
		}
		fake.SleepControl(func() { <-release })
		return nil, nil, false
	})
	topic := kafkatest.TopicAt(t, fake.ListenAddrs(), 1)
	address := pgtest.Database(t)
	conn := connect(t, address)
	environment := map[string]string{"DATABASE_URL": address, "KAFKA_BROKERS": strings.Join(fake.ListenAddrs(), ",")}
	cmd, written := process(t, environment, "run", "--drain-max", "5m")
	require.NoError(t, cmd.Start())
	written.await(t, "relay took the lease")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), written)
	assert.Contains(t, written.String(), "relay stopped")

	cmd, written = process(t, environment, "run", "--drain-max", "5m")
	require.NoError(t, cmd.Start())
	written.await(t, "relay took the lease")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	select {
	case <-arrived:
	case <-time.After(commandMax):
		require.FailNow(t, "nothing was produced", written)
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	written.await(t, "relay drains; a second signal ends it at once")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.Error(t, cmd.Wait(), written)
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	assert.Equal(t, syscall.SIGTERM, status.Signal())
	assert.NotContains(t, written.String(), "relay stopped")
}
