package integration_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

const nobody = 65534 // user and group

// smallDisk is a file system of a few megabytes in memory, which PostgreSQL's user owns.
type smallDisk string

func newSmallDisk(t *testing.T, megabytes int) smallDisk {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("LOUD SKIP: only root can mount the small file system that this test fills")
	}
	dir, err := os.MkdirTemp("", "effectonce-disk-") //nolint:usetesting // PostgreSQL's user has to get there
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.Remove(dir) })
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=0700,uid=%d,gid=%d", megabytes, nobody, nobody)); err != nil {
		if os.Getenv("REQUIRE_CONTAINERS") == "1" {
			t.Fatalf("REQUIRE_CONTAINERS=1, and this is root, but a tmpfs cannot be mounted: %v", err)
		}
		t.Skipf("LOUD SKIP: this machine does not let root mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return smallDisk(dir)
}

func (d smallDisk) ballast() string { return filepath.Join(string(d), "ballast") }

// fill leaves no byte.
func (d smallDisk) fill(t *testing.T) {
	t.Helper()
	file, err := os.OpenFile(d.ballast(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	require.NoError(t, err)
	defer func() { _ = file.Close() }()
	for block := make([]byte, 4096); err == nil; {
		_, err = file.Write(block)
	}
	require.ErrorIs(t, err, syscall.ENOSPC)
}

func (d smallDisk) free(t *testing.T) {
	t.Helper()
	require.NoError(t, os.Remove(d.ballast()))
}

// pipeline is a consumer that has an effect for each message of a topic and publishes each to
// another one, and the relay of that.
type pipeline struct {
	child
	pool            *pgxpool.Pool
	consumer, relay *process
	rounds          int
}

func newPipeline(t *testing.T, url string) *pipeline {
	t.Helper()
	pgtest.Migrate(t, url)
	p := &pipeline{pool: open(t, url)}
	createWorkload(t, p.pool)
	topic := kafkatest.Topic(t, 4)
	p.child = child{
		Role: "consumer", URL: url, Brokers: kafkatest.Brokers(t), Topic: topic, Group: topic, Forward: kafkatest.Topic(t, 2),
		BatchMax: 10, SessionTimeout: sessionTimeout, Lease: 2 * time.Second, ExactlyOnce: true,
		AttemptsMax: 1000, // a handler whose own statement finds no room has failed, and that is an attempt
	}
	p.consumer = start(t, p.child)
	r := p.child
	r.Role = "relay"
	p.relay = start(t, r)
	return p
}

// produce hands the consumer more messages, after between.
func (p *pipeline) produce(t *testing.T, versions int, between func()) {
	t.Helper()
	p.rounds++
	name := fmt.Sprintf("k%d-", p.rounds)
	expected(t, p.pool, name, 8, versions)
	between()
	sentAt(t, p.Brokers, p.Topic, name, 8, versions, 10)
}

// requireAll waits until everything is handled and published, and judges it.
func (p *pipeline) requireAll(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	handled(ctx, t, p.pool, 90*time.Second)
	s := requirePublished(t, p.pool, p.Forward)
	require.Zero(t, s.duplicates)
	require.Zero(t, count(ctx, t, p.pool, `SELECT count(*) FROM effectonce.outbox_dead`))
	require.Zero(t, count(ctx, t, p.pool, `SELECT count(*) FROM effectonce.parked_messages`))
	require.False(t, p.consumer.ended() || p.relay.ended(), "they run on")
}

// Property: while the file system of the database's tables has no byte left, consumer and relay
// wait: what the engine itself cannot write parks and buries nothing. When there is room again every message has its effect
// once and is published once, in order, by the processes that were running. Row O32 of
// guarantees.md.
func TestTablesWithoutRoomAreWaitedFor(t *testing.T) {
	t.Parallel()
	disk := newSmallDisk(t, 64)
	server := embedded(t, map[string]string{"autovacuum": "off"}) // which makes room
	conn, err := pgx.Connect(t.Context(), server.URL)
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	pgtest.Exec(t, conn, `CREATE TABLESPACE small LOCATION '`+string(disk)+`'`)
	pgtest.Exec(t, conn, `CREATE DATABASE small TABLESPACE small`)
	config := conn.Config()
	p := newPipeline(t, fmt.Sprintf("postgres://%s:%s@%s:%d/small?sslmode=disable", config.User, config.Password, config.Host, config.Port))
	p.produce(t, 20, func() {})
	p.requireAll(t)
	for round := range 2 {
		seen := strings.Count(p.consumer.log.String(), "53100")
		// More than fits into pages that exist. What is sent to a full disk cannot be handled before.
		p.produce(t, 100, func() { disk.fill(t) })
		eventually(t, 60*time.Second, "the consumer is refused", func() (bool, any) {
			return strings.Count(p.consumer.log.String(), "53100") > seen, p.consumer.log
		})
		_, err := p.pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, payload) SELECT 'full', convert_to(repeat(md5(n::text), 50), 'UTF8') FROM generate_series(1, 1000) n`)
		require.ErrorContains(t, err, "53100", "the test's own premise, round %d", round)
		disk.free(t)
		p.requireAll(t)
	}
}

// Property: PostgreSQL ends (PANIC) when the file system of its log has no byte left, and cannot
// start. Consumer and relay wait meanwhile; after the operator made room and started it, every
// message has its effect once and is published once, in order. Row O32 of guarantees.md.
func TestLogWithoutRoomIsWaitedFor(t *testing.T) {
	t.Parallel()
	disk := newSmallDisk(t, 96)
	server := embedded(t, map[string]string{"min_wal_size": "32MB", "max_wal_size": "32MB"})
	log := moveWAL(t, server, disk)
	p := newPipeline(t, server.URL)
	p.produce(t, 20, func() {})
	p.requireAll(t)
	p.produce(t, 200, func() {})
	disk.fill(t)
	eventually(t, 60*time.Second, "the server ends", func() (bool, any) {
		// A segment ends, and the next one may have to be made.
		_, err := p.pool.Exec(t.Context(), `SELECT pg_logical_emit_message(true, 'test', repeat('x', 1000000))`)
		text, readErr := os.ReadFile(log)
		require.NoError(t, readErr)
		return strings.Contains(string(text), "PANIC") && strings.Contains(string(text), "No space left on device"), err
	})
	require.NoError(t, server.Kill(t.Context())) // it may be trying to start
	disk.free(t)
	require.NoError(t, server.Restart(t.Context()))
	p.pool.Reset()
	p.requireAll(t)
}

// moveWAL puts the log of a server onto a disk. It returns the file of the server's messages.
func moveWAL(t *testing.T, server *servers.Postgres, disk smallDisk) (log string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server.URL)
	require.NoError(t, err)
	var data string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT current_setting('data_directory')`).Scan(&data))
	require.NoError(t, conn.Close(t.Context()))
	require.NoError(t, server.Kill(t.Context()))
	from, to := filepath.Join(data, "pg_wal"), filepath.Join(string(disk), "pg_wal")
	require.NoError(t, copyTree(from, to))
	require.NoError(t, os.RemoveAll(from))
	require.NoError(t, os.Symlink(to, from))
	require.NoError(t, server.Restart(t.Context()))
	return filepath.Join(filepath.Dir(data), "log")
}

// copyTree copies directories and files, for PostgreSQL's user.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if entry.IsDir() {
			err = os.Mkdir(target, 0o700)
		} else if content, readErr := os.ReadFile(path); readErr != nil {
			return readErr
		} else {
			err = os.WriteFile(target, content, 0o600)
		}
		if err != nil {
			return err
		}
		return os.Lchown(target, nobody, nobody)
	})
}
