package command_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
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
	"github.com/twmb/franz-go/pkg/kmsg"

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
	assert.Equal(t, []any{"", 0.0, 20.0}, []any{relay["owner"], relay["waiting"], relay["published"]})
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
	stderr.await(t, "password authentication failed")
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

// listening waits until a relay listens, and returns where.
func listening(t *testing.T, stderr *output) string {
	t.Helper()
	stderr.await(t, " reachable_from=")
	found := regexp.MustCompile(`address=(\S+) reachable_from=`).FindStringSubmatch(stderr.String())
	require.NotNil(t, found, stderr)
	_, port, err := net.SplitHostPort(found[1])
	require.NoError(t, err)
	return "http://127.0.0.1:" + port
}

// get returns 0 if nothing listens.
func get(t *testing.T, address string) (code int, body string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, nil)
	require.NoError(t, err)
	r.Close = true
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(text)
}

func awaitGet(t *testing.T, address string, holds func(code int, body string) bool) {
	t.Helper()
	testwait.For(t, address, func() (string, bool) {
		code, body := get(t, address)
		return fmt.Sprint(code, " ", body), holds(code, body)
	})
}

func contains(code int, text string) func(int, string) bool {
	return func(got int, body string) bool { return got == code && strings.Contains(body, text) }
}

// held keeps a broker from answering to records until the returned function is called.
func held(t *testing.T) (brokers []string, arrived <-chan struct{}, release func()) {
	t.Helper()
	fake := kafkatest.Fake(t)
	gate, first := make(chan struct{}), make(chan struct{}, 1)
	open := false
	release = func() {
		if !open {
			close(gate)
		}
		open = true
	}
	t.Cleanup(release)
	fake.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		select {
		case first <- struct{}{}:
		default:
		}
		fake.SleepControl(func() { <-gate })
		return nil, nil, false
	})
	return fake.ListenAddrs(), first, release
}

// Row S9 of guarantees.md: probes follow a relay through its life: it publishes, drains and is alive
// to the end of it. No endpoint shows a key, a payload, a header or a secret, also not while they
// are in memory.
func TestEndpointsOfARun(t *testing.T) {
	t.Parallel()
	brokers, arrived, release := held(t)
	topic := kafkatest.TopicAt(t, brokers, 1)
	address := pgtest.Database(t)
	conn := connect(t, address)
	environment := map[string]string{
		"DATABASE_URL": address, "KAFKA_BROKERS": strings.Join(brokers, ","), "OUTBOX_LISTEN": "127.0.0.1:0",
		"OUTBOX_METRICS_INTERVAL": "1s", "OUTBOX_DRAIN_MAX": "1m",
	}
	stderr, end := inBackground(t, environment, "run")
	base := listening(t, stderr)
	assert.Contains(t, stderr.String(), `reachable_from="this machine"`)
	awaitGet(t, base+"/readyz", contains(200, `{"ready":true,"relay":"default","state":"publishing","shards_owned":1,"reasons":[]}`))

	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ($1, 'CANARY-key', 'CANARY-payload', '{\"CANARY-header\": \"CANARY-value\"}')", topic)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, payload) VALUES ('never-created', 'CANARY-payload')")
	testwait.Chan(t, "a record is produced", arrived)
	awaitGet(t, base+"/metrics", contains(200, `effectonce_outbox_pending_messages{relay="default"}`))
	for _, address := range []string{base + "/healthz", base + "/readyz", base + "/metrics"} {
		code, body := get(t, address)
		assert.Equal(t, 200, code, address)
		for _, secret := range []string{"CANARY", conn.Config().Password} {
			assert.NotContains(t, body, secret, address)
		}
	}
	code, _ := get(t, base+"/debug/pprof/")
	assert.Equal(t, 404, code)

	done := make(chan int, 1)
	go func() { done <- end() }()
	awaitGet(t, base+"/readyz", contains(503, `"ready":false,"relay":"default","state":"draining"`))
	code, _ = get(t, base+"/healthz")
	assert.Equal(t, 200, code, "a relay that drains is alive")
	release()
	assert.Zero(t, testwait.Chan(t, "the relay's end", done), stderr)
	code, _ = get(t, base+"/healthz")
	assert.Zero(t, code, "nobody listens any more")
}

// Row S9 of guarantees.md: by default only this machine reaches the endpoints. If the default address is in use the relay publishes anyway; if an address was given, it
// is required.
func TestWhereARelayListens(t *testing.T) {
	t.Parallel()
	help := run(t, nil, "run", "--help")
	assert.Regexp(t, `--listen address .*\(default 127\.0\.0\.1:9464\)`, help.stdout)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	base := []string{"run", "--brokers", "127.0.0.1:1", "--database-url", "postgres://u:CANARY@127.0.0.1:1/d"}
	r := run(t, nil, append(base, "--listen", taken.Addr().String())...)
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "error: cannot listen on "+taken.Addr().String())
	assert.Contains(t, r.stderr, "give another --listen, or off")

	// Whichever of the two has the default address, both continue to the database.
	for range 2 {
		if standard, err := net.Listen("tcp", "127.0.0.1:9464"); err == nil {
			t.Cleanup(func() { _ = standard.Close() })
		}
		r = run(t, map[string]string{"OUTBOX_LISTEN": ""}, base...)
		assert.Contains(t, r.stderr, "the default address is in use; give --listen")
		assert.Contains(t, r.stderr, "cannot connect to the database")
	}
}

// Wrong settings of the endpoints are refused at the start.
func TestEndpointSettingsAreRefused(t *testing.T) {
	t.Parallel()
	base := []string{"run", "--brokers", "127.0.0.1:1", "--database-url", "postgres://u@127.0.0.1:1/d"}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no port":   {[]string{"--listen", "127.0.0.1"}, `--listen "127.0.0.1": want host:port, :port for every address of this machine, or off`},
		"no number": {[]string{"--listen", "127.0.0.1:http"}, `want a port, 0 to 65535`},
		"a URL":     {[]string{"--listen", "http://127.0.0.1:1"}, `want host:port`},
		"often":     {[]string{"--metrics-interval", "1ms"}, `--metrics-interval "1ms": want a duration such as 15s, 1s to 10m`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, nil, append(base[:len(base):len(base)], c.args...)...)
			assert.Equal(t, 2, r.code)
			assert.Contains(t, r.stderr, c.want)
		})
	}
}

// Property: ready exits 0 for a replica that works, and 1 for one that cannot publish or does not
// answer.
func TestReadyAsksTheRelay(t *testing.T) {
	t.Parallel()
	answer := atomic.Int32{}
	relay := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "/readyz", r.URL.Path)
		w.WriteHeader(int(answer.Load()))
		_, _ = io.WriteString(w, `{"ready":"?"}`)
	}))
	at := relay.Listener.Addr().String()
	_, port, err := net.SplitHostPort(at)
	require.NoError(t, err)
	answer.Store(http.StatusOK)
	for _, listen := range []string{at, ":" + port, "0.0.0.0:" + port} {
		assert.Zero(t, run(t, map[string]string{"OUTBOX_LISTEN": listen}, "ready").code, listen)
	}
	answer.Store(http.StatusServiceUnavailable)
	assert.Equal(t, result{1, "{\"ready\":\"?\"}\n", ""}, run(t, nil, "ready", "--listen", at))
	relay.Close()
	r := run(t, nil, "ready", "--listen", at)
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "no relay answers at "+at)
	assert.Equal(t, 2, run(t, nil, "ready", "--listen", "off").code)
}
