//go:build linux || darwin

package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

// StartPooler starts a PgBouncer in transaction mode and returns once it answers. The caller has to
// call Stop. Kill ends it like a crash. A PgBouncer that ends by itself is started again, as a service is: 1.18 does now and
// then when a cancel request meets the end of a connection's lifetime ("bad server state: 11").
func StartPooler(ctx context.Context, options PoolerOptions) (*Pooler, error) {
	binary, version, err := FindPooler(ctx)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(options.DatabaseURL)
	if err != nil {
		return nil, errors.New("start PgBouncer: the database's address is no URL") // the error would show the password
	}
	p := &Pooler{Version: version}
	p.Kind, p.ready = KindEmbedded, p.answers
	err = launch(ctx, func(port int) (*Server, error) {
		b, err := layBouncer(binary, port, u, options)
		if err != nil {
			return nil, err
		}
		own := *u
		own.Host, own.RawQuery = fmt.Sprintf("127.0.0.1:%d", port), "sslmode=disable"
		p.URL, p.backend = own.String(), b
		p.Description = fmt.Sprintf("PgBouncer %s at %s", version, own.Host)
		return &p.Server, nil
	})
	if err != nil {
		return nil, fmt.Errorf("start PgBouncer: %w", err)
	}
	return p, nil
}

// answers reports whether PgBouncer's console does.
func (p *Pooler) answers(ctx context.Context) error {
	u, err := url.Parse(p.URL)
	if err != nil {
		return err
	}
	u.Path, u.RawQuery = "/pgbouncer", u.RawQuery+"&default_query_exec_mode=simple_protocol"
	conn, err := pgx.Connect(ctx, u.String())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, "SHOW VERSION")
	return err
}

// Log is what PgBouncer wrote.
func (p *Pooler) Log() string {
	b, ok := p.backend.(*bouncer)
	if !ok {
		return ""
	}
	return string(b.log())
}

// bouncer is a PgBouncer that runs as a child of this process.
type bouncer struct {
	dir    string // settings, passwords and log; removed with it
	binary string

	stop   chan struct{} // closed by kill
	exited chan struct{} // closed when it is gone for good; nil: it never ran
}

// layBouncer writes the files of a PgBouncer that listens at a port.
func layBouncer(binary string, port int, to *url.URL, options PoolerOptions) (_ *bouncer, err error) {
	dir, err := os.MkdirTemp("", "effectonce-pgbouncer-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	b := &bouncer{dir: dir, binary: binary}
	password, _ := to.User.Password()
	users := fmt.Sprintf("%q %q\n", to.User.Username(), password)
	for name, password := range options.Logins {
		users += fmt.Sprintf("%q %q\n", name, password)
	}
	settings := append([]string{
		"[databases]", fmt.Sprintf("* = host=%s port=%s", to.Hostname(), to.Port()),
		"[pgbouncer]", "pool_mode = transaction", "auth_type = scram-sha-256", "auth_file = " + filepath.Join(dir, "users"),
		"admin_users = " + to.User.Username(), "listen_addr = 127.0.0.1", fmt.Sprintf("listen_port = %d", port), "unix_socket_dir =", "max_client_conn = 1000",
	}, options.Settings...)
	for name, text := range map[string]string{"users": users, "pgbouncer.ini": strings.Join(settings, "\n") + "\n", "log": ""} {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(file, []byte(text), 0o600), giveAway(file)); err != nil {
			return nil, err
		}
	}
	return b, giveAway(dir)
}

// leashedBouncer ends PgBouncer like a crash.
const leashedBouncer = `read -r _; kill -KILL "$0"; sleep 1; rm -rf -- "$1"`

func (b *bouncer) start(ctx context.Context) error {
	log, err := os.OpenFile(filepath.Join(b.dir, "log"), os.O_WRONLY|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	stop, exited, first := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(exited)
		defer func() { _ = log.Close() }()
		for {
			if err := b.runOnce(context.WithoutCancel(ctx), log, stop, first); err != nil {
				return
			}
			select {
			case <-stop:
				return
			case <-time.After(restartPause):
			}
		}
	}()
	b.stop, b.exited = stop, exited
	return <-first
}

// restartPause is before the start of a PgBouncer that ended by itself.
const restartPause = 100 * time.Millisecond

// runOnce runs PgBouncer until it ends, or stop is closed. It reports on first how the start went.
func (b *bouncer) runOnce(ctx context.Context, log *os.File, stop <-chan struct{}, first chan<- error) (err error) {
	defer func() {
		select {
		case first <- err:
		default:
		}
	}()
	cmd := exec.CommandContext(ctx, b.binary, filepath.Join(b.dir, "pgbouncer.ini")) //nolint:gosec // what FindPooler found
	cmd.Dir, cmd.Stdout, cmd.Stderr = b.dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: credential()} // PgBouncer refuses to run as root
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run PgBouncer: %w", err)
	}
	gone := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the log has the reason
		close(gone)
	}()
	release, err := leash(ctx, leashedBouncer, strconv.Itoa(cmd.Process.Pid), b.dir)
	defer release()
	select {
	case first <- err:
	default:
	}
	if err == nil {
		select {
		case <-gone:
			return nil
		case <-stop:
		}
	}
	_ = cmd.Process.Kill()
	<-gone
	return err
}

// alive reports a PgBouncer that will not start, such as for its settings or its port.
func (b *bouncer) alive(context.Context) error {
	if text := b.log(); bytes.Contains(text, []byte(" FATAL ")) {
		return fmt.Errorf("%w:\n%s", errExited, text)
	}
	return nil
}

func (b *bouncer) log() []byte {
	text, err := os.ReadFile(filepath.Join(b.dir, "log"))
	if err != nil {
		return []byte(err.Error())
	}
	return bytes.TrimSpace(tail(text))
}

func (b *bouncer) kill(ctx context.Context) error {
	if b.exited == nil {
		return nil
	}
	select {
	case <-b.stop: // again
	default:
		close(b.stop)
	}
	select {
	case <-b.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of PgBouncer: %w", ctx.Err())
	}
}

func (b *bouncer) remove(ctx context.Context) error {
	return errors.Join(b.kill(ctx), os.RemoveAll(b.dir))
}
