package migrations_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
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

// Down removes everything that Up created, and Up creates the same again. Up on a database that is
// up to date changes nothing.
func TestUpDownUp(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
	want := installed(t)

	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	require.Equal(t, want, catalog(t, conn, "effectonce"))
	pgtest.Exec(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('orders')")
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	require.Equal(t, 1, pgtest.Count(t, conn, "SELECT count(*) FROM effectonce.outbox"), "up to date already")

	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	for _, version := range []int{len(all) + 1, -1} {
		require.ErrorContains(t, migrations.To(t.Context(), conn, migrations.Options{}, version), fmt.Sprintf("want 0 to %d", len(all)))
	}
	require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, 0))
	require.Equal(t, nothing, catalog(t, conn, "effectonce"))
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	require.Equal(t, want, catalog(t, conn, "effectonce"))
	require.NoError(t, migrations.Check(t.Context(), conn, migrations.Options{}))
}

// The files are plain SQL that psql can run unchanged, and they create what Up creates.
func TestPlainFilesRunAsTheyStand(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	require.NotEmpty(t, all)
	for i, m := range all {
		assert.Equal(t, i+1, m.Version)
		assert.Regexp(t, fmt.Sprintf("^%04d_[a-z_]+$", m.Version), m.Name)
		up, err := os.ReadFile(m.Name + ".up.sql")
		require.NoError(t, err)
		down, err := os.ReadFile(m.Name + ".down.sql")
		require.NoError(t, err)
		assert.Equal(t, string(up), m.Up)
		assert.Equal(t, string(down), m.Down)
		pgtest.Exec(t, conn, string(up))
	}
	require.Equal(t, installed(t), catalog(t, conn, "effectonce"))
	for i := len(all) - 1; i >= 0; i-- {
		pgtest.Exec(t, conn, all[i].Down)
	}
	require.Equal(t, nothing, catalog(t, conn, "effectonce"))
}

// O39: ten replicas that start at once migrate one database; one of them works, the others wait and
// find nothing to do.
func TestTenReplicasMigrateAtOnce(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	start := make(chan struct{})
	done := make(chan error, 10)
	for range cap(done) {
		conn := pgtest.Connect(t, address)
		go func() {
			<-start
			done <- migrations.Up(t.Context(), conn, migrations.Options{})
		}()
	}
	close(start)
	for range cap(done) {
		require.NoError(t, testwait.Chan(t, "a replica", done))
	}
	conn := pgtest.Connect(t, address)
	require.Equal(t, installed(t), catalog(t, conn, "effectonce"))
	require.Equal(t, 1, pgtest.Count(t, conn, "SELECT count(*) FROM effectonce.schema_version"))
}

// Two schemas in one database are independent: neither refers to the other, rows written to one are
// not in the other, and one can be removed without the other. S1: a name that is a word of SQL is a
// name like any other.
func TestTwoSchemasSideBySide(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	want := installed(t)
	tenant := migrations.Options{Schema: "order"}
	require.NoError(t, migrations.Up(t.Context(), conn, tenant))
	require.NoError(t, migrations.Up(t.Context(), conn, tenant))
	require.NoError(t, migrations.Check(t.Context(), conn, tenant))

	lines := catalog(t, conn, "order")
	for _, line := range lines {
		require.NotContains(t, line, "effectonce.")
	}
	require.Len(t, lines, len(want))
	pgtest.Exec(t, conn, `INSERT INTO "order".outbox (topic) VALUES ('orders'), ('orders');
		INSERT INTO effectonce.outbox (topic) VALUES ('orders');
		INSERT INTO "order".processed_messages VALUES ("order".message_id('orders', '1'), 1, 0)`)
	assert.Equal(t, 2, pgtest.Count(t, conn, `SELECT max(seq) FROM "order".outbox`))
	assert.Equal(t, 1, pgtest.Count(t, conn, "SELECT max(seq) FROM effectonce.outbox"))
	assert.Equal(t, 0, pgtest.Count(t, conn, "SELECT count(*) FROM effectonce.processed_messages"))

	require.NoError(t, migrations.To(t.Context(), conn, tenant, 0))
	require.Equal(t, nothing, catalog(t, conn, "order"))
	require.ErrorIs(t, migrations.Check(t.Context(), conn, tenant), migrations.ErrTooOld)
	require.NoError(t, migrations.Check(t.Context(), conn, migrations.Options{}))
	require.Equal(t, want, catalog(t, conn, "effectonce"))
	assert.Equal(t, 1, pgtest.Count(t, conn, "SELECT count(*) FROM effectonce.outbox"))
}

// A role that may not create schemas can migrate one that its administrator created for it.
func TestOwnerOfTheSchemaCanMigrate(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
	becomeRole(t, conn, "CREATE SCHEMA effectonce AUTHORIZATION %s")
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	require.NoError(t, migrations.Check(t.Context(), conn, migrations.Options{}))
	require.Zero(t, pgtest.Count(t, conn, "SELECT count(*) FROM pg_tables WHERE schemaname = 'effectonce' AND tableowner <> $1", conn.Config().Database))
	require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, 0))
}

// A replica whose role may only use the tables can call Up where there is nothing to do.
func TestUpWithNothingToDoNeedsNoRights(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	becomeRole(t, conn, "GRANT USAGE ON SCHEMA effectonce TO %s; GRANT SELECT ON effectonce.schema_version TO %s")
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
}

// The error for a role that may neither create the schema nor write to it names the missing right.
func TestRoleWithoutRightsIsTold(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
	becomeRole(t, conn, "")
	err := migrations.Up(t.Context(), conn, migrations.Options{})
	require.ErrorContains(t, err, "create schema effectonce (the role needs CREATE on the database")
	require.ErrorContains(t, err, "permission denied")
}

// newRole creates a role without any rights, and removes it with the test. Roles belong to the
// cluster, so its name is that of the test's database.
func newRole(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	role := pgx.Identifier{conn.Config().Database}.Sanitize()
	pgtest.Exec(t, conn, "CREATE ROLE "+role)
	t.Cleanup(func() {
		sql := "RESET SESSION AUTHORIZATION; DROP OWNED BY " + role + " CASCADE; DROP ROLE " + role
		_, err := conn.PgConn().Exec(context.WithoutCancel(t.Context()), sql).ReadAll()
		assert.NoError(t, err)
	})
	return role
}

// becomeRole continues as a new role, which has the rights that statements grant to %s.
func becomeRole(t *testing.T, conn *pgx.Conn, grants string) {
	t.Helper()
	role := newRole(t, conn)
	pgtest.Exec(t, conn, strings.ReplaceAll(grants, "%s", role)+"; SET SESSION AUTHORIZATION "+role)
}

// A standby, or a database that is read-only by its settings, is distinguished from a lack of
// rights.
func TestReadOnlyDatabaseIsNamed(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, fmt.Sprintf("ALTER DATABASE %s SET default_transaction_read_only = on", pgx.Identifier{conn.Config().Database}.Sanitize()))
	readOnly := pgtest.Connect(t, address)
	for range 2 { // before and after the schema exists
		err := migrations.Up(t.Context(), readOnly, migrations.Options{})
		require.ErrorContains(t, err, "the database is read-only (a standby?): connect to the primary")
		pgtest.Exec(t, conn, "SET default_transaction_read_only = off")
		require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	}
	require.NoError(t, migrations.Check(t.Context(), readOnly, migrations.Options{}), "to look is allowed")
}

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
	assert.Equal(t, "0", pgtest.Value[string](t, conn, "SHOW lock_timeout"), "the caller's session is as it was")
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
