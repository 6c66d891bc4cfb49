//go:build unix

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	poolerPort     = 6432
	poolerStartMax = 20 * time.Second
	poolerEvery    = 20 * time.Millisecond
	ordinary       = 65534 // the user "nobody": PgBouncer refuses to be root
	// preparesFrom is the first version that supports prepared statements in transaction mode.
	preparesMajor, preparesMinor = 1, 21
)

// pgBouncer is a PgBouncer in transaction mode. It listens at a socket in its own directory.
type pgBouncer struct {
	dir, database, version string
	prepares               bool

	leash io.Closer
	ended chan struct{}
	log   bytes.Buffer
}

// startPooler returns nil if there is no PgBouncer.
func startPooler(ctx context.Context, databaseURL string) (_ *pgBouncer, err error) {
	var binary string
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} { // not in every user's path
		if found, err := exec.LookPath(name); err == nil {
			binary = found
			break
		}
	}
	if binary == "" {
		return nil, nil //nolint:nilnil // there is none
	}
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	p := &pgBouncer{database: config.Database, ended: make(chan struct{})}
	if err := p.identify(ctx, binary); err != nil {
		return nil, err
	}
	if p.dir, err = os.MkdirTemp("", "effectonce-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(p.dir))
		}
	}()
	file, err := p.configure(config)
	if err != nil {
		return nil, err
	}
	if err := p.start(ctx, binary, file); err != nil {
		return nil, fmt.Errorf("start PgBouncer: %w", err)
	}
	return p, p.wait(ctx)
}

func (p *pgBouncer) identify(ctx context.Context, binary string) error {
	output, err := exec.CommandContext(ctx, binary, "--version").Output()
	if err != nil {
		return fmt.Errorf("ask PgBouncer for its version: %w", err)
	}
	line, _, _ := strings.Cut(string(output), "\n")
	p.version = strings.TrimPrefix(line, "PgBouncer ")
	parts := strings.SplitN(p.version, ".", 3)
	if len(parts) >= 2 {
		major, _ := strconv.Atoi(parts[0])
		minor, _ := strconv.Atoi(parts[1]) // a part that is no number counts as 0
		p.prepares = major > preparesMajor || major == preparesMajor && minor >= preparesMinor
	}
	return nil
}

func (p *pgBouncer) configure(config *pgx.ConnConfig) (file string, err error) {
	quoted := "'" + strings.ReplaceAll(config.Password, "'", "''") + "'"
	lines := []string{
		"[databases]",
		fmt.Sprintf("* = host=%s port=%d user=%s password=%s", config.Host, config.Port, config.User, quoted),
		"[pgbouncer]", "pool_mode = transaction", "auth_type = any", "unix_socket_dir = " + p.dir, fmt.Sprintf("listen_port = %d", poolerPort),
	}
	if p.prepares {
		lines = append(lines, "max_prepared_statements = 100")
	}
	file = filepath.Join(p.dir, "pgbouncer.ini")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return "", err
	}
	if os.Geteuid() == 0 {
		return file, errors.Join(os.Chown(p.dir, ordinary, ordinary), os.Chown(file, ordinary, ordinary))
	}
	return file, nil
}

// leashed ends PgBouncer when the input ends, which happens when this process ends.
const leashed = `"$0" -q "$1" & read -r _; kill -9 $!`

func (p *pgBouncer) start(ctx context.Context, binary, file string) error {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", "-c", leashed, binary, file) //nolint:gosec // our own values
	cmd.Stdout, cmd.Stderr = &p.log, &p.log
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ordinary, Gid: ordinary}}
	}
	leash, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	p.leash = leash
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		_ = cmd.Wait()
		close(p.ended)
	}()
	return nil
}

// wait returns when a statement succeeds.
func (p *pgBouncer) wait(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, poolerStartMax)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, p.address("simple_protocol"))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-ctx.Done():
			p.stop()
			return fmt.Errorf("start PgBouncer: %w: %s", err, p.log.String())
		case <-time.After(poolerEvery):
		}
	}
}

// address is the address of the database through it. mode is pgx's execution mode; empty: its
// default, which prepares statements.
func (p *pgBouncer) address(mode string) string {
	query := url.Values{"host": {p.dir}, "port": {strconv.Itoa(poolerPort)}, "sslmode": {"disable"}}
	if mode != "" {
		query.Set("default_query_exec_mode", mode)
	}
	return "postgres://postgres@/" + url.PathEscape(p.database) + "?" + query.Encode()
}

func (p *pgBouncer) stop() {
	_ = p.leash.Close()
	<-p.ended
	_ = os.RemoveAll(p.dir)
}
