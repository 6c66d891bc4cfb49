package migrations_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/migrations"
)

// journal keeps the log of a migration.
type journal struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.buf.Write(p)
}

func (j *journal) lines() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Split(strings.TrimSuffix(j.buf.String(), "\n"), "\n")[:strings.Count(j.buf.String(), "\n")]
}

func (j *journal) logger() *slog.Logger { return slog.New(slog.NewTextHandler(j, nil)) }

// atVersion4 returns a database of version 4 in which a consumer has two partitions.
func atVersion4(t *testing.T) string {
	t.Helper()
	address := pgtest.EmptyDatabase(t)
	conn := pgtest.Connect(t, address)
	require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, 4))
	pgtest.Exec(t, conn, `INSERT INTO effectonce.consumers (id, name, consumer_group, topics) OVERRIDING SYSTEM VALUE VALUES (1, 'shop/orders', 'shop', '{orders}');
		INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('shop', 'orders', 0), ('shop', 'orders', 1)`)
	return address
}

// claims makes one claim after another, as a consumer of the second partition does, until stop. A
// statement that waits much longer than a migration's LockTimeout fails.
func claims(t *testing.T, address string) (made *atomic.Int64, stop func() error) {
	t.Helper()
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, "SET statement_timeout = '1min'")
	made = &atomic.Int64{}
	var stopped atomic.Bool
	done := make(chan error, 1)
	go func() {
		for !stopped.Load() {
			err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), `WITH claim AS (
					INSERT INTO effectonce.processed_messages (message_id, consumer) VALUES (effectonce.uuid_v7(), 1))
					UPDATE effectonce.consumer_positions SET next_offset = coalesce(next_offset, 0) + 1 WHERE partition = 1`)
				return err
			})
			if err != nil {
				done <- err
				return
			}
			made.Add(1)
		}
		done <- nil
	}()
	return made, func() error { stopped.Store(true); return testwait.Chan(t, "the claims' end", done) }
}

// D25: a migration does not make claims queue for long behind a transaction that holds locks: it
// gives up after a moment, logs the lock holders, retries, and succeeds once that transaction is
// over. It does not fail before that.
func TestMigrationLetsClaimsPassALongTransaction(t *testing.T) {
	t.Parallel()
	address := atVersion4(t)
	holder := pgtest.Connect(t, address)
	pgtest.Exec(t, holder, `SET application_name = 'night report'; BEGIN; UPDATE effectonce.consumer_positions SET next_offset = 1 WHERE partition = 0;
		INSERT INTO effectonce.processed_messages (message_id, consumer) VALUES (effectonce.uuid_v7(), 1)`)
	made, stop := claims(t, address)

	var j journal
	up := make(chan error, 1)
	migrator := pgtest.Connect(t, address)
	go func() { up <- migrations.Up(t.Context(), migrator, migrations.Options{Logger: j.logger()}) }()
	testwait.True(t, "the migration gives up for a moment", func() bool { return len(j.lines()) > 0 })
	require.Contains(t, j.lines()[0], fmt.Sprintf("held_by=\"pid %d (night report, role ", holder.PgConn().PID()))
	before := made.Load()
	testwait.True(t, "claims continue", func() bool { return made.Load() > before+5 })
	require.Empty(t, up, "the migration neither fails nor succeeds before that")

	pgtest.Exec(t, holder, "COMMIT")
	require.NoError(t, testwait.Chan(t, "the migration", up))
	require.NoError(t, migrations.Check(t.Context(), migrator, migrations.Options{}))
	require.NoError(t, stop(), "no claim waited for long")
}

// The total wait for locks is bounded: the retries end at LockWaitMax with the holder's name in the
// error, and the database is unchanged.
func TestMigrationGivesUpAtItsLimit(t *testing.T) {
	t.Parallel()
	address := atVersion4(t)
	holder, conn := pgtest.Connect(t, address), pgtest.Connect(t, address)
	before := catalog(t, conn, "effectonce")
	pgtest.Exec(t, holder, "SET application_name = 'night report'; BEGIN; LOCK TABLE effectonce.consumer_positions IN ROW EXCLUSIVE MODE")
	err := migrations.Up(t.Context(), conn, migrations.Options{LockWaitMax: time.Millisecond})
	require.ErrorContains(t, err, fmt.Sprintf("waited for a lock held by pid %d (night report, role ", holder.PgConn().PID()))
	require.ErrorContains(t, err, "idle in transaction, transaction of 00:00:")
	require.ErrorContains(t, err, "SQLSTATE 55P03")
	require.Equal(t, before, catalog(t, conn, "effectonce"))

	pgtest.Exec(t, holder, "ROLLBACK")
	require.ErrorContains(t, migrations.Up(t.Context(), conn, migrations.Options{LockWaitMax: -1}), "LockWaitMax -1ns: want 0 (5m0s) or more")
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	var timeout string
	require.NoError(t, conn.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&timeout))
	assert.Equal(t, "0", timeout, "the caller's session is as it was")
}

// A migration that a deadlock ended is retried, too.
func TestMigrationIsTriedAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	address := atVersion4(t)
	holder, look := pgtest.Connect(t, address), pgtest.Connect(t, address)
	// The other session does not check for deadlocks before the migration does.
	pgtest.Exec(t, holder, "SET deadlock_timeout = '1min'; BEGIN; LOCK TABLE effectonce.parked_messages IN ROW EXCLUSIVE MODE")
	var j journal
	up := make(chan error, 1)
	migrator := pgtest.Connect(t, address)
	go func() { up <- migrations.Up(t.Context(), migrator, migrations.Options{Logger: j.logger()}) }()
	pgtest.Blocked(t, look, holder)
	pgtest.Exec(t, holder, "SELECT FROM effectonce.consumers; COMMIT")
	require.NoError(t, testwait.Chan(t, "the migration", up))
	require.NotEmpty(t, j.lines())
}

// An error other than a lock conflict is not retried.
func TestMigrationFailsAtOnceForOtherReasons(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, atVersion4(t))
	pgtest.Exec(t, conn, "CREATE TABLE effectonce.consumer_pauses ()")
	var j journal
	err := migrations.Up(t.Context(), conn, migrations.Options{Logger: j.logger()})
	require.ErrorContains(t, err, `: 0005_promise: ERROR: relation "consumer_pauses" already exists`)
	require.Empty(t, j.lines())
}
