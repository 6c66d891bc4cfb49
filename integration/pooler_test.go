package integration_test

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// pooler is a PgBouncer in front of a database, in transaction mode. It listens at a socket of its
// own.
type pooler struct {
	database string // name
	dir      string
	binary   string
	version  string
	leash    io.Closer
	ended    chan struct{}
	log      *lockedBuffer
}

// newPooler starts a PgBouncer in front of the database at address.
func newPooler(t *testing.T, address string, settings ...string) *pooler {
	t.Helper()
	config, err := pgx.ParseConfig(address)
	require.NoError(t, err)
	p := &pooler{database: config.Database, binary: poolerBinary(t), log: &lockedBuffer{}}
	p.version = poolerVersion(t, p.binary)
	p.dir, err = os.MkdirTemp("", "effectonce-pgbouncer-") //nolint:usetesting // PgBouncer's user has to get there
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(p.dir) })
	ini := append([]string{
		"[databases]",
		fmt.Sprintf("* = host=%s port=%d user=%s password='%s'", config.Host, config.Port, config.User, strings.ReplaceAll(config.Password, "'", "''")),
		"[pgbouncer]", "pool_mode = transaction", "auth_type = any", "unix_socket_dir = " + p.dir, "listen_port = 6432", "max_client_conn = 200",
	}, settings...)
	file := filepath.Join(p.dir, "pgbouncer.ini")
	require.NoError(t, os.WriteFile(file, []byte(strings.Join(ini, "\n")+"\n"), 0o600))
	if os.Geteuid() == 0 { // which PgBouncer refuses
		require.NoError(t, os.Chown(p.dir, nobody, nobody))
		require.NoError(t, os.Chown(file, nobody, nobody))
	}
	p.start(t)
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("PgBouncer %s said:\n%s", p.version, p.log)
		}
	})
	return p
}

const nobody = 65534 // user and group

// describeOnly makes pgx send no named statement, which belongs to one server connection. PgBouncer
// knows named ones from 1.21 on, where max_prepared_statements allows them.
const describeOnly = "default_query_exec_mode=cache_describe"

func poolerBinary(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} { // not in every user's path
		if binary, err := exec.LookPath(name); err == nil {
			return binary
		}
	}
	if os.Getenv("REQUIRE_CONTAINERS") == "1" {
		t.Fatal("REQUIRE_CONTAINERS=1, but there is no pgbouncer: install it (Debian: apt-get install pgbouncer)")
	}
	t.Skip("LOUD SKIP: there is no pgbouncer on this machine (Debian: apt-get install pgbouncer)")
	return ""
}

func poolerVersion(t *testing.T, binary string) string {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), binary, "--version").Output()
	require.NoError(t, err)
	line, _, _ := strings.Cut(string(output), "\n")
	return strings.TrimPrefix(line, "PgBouncer ")
}

// leashed ends PgBouncer like a crash when its input ends, which comes with the end of the test's
// process. One that ends by itself is started again, as a service is: 1.18 does now and then when a
// cancel request meets the end of a connection's lifetime ("bad server state: 11").
const leashed = `(while :; do "$0" "$1" & echo $! >"$1.pid"; wait $!; sleep 0.1; done) & loop=$!; read -r _; kill -9 $loop; kill -9 $(cat "$1.pid")`

func (p *pooler) start(t *testing.T) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", leashed, p.binary, filepath.Join(p.dir, "pgbouncer.ini"))
	cmd.Stdout, cmd.Stderr = p.log, p.log
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	leash, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	p.leash, p.ended = leash, make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(p.ended)
	}()
	eventually(t, "PgBouncer answers", func() (bool, any) {
		err := p.admin(t.Context(), "SHOW VERSION")
		return err == nil, fmt.Sprint(err, p.log)
	})
}

// kill ends it like a crash.
func (p *pooler) kill() {
	_ = p.leash.Close()
	<-p.ended
}

// admin runs a command of PgBouncer's console.
func (p *pooler) admin(ctx context.Context, command string) error {
	config, err := pgx.ParseConfig(p.at("pgbouncer", "default_query_exec_mode=simple_protocol"))
	if err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, command)
	return err
}

// url leads to the database through PgBouncer. parameters are of the form name=value.
func (p *pooler) url(parameters ...string) string { return p.at(p.database, parameters...) }

func (p *pooler) at(database string, parameters ...string) string {
	query := append([]string{"host=" + url.QueryEscape(p.dir), "port=6432", "sslmode=disable"}, parameters...)
	return "postgres://postgres@/" + database + "?" + strings.Join(query, "&")
}
