package relay_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// walReceiver is a client of the server's replication protocol that says how far it is, true or
// not.
type walReceiver struct {
	*testing.T
	conn *pgconn.PgConn
}

func receiveWAL(t *testing.T, address, name string, statements ...string) *walReceiver {
	t.Helper()
	config, err := pgconn.ParseConfig(address)
	require.NoError(t, err)
	config.RuntimeParams["replication"], config.RuntimeParams["application_name"] = "database", name
	conn, err := pgconn.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	last := len(statements) - 1
	for _, sql := range statements[:last] {
		_, err := conn.Exec(t.Context(), sql).ReadAll()
		require.NoError(t, err)
	}
	front := conn.Frontend()
	front.Send(&pgproto3.Query{String: statements[last]})
	require.NoError(t, front.Flush())
	answer, err := conn.ReceiveMessage(t.Context())
	require.NoError(t, err)
	require.IsType(t, &pgproto3.CopyBothResponse{}, answer)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			if _, err := conn.ReceiveMessage(ctx); err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = conn.Conn().Close()
		reading.Wait()
	})
	return &walReceiver{t, conn}
}

// stream is a receiver of the write-ahead log itself, as a standby or a backup is.
func stream(t *testing.T, pool *pgxpool.Pool, address, name string) *walReceiver {
	t.Helper()
	return receiveWAL(t, address, name, "START_REPLICATION PHYSICAL "+one[string](t, pool, `SELECT pg_current_wal_flush_lsn()::text`))
}

// report says that it has received everything, and how far it has flushed and replayed.
func (r *walReceiver) report(flushed, replayed uint64) {
	r.Helper()
	status := []byte{'r'}
	for _, lsn := range []uint64{everything, flushed, replayed, 0} {
		status = binary.BigEndian.AppendUint64(status, lsn)
	}
	r.conn.Frontend().Send(&pgproto3.CopyData{Data: append(status, 0)})
	require.NoError(r, r.conn.Frontend().Flush())
}

func lsn(t *testing.T, pool *pgxpool.Pool) uint64 {
	t.Helper()
	return uint64(one[int64](t, pool, `SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint`))
}

const everything = math.MaxInt64

// replicated is a cluster of the test's own, whose walsenders are its alone.
func replicated(t *testing.T) (pool *pgxpool.Pool, address string) {
	t.Helper()
	cluster := pgtest.Cluster(t, map[string]string{"wal_level": "logical", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"})
	pgtest.Migrate(t, cluster.URL)
	pool, err := pgxpool.New(t.Context(), cluster.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool, cluster.URL
}

// Property: with DurableHorizon a row is published once a standby has flushed its commit, and not
// before: not for a standby that has only received or replayed it, for a backup, or for a
// subscriber. Without a standby nothing is published, and the log says which. Row O24 of
// guarantees.md.
func TestPublishingWaitsForTheFlushOfAStandby(t *testing.T) {
	t.Parallel()
	pool, address := replicated(t)
	topic, log := kafkatest.Topic(t, 1), &lockedBuffer{}
	must(t, pool, `CREATE PUBLICATION everything FOR ALL TABLES`)
	subscriber := receiveWAL(t, address, "subscriber", "CREATE_REPLICATION_SLOT subscriber TEMPORARY LOGICAL pgoutput",
		"START_REPLICATION SLOT subscriber LOGICAL 0/0 (proto_version '1', publication_names 'everything')")
	subscriber.report(everything, everything)
	backup := stream(t, pool, address, "pg_basebackup")
	backup.report(everything, 0) // it replays nothing

	r := newRelay(t, pool, relay.Config{DurableHorizon: "any", Logger: slog.New(slog.NewTextHandler(log, nil))})
	stop := starts(t, r)
	before := lsn(t, pool)
	insert(t, pool, topic, "k", "1")
	says := func(text string) {
		t.Helper()
		testwait.True(t, "the log says "+text, func() bool { return strings.Contains(log.String(), text) })
	}
	says("too few standbys are connected")
	require.Empty(t, kafkatest.ReadAll(t, topic))
	standby := stream(t, pool, address, "walreceiver")
	standby.report(before, everything)
	says("waiting for standbys to flush")
	require.Regexp(t, `waiting for standbys to flush .* connected=walreceiver .* bytes_behind=[1-9]`, log.String())
	require.Empty(t, kafkatest.ReadAll(t, topic))
	standby.report(lsn(t, pool), before)
	testwait.True(t, "the row is published", func() bool { return len(kafkatest.ReadAll(t, topic)) == 1 })
	says("publishing continues")

	// A stop does not wait for a standby.
	insert(t, pool, topic, "k", "2")
	standby.report(before, before)
	testwait.True(t, "it waits again", func() bool { return strings.Count(log.String(), "waiting for standbys to flush") == 2 })
	stop()
	require.Len(t, kafkatest.ReadAll(t, topic), 1)
	require.Equal(t, 1, strings.Count(log.String(), "too few standbys"), "said once")
}

// Property: standbys count by their names, as many as are asked for.
func TestStandbysCountByName(t *testing.T) {
	t.Parallel()
	pool, address := replicated(t)
	must(t, pool, `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1)`)
	for name, flushed := range map[string]uint64{"a": everything, "b": 1, "c": everything} {
		stream(t, pool, address, name).report(flushed, 1)
	}
	testwait.True(t, "they are known", func() bool {
		return one[int](t, pool, `SELECT count(*)::int FROM pg_stat_replication WHERE flush_lsn IS NOT NULL`) == 3
	})
	for text, want := range map[string]bool{
		"any": true, "a": true, "b": false, "b,a": true, "2 of any": true, "3 of any": false, "2 of a, c": true, "2 of a,b": false,
		"2 of a": false, "walreceiver": false, "1 of c": true,
	} {
		at, err := newRelay(t, pool, relay.Config{DurableHorizon: text}).AtHorizon(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, at, text)
	}
	for _, wrong := range []string{"a,,b", ",", "0 of a", "x of a", "2 of ", "2 of", "any,a", "101 of any"} {
		_, err := relay.New(pool, nil, relay.Config{DurableHorizon: wrong})
		require.ErrorContains(t, err, "DurableHorizon", wrong)
	}
}

// Property: a role that cannot see how far standbys are is refused at the start, with the statement
// that lets it.
func TestHorizonNeedsToSeeStandbys(t *testing.T) {
	t.Parallel()
	pool, address := replicated(t)
	role := `"the relay"`
	must(t, pool, `CREATE ROLE `+role+` LOGIN PASSWORD 'p'`)
	must(t, pool, `GRANT USAGE ON SCHEMA effectonce TO `+role)
	must(t, pool, `GRANT ALL ON ALL TABLES IN SCHEMA effectonce TO `+role)
	must(t, pool, `GRANT ALL ON ALL SEQUENCES IN SCHEMA effectonce TO `+role)
	must(t, pool, `GRANT ALL ON ALL FUNCTIONS IN SCHEMA effectonce TO `+role)
	config, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	config.ConnConfig.User, config.ConnConfig.Password = "the relay", "p"
	own, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(own.Close)
	stream(t, pool, address, "walreceiver").report(everything, 1)
	r := newRelay(t, own, relay.Config{DurableHorizon: "any"})
	grant := fmt.Sprintf("GRANT pg_read_all_stats TO %s", pgx.Identifier{"the relay"}.Sanitize())
	require.ErrorContains(t, r.Run(t.Context()), grant)
	_, err = r.Drain(t.Context())
	require.ErrorContains(t, err, grant)
	must(t, pool, grant)
	topic := kafkatest.Topic(t, 1)
	insert(t, pool, topic, "k", "1")
	testwait.True(t, "the standby is seen", func() bool {
		return one[bool](t, pool, `SELECT count(flush_lsn) > 0 FROM pg_stat_replication`)
	})
	require.EqualValues(t, 1, drain(t, r))
}

// Property: WAL that no commit flushes, here of a transaction that is open, does not keep what is
// committed before it from standbys: the relay has it flushed and does not wait for the WAL writer,
// which is frozen here.
func TestHorizonDoesNotWaitForTheWALWriter(t *testing.T) {
	t.Parallel()
	// Embedded: a container's processes have other numbers.
	cluster, err := servers.StartPostgres(t.Context(), servers.PostgresOptions{Own: true, Embedded: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = cluster.Stop(context.WithoutCancel(t.Context())) })
	pgtest.Migrate(t, cluster.URL)
	pool, err := pgxpool.New(t.Context(), cluster.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	must(t, pool, `INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1)`)
	must(t, pool, `CREATE TABLE bystanders (text text)`)
	pid := one[int](t, pool, `SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })

	bystander, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = bystander.Rollback(context.WithoutCancel(t.Context())) }()
	ctx, cancel := context.WithCancel(t.Context())
	r := newRelay(t, pool, relay.Config{DurableHorizon: "any"})
	done, leased, wrote := make(chan error, 1), make(chan struct{}), make(chan struct{})
	go func() {
		done <- r.AwaitHorizon(ctx, func() {
			close(leased)
			<-wrote
		})
	}()
	select {
	case <-leased:
	case err := <-done:
		require.NoError(t, err)
	}
	_, err = bystander.Exec(ctx, `INSERT INTO bystanders VALUES ('not committed')`)
	require.NoError(t, err)
	end := lsn(t, pool)
	close(wrote)
	testwait.True(t, "the primary flushes", func() bool {
		return uint64(one[int64](t, pool, `SELECT (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint`)) >= end
	})
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
}
