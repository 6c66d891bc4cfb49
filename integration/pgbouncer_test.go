package integration_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// pgbouncer starts PgBouncer in transaction mode in front of a database, with two server connections, and
// returns a URL that leads through it.
func pgbouncer(t *testing.T, address string, preparedMax int) string {
	t.Helper()
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		if os.Getenv("REQUIRE_PGBOUNCER") != "" {
			t.Fatal("pgbouncer is not installed: apt-get install pgbouncer")
		}
		t.Skip("pgbouncer is not installed: the tests behind it are left out (apt-get install pgbouncer)")
	}
	server, err := pgx.ParseConfig(address)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := listener.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // it is TCP
	require.NoError(t, listener.Close())
	dir, err := os.MkdirTemp("", "pgbouncer") //nolint:usetesting // another user has to get in
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	settings := fmt.Sprintf(`[databases]
* = host=%s port=%d user=%s password='%s'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
server_lifetime = 5
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
`, server.Host, server.Port, server.User, server.Password, port)
	if preparedMax > 0 {
		version, err := exec.Command(binary, "--version").Output()
		require.NoError(t, err)
		var minor int
		if _, err := fmt.Sscanf(string(version), "PgBouncer 1.%d.", &minor); err != nil || minor < 21 {
			t.Skipf("PgBouncer knows prepared statements from 1.21 on, this is %s", version)
		}
		settings += fmt.Sprintf("max_prepared_statements = %d\n", preparedMax)
	}
	file := filepath.Join(dir, "pgbouncer.ini")
	require.NoError(t, os.WriteFile(file, []byte(settings), 0o600))
	args := []string{file}
	if os.Getuid() == 0 { // it refuses root
		nobody, err := user.Lookup("nobody")
		require.NoError(t, err)
		uid, err := strconv.Atoi(nobody.Uid)
		require.NoError(t, err)
		require.NoError(t, os.Chown(dir, uid, -1))
		require.NoError(t, os.Chown(file, uid, -1))
		args = []string{"-u", "nobody", file}
	}
	log := &lockedBuffer{}
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("pgbouncer said:\n%s", log)
		}
	})
	through := fmt.Sprintf("postgres://%s@127.0.0.1:%d/%s?sslmode=disable", server.User, port, server.Database)
	eventually(t, 10*time.Second, "pgbouncer answers", func() (bool, any) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		conn, err := pgx.Connect(ctx, through)
		if err == nil {
			err = conn.Close(ctx)
		}
		return err == nil, err
	})
	return through
}

// Property: behind PgBouncer in transaction mode, with fewer server connections than partitions and servers
// that it replaces all the time, every effect happens once and in order, also when consumers are killed: with
// prepared statements that PgBouncer knows about, and without any.
func TestConsumersBehindPgBouncer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		preparedMax int
		setting     string
		order       consumer.Order
	}{
		"prepared statements":          {200, "", consumer.ByPartition},
		"no prepared statements":       {0, "&default_query_exec_mode=cache_describe", consumer.ByPartition},
		"nothing cached":               {0, "&default_query_exec_mode=describe_exec", consumer.ByPartition},
		"workers inside the partition": {0, "&default_query_exec_mode=cache_describe", consumer.ByKey},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			url := pgtest.Database(t)
			pool := open(t, url)
			createWorkload(t, pool)
			topic := kafkatest.Topic(t, 4)
			produced(t, pool, topic, 8, 100, 20)
			c := child{
				Role: "consumer", URL: pgbouncer(t, url, tc.preparedMax) + tc.setting, Brokers: kafkatest.Brokers(t), Topic: topic, Group: topic,
				BatchMax: 10, SessionTimeout: 6 * time.Second, IdleTimeout: 2 * time.Second, Order: tc.order,
			}
			first := start(t, c)
			eventually(t, 30*time.Second, "some effects", func() (bool, any) {
				n := count(ctx, t, pool, `SELECT count(*) FROM effects`)
				return n > 50, n
			})
			first.kill()
			second := start(t, c)
			handled(ctx, t, pool, 60*time.Second)
			require.NoError(t, second.terminate())
		})
	}
}
