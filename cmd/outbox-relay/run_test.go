package main_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
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

// The relay publishes what is committed, with no more rights than the doctor asks
// for, and stops cleanly: nothing is left to publish and the lease is released. Row S3 of
// guarantees.md: the log does not hold the password.
func TestRunPublishesAndDrains(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	role := plainRole(t, address)
	grant(t, address, role)
	topic := kafkatest.Topic(t, 1)
	conn := connect(t, address)
	environment := relayEnvironment(t, role)
	stderr, end := inBackground(t, environment, "run", "--lease", "5m", "--log-format", "json", "--log-level", "debug")
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, key, payload) SELECT $1, 'k', convert_to(n::text, 'UTF8') FROM generate_series(1, 20) n", topic)
	for i, record := range awaitRecords(t, topic, 20) {
		assert.Equal(t, fmt.Sprint(i+1), string(record.Value))
	}
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('never-created')")
	stderr.await(t, "moved to outbox_dead")
	require.Zero(t, end(), stderr)
	assert.Contains(t, stderr.String(), "relay drains")
	assert.Contains(t, stderr.String(), "relay stopped")
	assert.NotContains(t, stderr.String(), "SQLSTATE 42501")
	assert.NotContains(t, stderr.String(), canaryPassword)

	v := runOn(t, address, "status", "--interval", "0s", "--json").object(t)
	relay := v["relays"].([]any)[0].(map[string]any)
	assert.Equal(t, []any{false, 0.0, 20.0}, []any{relay["live"], relay["waiting"], relay["published"]})
}

// Property: a relay that starts while its database is unreachable waits for it, logs that, and
// publishes once it answers; it gives up after --database-wait, and at once if the database refuses.
func TestRunWaitsForADatabaseThatIsAway(t *testing.T) {
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1)
	execSQL(t, connect(t, address), "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
	there, err := url.Parse(address)
	require.NoError(t, err)
	// Who listens here hangs up at first, and then leads to the database.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	var open atomic.Bool
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if !open.Load() {
				_ = conn.Close()
				continue
			}
			database, err := net.Dial("tcp", there.Host)
			if err != nil {
				_ = conn.Close()
				continue
			}
			go func() { _, _ = io.Copy(database, conn); _ = database.Close() }()
			go func() { _, _ = io.Copy(conn, database); _ = conn.Close() }()
		}
	}()
	gone := *there
	gone.Host = listener.Addr().String()
	start := func(address *url.URL, wait string) (*output, func() int) {
		e := relayEnvironment(t, address.String())
		e["OUTBOX_DATABASE_WAIT"] = wait
		return inBackground(t, e, "run")
	}
	for wait, says := range map[string]string{"0s": "cannot connect to the database", "100ms": "(--database-wait)"} {
		stderr, _ := start(&gone, wait)
		stderr.await(t, says)
		assert.Equal(t, wait != "0s", strings.Contains(stderr.String(), "gave up after"), stderr)
	}
	stderr, end := start(&gone, "1h")
	stderr.await(t, "the database is unreachable: retrying")
	open.Store(true)
	awaitRecords(t, topic, 1)
	assert.Zero(t, end(), stderr)
	refused := *there
	refused.User = url.UserPassword(there.User.Username(), "wrong")
	stderr, _ = start(&refused, "1h")
	stderr.await(t, "user or password is wrong (28P01)")
	assert.NotContains(t, stderr.String(), "retrying")
}

// SIGTERM drains and exits with 0; a second signal ends the process at once, however long the drain
// may still take.
func TestSignals(t *testing.T) {
	t.Parallel()
	brokers, arrived, _ := held(t) // so that there is something to wait for
	topic := kafkatest.TopicAt(t, brokers, 1)
	address := pgtest.Database(t)
	conn := connect(t, address)
	environment := map[string]string{"DATABASE_URL": address, "KAFKA_BROKERS": strings.Join(brokers, ",")}
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
	testwait.Chan(t, "a record is produced", arrived)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	written.await(t, "relay drains; a second signal ends it at once")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.Error(t, cmd.Wait(), written)
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	assert.Equal(t, syscall.SIGTERM, status.Signal())
	assert.NotContains(t, written.String(), "relay stopped")
}
