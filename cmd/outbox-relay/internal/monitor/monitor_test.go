package monitor_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/monitor"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newServer(state *monitor.State) *monitor.Server {
	return monitor.New(monitor.Config{
		Relay: "default", Schema: "effectonce", State: state, Metrics: http.NotFoundHandler(), Logger: slog.New(slog.DiscardHandler),
	})
}

func ask(t *testing.T, handler http.Handler, method, path string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, nil))
	return w
}

func ready(t *testing.T, server *monitor.Server) (code int, v monitor.Readiness) {
	t.Helper()
	w := ask(t, server.Handler(), "GET", "/readyz")
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &v), w.Body)
	assert.Equal(t, w.Code == 200, v.Ready)
	assert.Equal(t, v.Ready, len(v.Reasons) == 0)
	return w.Code, v
}

// awaitReady asks until the answer has a state and is ready or not.
func awaitReady(t *testing.T, server *monitor.Server, pool *pgxpool.Pool, code int, state, reason string) {
	t.Helper()
	testwait.For(t, fmt.Sprint(code, state, reason), func() (monitor.Readiness, bool) {
		if pool != nil {
			server.Ask(pool) // which forgets the last answer
		}
		got, v := ready(t, server)
		return v, got == code && v.State == state && strings.Contains(strings.Join(v.Reasons, "; "), reason)
	})
}

// Row S9 of guarantees.md: a replica is ready while it publishes or stands by and the database
// answers; otherwise it reports why not. It is alive all the time: a database that does not answer
// is no reason to restart it. Row S14: it stays ready when the migration of a next release is done;
// an older schema makes it not ready.
func TestReadiness(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec := func(sql string) {
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	away, err := pgxpool.New(t.Context(), "postgres://u@127.0.0.1:1/d")
	require.NoError(t, err)
	t.Cleanup(away.Close)
	state := monitor.NewState()
	hooks := state.Hooks()
	server := newServer(state)
	alive := func() { assert.Equal(t, 200, ask(t, server.Handler(), "GET", "/healthz").Code) }

	awaitReady(t, server, nil, 503, "starting", "the relay is starting")
	alive()
	state.Running()
	awaitReady(t, server, pool, 503, "waiting", "no replica holds a lease")
	exec("INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until) VALUES ('default', 0, 'other', clock_timestamp() + interval '1 hour')")
	awaitReady(t, server, pool, 200, "standing_by", "")
	exec("UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp() - interval '1 s'")
	awaitReady(t, server, pool, 503, "waiting", "no replica holds a lease")
	hooks.Lease(0, true)
	awaitReady(t, server, pool, 200, "publishing", "")

	exec("UPDATE effectonce.schema_version SET version = version - 1")
	awaitReady(t, server, pool, 503, "publishing", "database schema is too old")
	exec("UPDATE effectonce.schema_version SET version = version + 2")
	awaitReady(t, server, pool, 200, "publishing", "")

	awaitReady(t, server, away, 503, "publishing", "the database does not answer")
	alive()
	_, v := ready(t, server)
	assert.NotContains(t, strings.Join(v.Reasons, ""), "127.0.0.1", "who asks need not know where it is")
	awaitReady(t, server, pool, 200, "publishing", "")

	state.Draining()
	state.Running() // a start that ends late
	awaitReady(t, server, pool, 503, "draining", "the relay is stopping")
	alive()
}

// A relay is stuck when it holds a shard and makes no turn. One without a shard waits for something
// else, and one that drains has its own limit.
func TestStuckRelayIsNotAlive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		state := monitor.NewState()
		hooks := state.Hooks()
		server := newServer(state)
		after := func(d time.Duration) int {
			<-time.After(d)
			return ask(t, server.Handler(), "GET", "/healthz").Code
		}
		assert.Equal(t, 200, after(time.Hour), "starting")
		state.Running()
		assert.Equal(t, 200, after(time.Hour), "no shard")
		hooks.Lease(3, true)
		assert.Equal(t, 200, after(4*time.Minute))
		assert.Equal(t, 503, after(2*time.Minute))
		assert.Contains(t, ask(t, server.Handler(), "GET", "/healthz").Body.String(), "holds 1 shard and has done nothing")
		hooks.Heartbeat()
		assert.Equal(t, 200, after(4*time.Minute), "it made a turn")
		assert.Equal(t, 503, after(2*time.Minute))
		hooks.Lease(3, false)
		assert.Equal(t, 200, after(time.Hour), "it lost the shard")
		hooks.Lease(3, true)
		state.Draining()
		assert.Equal(t, 200, after(time.Hour), "draining")
	})
}

// Property: a shard that hangs makes the process unhealthy at once, however well its other shards
// do; one that is well again, or has ended, does not. Row O46 of guarantees.md.
func TestHungShardIsNotAlive(t *testing.T) {
	t.Parallel()
	state := monitor.NewState()
	hooks := state.Hooks()
	server := newServer(state)
	health := func() int { return ask(t, server.Handler(), "GET", "/healthz").Code }
	state.Running()
	hooks.Lease(0, true)
	hooks.Lease(1, true)
	assert.Equal(t, 200, health())
	hooks.Hung(1, true)
	hooks.Heartbeat()
	assert.Equal(t, 503, health())
	assert.Contains(t, ask(t, server.Handler(), "GET", "/healthz").Body.String(), "shards [1] hang")
	hooks.Lease(1, false)
	assert.Equal(t, 503, health(), "what hangs still hangs when its lease is lost")
	hooks.Hung(1, false)
	assert.Equal(t, 200, health())
	hooks.Hung(1, true)
	state.Draining()
	assert.Equal(t, 200, health(), "draining has its own limit")
}

// Property: a replica from which Kafka accepts no rows is not ready and reports that Kafka is the
// cause. It is alive, because a restart would not help. Row O45 of guarantees.md.
func TestReadinessNamesKafka(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	state := monitor.NewState()
	hooks := state.Hooks()
	server := newServer(state)
	state.Running()
	for _, shards := range []bool{true, false} { // also a standby
		hooks.Lease(0, shards)
		hooks.Away(errors.New("dial tcp 10.0.0.7:9092: secret"))
		awaitReady(t, server, pool, 503, "kafka_away", "Kafka does not accept rows from this replica")
		assert.Equal(t, 200, ask(t, server.Handler(), "GET", "/healthz").Code)
		_, v := ready(t, server)
		assert.NotContains(t, strings.Join(v.Reasons, ""), "10.0.0.7", "who asks need not know where it is")
	}
	hooks.Away(nil)
	hooks.Lease(0, true)
	awaitReady(t, server, pool, 200, "publishing", "")
}

// Row S9 of guarantees.md: the endpoints have no internals, and only GET is accepted.
func TestEndpointsHaveNoInternals(t *testing.T) {
	t.Parallel()
	endpoints := newServer(monitor.NewState()).Handler()
	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		for _, method := range []string{"POST", "PUT", "PATCH", "DELETE"} {
			assert.Equal(t, 405, ask(t, endpoints, method, path).Code, "%s %s", method, path)
		}
	}
	for _, path := range []string{"/", "/debug", "/debug/vars", "/debug/pprof/", "/debug/pprof/heap", "/healthz/x", "/admin"} {
		assert.Equal(t, 404, ask(t, endpoints, "GET", path).Code, path)
	}
}
