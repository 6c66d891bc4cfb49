package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: behind a PgBouncer in transaction mode, with fewer server connections than partitions,
// which are also reset and replaced as it goes, consumers and relays have their effects once and in
// order while they, and PgBouncer, are killed. They wait for connections, they do not deadlock.
func TestEffectsOnceThroughPgBouncer(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		mode, prepared string
		order          consumer.Order
	}{
		"described":                      {describeOnly, "0", consumer.OrderByPartition},
		"described, by key":              {describeOnly, "0", consumer.OrderByKey},
		"described, although prepared":   {describeOnly, "200", consumer.OrderByPartition},
		"prepared":                       {"default_query_exec_mode=cache_statement", "200", consumer.OrderByPartition},
		"prepared, more than are cached": {"default_query_exec_mode=cache_statement", "5", consumer.OrderByPartition},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			rounds := 2
			t.Parallel()
			if name != "described" {
				longtest.Only(t, "processes and a pooler that are killed, five times")
				rounds = 6
			}
			pooled(t, c.mode, c.prepared, child{Order: c.order}, rounds)
		})
	}
}

func pooled(t *testing.T, mode, prepared string, c child, rounds int) {
	t.Helper()
	ctx := t.Context()
	settings := []string{"default_pool_size = 2", "server_lifetime = 1", "server_idle_timeout = 1"}
	if !preparesStatements(t) {
		if prepared != "0" {
			t.Skip("LOUD SKIP, with REQUIRE_CONTAINERS=1 as well: this PgBouncer is older than 1.21, as Debian 12's is, and knows no prepared statements in transaction mode")
		}
	} else {
		settings = append(settings, "max_prepared_statements = "+prepared)
	}
	if prepared == "0" {
		settings = append(settings, "server_reset_query_always = 1") // DISCARD ALL after each transaction
	}
	const versions = 100
	c.Forward, c.BatchMax, c.IdleTimeout, c.Lease = kafkatest.Topic(t, 1), 10, 2*time.Second, 3*time.Second
	c, db := consuming(t, c, 4)
	p := newPooler(t, c.URL, settings...)
	producedAt(t, c.Brokers, db, c.Topic, "k", 8, versions, 20)
	c.URL = p.url(mode)
	r := c
	r.Role = "relay"
	consumers, relays := []*process{start(t, c), start(t, c)}, []*process{start(t, r), start(t, r)}
	for round := range rounds {
		goOn := count(ctx, t, db, `SELECT count(*) FROM effects`) + 1
		eventually(t, "effects go on", func() (bool, any) {
			n := count(ctx, t, db, `SELECT count(*) FROM effects`)
			return n >= min(goOn, 8*versions), n
		})
		switch round % 3 {
		case 0:
			p.kill()
			p.start(t)
		case 1:
			consumers[0].kill()
			consumers = append(consumers[1:], start(t, c))
		case 2:
			relays[0].kill()
			relays = append(relays[1:], start(t, r))
		}
	}
	handled(ctx, t, db)
	for _, m := range consumers {
		require.NoError(t, m.terminate())
	}
	require.Zero(t, count(ctx, t, db, `SELECT count(*) FROM effectonce.parked_messages`))
	require.Equal(t, 8*versions, count(ctx, t, db, `SELECT count(DISTINCT id) FROM effectonce.outbox`))
	requirePublished(t, db, c.Forward)
	for _, m := range relays {
		require.NoError(t, m.terminate())
	}
}

// preparesStatements reports whether PgBouncer knows max_prepared_statements.
func preparesStatements(t *testing.T) bool {
	t.Helper()
	var major, minor int
	_, err := fmt.Sscanf(poolerVersion(t, poolerBinary(t)), "%d.%d", &major, &minor)
	require.NoError(t, err)
	return major > 1 || minor >= 21
}

// Property: a consumer that sends named statements through a pooler that does not know them stops
// or waits, and says why; no message is parked for it, none is lost, and none has its effect twice
// once the setting is fixed.
func TestNamedStatementsBehindPgBouncerCostNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, db := consuming(t, child{}, 4)
	producedAt(t, c.Brokers, db, c.Topic, "k", 5, 40, 10)
	settings := []string{"default_pool_size = 2"}
	if preparesStatements(t) {
		settings = append(settings, "max_prepared_statements = 0")
	}
	p := newPooler(t, c.URL, settings...)
	c.URL = p.url()
	wrong := []*process{start(t, c), start(t, c)}
	eventually(t, "trouble", func() (bool, any) {
		said := wrong[0].log.String() + wrong[1].log.String()
		return strings.Contains(said, "prepared statement"), said
	})
	for _, m := range wrong {
		_ = m.terminate() // it may have ended with the error
	}
	require.Zero(t, count(ctx, t, db, `SELECT count(*) FROM effectonce.parked_messages`))
	c.URL = p.url(describeOnly)
	right := start(t, c)
	handled(ctx, t, db)
	require.NoError(t, right.terminate())
}

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

// The doctor distinguishes a direct connection from one through a pooler, and statement mode, in
// which nothing works, from the other modes.
func TestDoctorKnowsPoolers(t *testing.T) {
	longtest.Only(t, "it builds a program")
	t.Parallel()
	address, program := pgtest.Database(t), filepath.Join(t.TempDir(), "outbox-relay")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../cmd/outbox-relay").CombinedOutput()
	require.NoError(t, err, string(out))
	type finding struct{ Check, Severity, Message, Remedy string }
	look := func(address string) finding {
		cmd := exec.CommandContext(t.Context(), program, "doctor", "--json")
		cmd.Env = append(os.Environ(), "OUTBOX_DATABASE_URL="+address)
		out, _ := cmd.Output() // it finds fault with other things as well
		var report struct{ Findings []finding }
		require.NoError(t, json.Unmarshal(out, &report), string(out))
		for _, f := range report.Findings {
			if f.Check == "pooler" {
				return f
			}
		}
		require.Fail(t, "no such check", string(out))
		return finding{}
	}
	direct := look(address)
	assert.Equal(t, "ok", direct.Severity)
	assert.Contains(t, direct.Message, "directly")
	for _, mode := range []string{"transaction", "session"} {
		f := look(newPooler(t, address, "pool_mode = "+mode).url(describeOnly))
		assert.Equal(t, "ok", f.Severity, "%+v", f)
		assert.Contains(t, f.Message, "through a pooler")
	}
	f := look(newPooler(t, address, "pool_mode = statement").url(describeOnly))
	assert.Equal(t, "fail", f.Severity, "%+v", f)
	assert.Contains(t, f.Message, "statement mode")
	assert.Contains(t, strings.ToLower(f.Remedy), "pool_mode = transaction")
}
