package integration_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// standby is a streaming copy of a primary. It listens at a socket of its own.
type standby struct {
	dir  string
	pool *pgxpool.Pool
}

// newStandby copies a primary, which it crashes and restarts for that, and streams from it.
func newStandby(t *testing.T, primary *servers.Postgres) *standby {
	t.Helper()
	ctx := t.Context()
	var data, programs string
	conn, err := pgx.Connect(ctx, primary.URL)
	require.NoError(t, err)
	require.NoError(t, conn.QueryRow(ctx, `SELECT current_setting('data_directory'), setting FROM pg_config WHERE name = 'BINDIR'`).Scan(&data, &programs))
	config := conn.Config()
	require.NoError(t, conn.Close(ctx))

	s := &standby{}
	s.dir, err = os.MkdirTemp("", "effectonce-standby-") //nolint:usetesting // PostgreSQL's user has to get there
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(s.dir) })
	require.NoError(t, primary.Kill(ctx))
	copied := filepath.Join(s.dir, "data")
	output, err := exec.CommandContext(ctx, "cp", "-a", data, copied).CombinedOutput() // with its owner
	require.NoError(t, err, string(output))
	require.NoError(t, primary.Restart(ctx))
	_ = os.Remove(filepath.Join(copied, "postmaster.pid"))
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(s.dir, nobody, nobody))
	}

	upstream := fmt.Sprintf("primary_conninfo = 'host=127.0.0.1 port=%d user=%s password=%s'\n", config.Port, config.User, config.Password)
	for name, text := range map[string]string{"standby.signal": "", "postgresql.auto.conf": upstream} { // where ALTER SYSTEM changes it
		file := filepath.Join(copied, name)
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		if os.Geteuid() == 0 { // which PostgreSQL refuses
			require.NoError(t, os.Chown(file, nobody, nobody))
		}
	}
	log := &lockedBuffer{}
	leash, ended := leashedPostgres(t, log, filepath.Join(programs, "postgres"), "-D", copied, "-c", "listen_addresses=", "-c", "unix_socket_directories="+s.dir)
	t.Cleanup(func() {
		_ = leash.Close()
		<-ended
		if t.Failed() {
			t.Logf("the standby said:\n%s", log)
		}
	})
	s.pool = open(t, fmt.Sprintf("postgres://%s:%s@/postgres?host=%s&port=5432&sslmode=disable", config.User, config.Password, s.dir))
	eventually(t, "the standby streams", func() (bool, any) {
		var n int
		err := s.pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_wal_receiver WHERE status = 'streaming'`).Scan(&n)
		return n == 1, fmt.Sprint(err, log)
	})
	return s
}

// leashedPostgres runs PostgreSQL until its input, and so the test's process, ends.
func leashedPostgres(t *testing.T, log io.Writer, args ...string) (leash io.Closer, ended chan struct{}) {
	t.Helper()
	cmd := exec.Command("/bin/sh", append([]string{"-c", `"$0" "$@" & read -r _; kill -QUIT $!; wait`}, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	leash, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	ended = make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	return leash, ended
}

// either is a URL of whichever of the two is the primary.
func (s *standby) either(primary *servers.Postgres) string {
	config := s.pool.Config().ConnConfig
	first, _ := pgx.ParseConfig(primary.URL)
	return fmt.Sprintf("postgres://%s:%s@/postgres?host=%s,%s&port=%d,5432&sslmode=disable&target_session_attrs=read-write&connect_timeout=10",
		config.User, config.Password, first.Host, s.dir, first.Port)
}

// cut ends the replication.
func (s *standby) cut(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for _, sql := range []string{`ALTER SYSTEM SET primary_conninfo = ''`, `SELECT pg_reload_conf()`} {
		_, err := s.pool.Exec(ctx, sql)
		require.NoError(t, err)
	}
	eventually(t, "the replication ends", func() (bool, any) {
		n := count(ctx, t, s.pool, `SELECT count(*) FROM pg_stat_wal_receiver`)
		return n == 0, n
	})
}

// Property: a standby that is promoted after the primary died with commits that were not replicated
// has every effect once, and in order, although Kafka's offsets are ahead of it: a consumer that
// runs on, and one that is started later, make up for what was lost. Row C32 of guarantees.md.
func TestFailoverThatLosesCommitsIsMadeUpFor(t *testing.T) {
	longtest.Only(t, "promotions of clusters of its own")
	t.Parallel()
	for name, order := range map[string]consumer.Order{
		"started later": consumer.OrderByPartition, "runs on, under load": consumer.OrderByPartition, "runs on, idle": consumer.OrderByPartition,
		"runs on, under load, by key": consumer.OrderByKey, "runs on, idle, unordered": consumer.OrderUnordered,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			restart, idle := name == "started later", strings.HasPrefix(name, "runs on, idle")
			ctx := t.Context()
			// Embedded: the standby runs from its programs and a copy of its files.
			primary, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Embedded: true})
			require.NoError(t, err)
			t.Cleanup(func() { _ = primary.Stop(context.WithoutCancel(ctx)) })
			pgtest.Migrate(t, primary.URL)
			second := newStandby(t, primary)
			pool := open(t, primary.URL)
			createWorkload(t, pool)

			topic := kafkatest.Topic(t, 2)
			c := child{
				Role: "consumer", URL: second.either(primary), Brokers: kafkatest.Brokers(t), Topic: topic, Group: topic,
				BatchMax: 20, Order: order, SessionTimeout: sessionTimeout, IdleTimeout: 2 * time.Second,
			}
			m := start(t, c)
			produced(t, pool, topic, 6, 50, 0)
			c.handledBy(ctx, t, pool)
			eventually(t, "it is replicated", func() (bool, any) {
				var n int
				err := second.pool.QueryRow(ctx, `SELECT count(*) FROM effects`).Scan(&n)
				return n == 300, fmt.Sprint(n, err)
			})
			second.cut(t)
			producedAt(t, c.Brokers, pool, topic, "lost", 6, 50, 10)
			c.handledBy(ctx, t, pool)
			if restart {
				require.NoError(t, m.terminate())
			}
			admin := kadm.NewClient(kafkatest.Client(t))
			eventually(t, "Kafka's offsets are at the end", func() (bool, any) {
				lags, err := admin.Lag(ctx, topic)
				lag := lags[topic].Lag.Total()
				return err == nil && lag == 0, fmt.Sprint(lag, err)
			})
			require.NoError(t, primary.Kill(ctx))
			_, err = second.pool.Exec(ctx, `SELECT pg_promote()`)
			require.NoError(t, err)
			require.Equal(t, 300, count(ctx, t, second.pool, `SELECT count(*) FROM effects`), "the test's own premise: half is lost")
			_, err = second.pool.Exec(ctx, `INSERT INTO versions SELECT 'lost' || n, 50 FROM generate_series(0, 5) n`)
			require.NoError(t, err)
			if restart {
				m = start(t, c)
			}
			if !idle {
				producedAt(t, c.Brokers, second.pool, topic, "after", 6, 50, 0)
			}
			c.handledBy(ctx, t, second.pool)
			require.NoError(t, m.terminate())
		})
	}
}
