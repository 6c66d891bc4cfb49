//go:build linux || darwin

package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

// cluster is a PostgreSQL that runs as a child of this process.
type cluster struct {
	dir      string // data, log and password; removed with the server
	binaries string
	flags    []string

	server *exec.Cmd
	exited chan struct{} // closed when server is gone
}

func (c *cluster) logFile() string { return filepath.Join(c.dir, "log") }
func (c *cluster) data() string    { return filepath.Join(c.dir, "data") }

// memory is where a Linux has files in memory; empty: there is none, or too little room.
func memory() string {
	const dir, tmpfs, roomMin = "/dev/shm", 0x01021994, 2 << 30
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil || int64(fs.Type) != tmpfs || int64(fs.Bavail)*int64(fs.Bsize) < roomMin { //nolint:unconvert // the types depend on the system
		return ""
	}
	return dir
}

// createCluster creates the data directory.
func createCluster(ctx context.Context, binaries, password string, flags []string, opts PostgresOptions) (_ *cluster, err error) {
	parent := ""
	if opts.InMemory {
		parent = memory()
	}
	dir, err := os.MkdirTemp(parent, "effectonce-postgres-data-")
	if err != nil {
		return nil, err
	}
	c := &cluster{dir: dir, binaries: binaries, flags: flags}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	secret := filepath.Join(dir, "password")
	if err := os.WriteFile(secret, []byte(password), 0o600); err != nil {
		return nil, err
	}
	if err := errors.Join(giveAway(secret), giveAway(dir)); err != nil {
		return nil, err
	}
	// Every machine has this locale, and PostgreSQL itself implements it; initdb would take one
	// from the environment, possibly with another encoding. No syncing: a crash of the machine also
	// ends the owner of this directory.
	arguments := []string{"-D", c.data(), "-U", "postgres", "-A", "scram-sha-256", "--pwfile", secret, "-E", "UTF8", "--locale=C", "--no-sync"}
	if builtinLocales() {
		arguments = append(arguments, "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
	}
	initdb := c.command(ctx, "initdb", arguments...)
	if output, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w:\n%s", err, tail(output))
	}
	return c, os.Remove(secret)
}

// command prepares a program of PostgreSQL. It runs as an ordinary user, and a Ctrl-C at the
// terminal does not reach it, so that this process decides when its database ends.
func (c *cluster) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	program := filepath.Join(c.binaries, "bin", name)
	cmd := exec.CommandContext(ctx, program, args...) //nolint:gosec // in a directory that cacheDir vouches for
	cmd.Dir = c.dir
	cmd.Env = []string{"LC_ALL=C", "TZ=UTC", "PATH=" + filepath.Dir(program) + ":/usr/bin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: credential()}
	return cmd
}

func (c *cluster) start(ctx context.Context) error {
	log, err := os.OpenFile(c.logFile(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }() // the server has its own handle
	// The server outlives the context of the call that started it.
	server := c.command(context.WithoutCancel(ctx), "postgres", append([]string{"-D", c.data()}, c.flags...)...)
	if library := preload(); library != "" {
		server.Env = append(server.Env, "LD_PRELOAD="+library)
	}
	// Not this process's own output: its reader would wait for the server to close it.
	server.Stdout, server.Stderr = log, log
	if err := server.Start(); err != nil {
		return fmt.Errorf("run postgres: %w", err)
	}
	release, err := c.leash(ctx, server.Process.Pid)
	exited := make(chan struct{})
	go func() {
		_ = server.Wait() // the log has the reason
		release()
		close(exited)
	}()
	c.server, c.exited = server, exited
	if err != nil {
		return errors.Join(err, c.kill(ctx))
	}
	return nil
}

// leashed waits for the end of its input, which comes with the end of this process, however it
// ends. SIGQUIT is PostgreSQL's immediate shutdown. (The kernel's own signal at the death of a
// parent exists on Linux only, and is bound to a thread in Go.)
const leashed = `read -r _; kill -QUIT "$0"; sleep 1; rm -rf -- "$1"`

// leash makes sure that the server does not survive this process. The caller has to call release
// once the server is gone, because the system may reuse its process ID.
func (c *cluster) leash(ctx context.Context, pid int) (release func(), err error) {
	args := []string{"-c", leashed, strconv.Itoa(pid), c.dir}
	watch := exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", args...) //nolint:gosec // a constant and our own values
	watch.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: credential()}
	input, err := watch.StdinPipe()
	if err == nil {
		err = watch.Start()
	}
	if err != nil {
		return func() {}, fmt.Errorf("run the watch over postgres: %w", err)
	}
	return func() {
		_ = watch.Process.Kill() // before its input closes
		_ = input.Close()
		_ = watch.Wait()
	}, nil
}

func (c *cluster) alive(context.Context) error {
	select {
	case <-c.exited:
		return fmt.Errorf("%w:\n%s", errExited, c.log())
	default:
		return nil
	}
}

func (c *cluster) log() []byte {
	text, err := os.ReadFile(c.logFile())
	if err != nil {
		return []byte(err.Error())
	}
	return bytes.TrimSpace(tail(text))
}

func (c *cluster) kill(ctx context.Context) error {
	if c.server == nil {
		return nil
	}
	if err := c.server.Process.Signal(syscall.SIGQUIT); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal postgres: %w", err)
	}
	select {
	case <-c.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of postgres: %w:\n%s", ctx.Err(), c.log())
	}
}

func (c *cluster) remove(ctx context.Context) error {
	return errors.Join(c.kill(ctx), os.RemoveAll(c.dir))
}
