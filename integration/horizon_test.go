package integration_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/relay"
)

// Property: with DurableHorizon no event outlives a failover that loses its commit. While the
// standby does not flush, committed rows are not published. If it continues, they are published. If
// it is promoted without them, no reader ever saw them, and later commits are published. At least
// once and exactly once. Row O24 of guarantees.md.
func TestNoEventOutlivesAFailover(t *testing.T) {
	longtest.Only(t, "standbys of its own, and lines of the log in real time")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx := t.Context()
		// Embedded: the standby runs from its programs and a copy of its files.
		primary, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Embedded: true})
		require.NoError(t, err)
		t.Cleanup(func() { _ = primary.Stop(context.WithoutCancel(ctx)) })
		pgtest.Migrate(t, primary.URL)
		second := newStandby(t, primary)
		pool, topic, log := open(t, second.either(primary)), kafkatest.Topic(t, 1), &lockedBuffer{}
		cfg := relay.Config{
			DurableHorizon: "any", ExactlyOnce: exactly, ProgressTopic: kafkatest.UnusedTopic(t), Lease: time.Second,
			Logger: slog.New(slog.NewTextHandler(log, nil)),
		}
		stop := running(t, pool, kafkatest.Brokers(t), cfg)
		insert := func(payload string) {
			t.Helper()
			_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', $2)`, topic, []byte(payload))
			require.NoError(t, err)
		}
		published := func(want ...string) {
			t.Helper()
			eventually(t, 60*time.Second, "rows are published", func() (bool, any) {
				seen := firsts(t, topic)
				return fmt.Sprint(seen) == fmt.Sprint(want), seen
			})
		}
		said := func(text string, n int) {
			t.Helper()
			eventually(t, 60*time.Second, "the log says "+text, func() (bool, any) { return strings.Count(log.String(), text) >= n, log.String() })
		}
		insert("kept")
		published("kept")

		thaw := second.freezeReceiver(t)
		insert("late")
		said("waiting for standbys to flush", 1)
		published("kept")
		thaw()
		published("kept", "late")

		second.freezeReceiver(t)
		insert("lost")
		said("waiting for standbys to flush", 2)
		require.NoError(t, primary.Kill(ctx))
		second.endReceiver(t)
		_, err = second.pool.Exec(ctx, `SELECT pg_promote()`)
		require.NoError(t, err)
		require.Zero(t, count(ctx, t, second.pool, `SELECT count(*) FROM effectonce.outbox WHERE payload = 'lost'`), "the test's own premise: it is lost")
		pool.Reset()
		insert("after")
		said("too few standbys are connected", 1) // the new primary has none
		published("kept", "late")
		stop()

		cfg.DurableHorizon = ""
		r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, cfg)
		require.NoError(t, err)
		_, err = r.Drain(ctx)
		require.NoError(t, err)
		published("kept", "late", "after")
	})
}

// firsts are the payloads of a topic in the order of their first occurrences.
func firsts(t *testing.T, topic string) (values []string) {
	t.Helper()
	seen := map[string]bool{}
	for _, record := range kafkatest.ReadAll(t, topic) {
		if value := string(record.Value); !seen[value] {
			seen[value] = true
			values = append(values, value)
		}
	}
	return values
}

// freezeReceiver stops the process that gets the standby its write-ahead log.
func (s *standby) freezeReceiver(t *testing.T) (thaw func()) {
	t.Helper()
	pid := count(t.Context(), t, s.pool, `SELECT pid FROM pg_stat_wal_receiver`)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) }) // else the standby cannot end
	return func() { require.NoError(t, syscall.Kill(pid, syscall.SIGCONT)) }
}

// endReceiver ends a frozen one, which throws away what it has not read.
func (s *standby) endReceiver(t *testing.T) {
	t.Helper()
	pid := count(t.Context(), t, s.pool, `SELECT pid FROM pg_stat_wal_receiver`)
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGCONT} {
		require.NoError(t, syscall.Kill(pid, signal))
	}
	eventually(t, 30*time.Second, "the receiver ends", func() (bool, any) {
		n := count(t.Context(), t, s.pool, `SELECT count(*) FROM pg_stat_wal_receiver`)
		return n == 0, n
	})
}
