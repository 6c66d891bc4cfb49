package relay_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// lines returns the lines of a log of a level.
func lines(said *lockedBuffer, level string) (found []string) {
	for line := range strings.Lines(said.String()) {
		if strings.Contains(line, "level="+level) {
			found = append(found, line)
		}
	}
	return found
}

// Property: rows of many keys that become dead for one reason are one line of the log, and then one
// every 30 s with their number: a missing topic fills no disk and hides nothing else.
func TestMissingTopicIsSaidOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'missing', convert_to('k' || i, 'UTF8'), '' FROM generate_series(1, 1000) AS i`)
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'also-missing', 'k', '' FROM generate_series(1, 3)`)
	var said lockedBuffer
	begun := time.Now()
	drain(t, newRelay(t, pool, relay.Config{Logger: slog.New(slog.NewTextHandler(&said, nil))}))
	require.Equal(t, 1003, dead(t, pool))
	found := lines(&said, "ERROR")
	require.LessOrEqual(t, len(found), 2*(1+int(time.Since(begun)/(30*time.Second))), "%s", found)
	require.Contains(t, strings.Join(found, ""), "topic=missing")
	require.Contains(t, strings.Join(found, ""), "topic=also-missing")
}

// Property: a database that is away is some lines of the log, not some a second, and its return is
// one.
func TestDatabaseAwayIsSaidOnce(t *testing.T) {
	longtest.Only(t, "it counts lines of the log in real time")
	t.Parallel()
	cluster := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, cluster.URL)
	pool, err := pgxpool.New(t.Context(), cluster.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	var said lockedBuffer
	var l leases
	starts(t, newRelay(t, pool, relay.Config{Shards: 3, Lease: time.Second, Logger: slog.New(slog.NewTextHandler(&said, nil)), Hooks: l.hooks()}))
	await(t, "it publishes", func() bool { return l.held.Load() == 3 })
	require.NoError(t, cluster.Kill(t.Context()))
	begun := time.Now()
	// What is not said, however often the relay tries, nothing shows.
	require.True(t, pause.For(t.Context(), 13*time.Second))
	found := lines(&said, "WARN")
	require.NotEmpty(t, found)
	texts := map[string]int{}
	for _, line := range found {
		_, text, _ := strings.Cut(line, "msg=")
		texts[text[:20]]++
	}
	for text, n := range texts {
		require.LessOrEqual(t, n, 1+int(time.Since(begun)/(30*time.Second)), text)
	}
	require.NoError(t, cluster.Restart(t.Context()))
	await(t, "its return is said", func() bool { return strings.Contains(said.String(), "the database answers again") })
}

// Property: a replica that stands by logs that once, with the replica that publishes, and again
// when another one publishes.
func TestStandbySaysSo(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	topic := kafkatest.Topic(t, 1)
	var said lockedBuffer
	must(t, pool, `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1)`)
	must(t, pool, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch) VALUES ('default', 0, 'first', clock_timestamp() + interval '1 hour', 1)`)
	starts(t, newRelay(t, pool, relay.Config{Owner: "second", Lease: time.Second, Logger: slog.New(slog.NewTextHandler(&said, nil))}))
	await(t, "it says so", func() bool { return strings.Contains(said.String(), "standing by") })
	require.Contains(t, said.String(), "published_by=[first]")
	must(t, pool, `UPDATE effectonce.outbox_progress SET owner = 'another'`)
	await(t, "it says so again", func() bool { return strings.Contains(said.String(), "published_by=[another]") })
	require.Equal(t, 2, strings.Count(said.String(), "standing by"))
	must(t, pool, `UPDATE effectonce.outbox_progress SET lease_until = NULL, owner = NULL`)
	insert(t, pool, topic, "k", fmt.Sprint(1))
	await(t, "it takes over", func() bool { return kafkatest.Count(t, topic) == 1 })
}
