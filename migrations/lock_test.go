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

// next returns options with a migration that changes tables which consumers use all the time.
func next() migrations.Options {
	return migrations.Options{}.WithNext(`
		ALTER TABLE effectonce.consumers ADD COLUMN next_note text;
		ALTER TABLE effectonce.consumer_positions ADD COLUMN next_note text;
		CREATE TABLE effectonce.next_release (note text);
		ALTER TABLE effectonce.parked_messages ADD COLUMN next_note text`, `
		ALTER TABLE effectonce.consumers DROP COLUMN next_note;
		ALTER TABLE effectonce.consumer_positions DROP COLUMN next_note;
		DROP TABLE effectonce.next_release;
		ALTER TABLE effectonce.parked_messages DROP COLUMN next_note`)
}

// withConsumer returns a database in which a consumer has two partitions, before the next migration.
func withConsumer(t *testing.T) string {
	t.Helper()
	address := pgtest.Database(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.consumers (id, name, consumer_group, topics) OVERRIDING SYSTEM VALUE VALUES (1, 'shop/orders', 'shop', '{orders}');
		INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('shop', 'orders', 0), ('shop', 'orders', 1)`)
	return address
}

func waiting(j *journal) migrations.Options {
	opts := next()
	opts.Logger = j.logger()
	return opts
}

func limited(wait time.Duration) migrations.Options {
	opts := next()
	opts.LockWaitMax = wait
	return opts
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
					INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint) VALUES (effectonce.uuid_v7(), 1, 0))
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
	address := withConsumer(t)
	holder := pgtest.Connect(t, address)
	pgtest.Exec(t, holder, `SET application_name = 'night report'; BEGIN; UPDATE effectonce.consumer_positions SET next_offset = 1 WHERE partition = 0;
		INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint) VALUES (effectonce.uuid_v7(), 1, 0)`)
	made, stop := claims(t, address)

	var j journal
	up := make(chan error, 1)
	migrator := pgtest.Connect(t, address)
	go func() { up <- migrations.Up(t.Context(), migrator, waiting(&j)) }()
	testwait.True(t, "the migration gives up for a moment", func() bool { return len(j.lines()) > 0 })
	require.Contains(t, j.lines()[0], fmt.Sprintf("held_by=\"pid %d (night report, role ", holder.PgConn().PID()))
	before := made.Load()
	testwait.True(t, "claims continue", func() bool { return made.Load() > before+5 })
	require.Empty(t, up, "the migration neither fails nor succeeds before that")

	pgtest.Exec(t, holder, "COMMIT")
	require.NoError(t, testwait.Chan(t, "the migration", up))
	require.NoError(t, migrations.Check(t.Context(), migrator, next()))
	require.NoError(t, stop(), "no claim waited for long")
}

// The total wait for locks is bounded: the retries end at LockWaitMax with the holder's name in the
// error, and the database is unchanged.
func TestMigrationGivesUpAtItsLimit(t *testing.T) {
	t.Parallel()
	address := withConsumer(t)
	holder, conn := pgtest.Connect(t, address), pgtest.Connect(t, address)
	before := catalog(t, conn, "effectonce")
	pgtest.Exec(t, holder, "SET application_name = 'night report'; BEGIN; LOCK TABLE effectonce.consumer_positions IN ROW EXCLUSIVE MODE")
	err := migrations.Up(t.Context(), conn, limited(time.Millisecond))
	require.ErrorContains(t, err, fmt.Sprintf("waited for a lock held by pid %d (night report, role ", holder.PgConn().PID()))
	require.ErrorContains(t, err, "idle in transaction, transaction of 00:00:")
	require.ErrorContains(t, err, "SQLSTATE 55P03")
	require.Equal(t, before, catalog(t, conn, "effectonce"))

	pgtest.Exec(t, holder, "ROLLBACK")
	require.ErrorContains(t, migrations.Up(t.Context(), conn, limited(-1)), "LockWaitMax -1ns: want 0 (5m0s) or more")
	require.NoError(t, migrations.Up(t.Context(), conn, next()))
	var timeout string
	require.NoError(t, conn.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&timeout))
	assert.Equal(t, "0", timeout, "the caller's session is as it was")
}

// A migration that a deadlock ended is retried, too.
func TestMigrationIsTriedAgainAfterADeadlock(t *testing.T) {
	t.Parallel()
	address := withConsumer(t)
	holder, look := pgtest.Connect(t, address), pgtest.Connect(t, address)
	// The other session does not check for deadlocks before the migration does.
	pgtest.Exec(t, holder, "SET deadlock_timeout = '1min'; BEGIN; LOCK TABLE effectonce.parked_messages IN ROW EXCLUSIVE MODE")
	var j journal
	up := make(chan error, 1)
	migrator := pgtest.Connect(t, address)
	go func() { up <- migrations.Up(t.Context(), migrator, waiting(&j)) }()
	pgtest.Blocked(t, look, holder)
	pgtest.Exec(t, holder, "SELECT FROM effectonce.consumers; COMMIT")
	require.NoError(t, testwait.Chan(t, "the migration", up))
	require.NotEmpty(t, j.lines())
}

// An error other than a lock conflict is not retried.
func TestMigrationFailsAtOnceForOtherReasons(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, withConsumer(t))
	pgtest.Exec(t, conn, "CREATE TABLE effectonce.next_release ()")
	var j journal
	err := migrations.Up(t.Context(), conn, waiting(&j))
	require.ErrorContains(t, err, `: next: ERROR: relation "next_release" already exists`)
	require.Empty(t, j.lines())
}
