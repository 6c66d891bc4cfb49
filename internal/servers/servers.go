package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/effectonce/effectonce/internal/pause"
)

// Kind is where a server comes from.
type Kind string

// The kinds of servers, in the order of preference.
const (
	KindExternal  Kind = "external"  // named by the environment or the options; never stopped
	KindContainer Kind = "container" // in the Docker engine of this machine
	KindEmbedded  Kind = "embedded"  // PostgreSQL from downloaded binaries, or kfake in this process
)

const (
	startMax   = 4 * time.Minute // until a server answers, including the pull of its image
	attemptMax = 3 * time.Second // one attempt to talk to it
	pollEvery  = 25 * time.Millisecond
	// Free ports to try: another process may take one between the check and the start.
	portsMax = 5
)

// errExited ends the wait for a server that will never answer.
var errExited = errors.New("the server exited")

// backend is one way to run a server.
type backend interface {
	start(ctx context.Context) error
	alive(ctx context.Context) error // errExited with the end of its log, once it has exited
	kill(ctx context.Context) error  // as a crash would: nothing is flushed or shut down
	remove(ctx context.Context) error
}

// Server has what PostgreSQL and Kafka have in common. Its methods are for one goroutine at a time.
type Server struct {
	Description string // one line for people: which server it is, and where it listens
	Kind        Kind

	backend backend
	ready   func(context.Context) error
}

// Stop ends the server and removes its data. It does not touch an external server. Calling it again
// does nothing.
func (s *Server) Stop(ctx context.Context) error {
	if _, runs := running.LoadAndDelete(s); !runs {
		return nil
	}
	return s.backend.remove(ctx)
}

// Kill ends the server like a crash: SIGKILL for a container, an immediate shutdown for an embedded
// PostgreSQL. Committed data is still there after Restart. For servers that this program does not
// run as a separate process it returns an error.
func (s *Server) Kill(ctx context.Context) error {
	return s.backend.kill(ctx)
}

// Restart starts a killed server at its earlier address, and waits until it answers.
func (s *Server) Restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startMax)
	defer cancel()
	if err := s.backend.start(ctx); err != nil {
		return err
	}
	return s.await(ctx)
}

// await returns once the server answers. An open port or a line in a log is not enough: Docker's
// proxy accepts connections before the server does, and logs differ between images.
func (s *Server) await(ctx context.Context) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, attemptMax)
		err := s.ready(attempt)
		cancel()
		if err == nil {
			return nil
		}
		if gone := s.backend.alive(ctx); errors.Is(gone, errExited) {
			return gone
		}
		if !pause.For(ctx, pollEvery) {
			return fmt.Errorf("wait until the server answers: %w; its last error: %w", ctx.Err(), err)
		}
	}
}

// launch runs a new server on a free port of 127.0.0.1. If another process takes that port first,
// it tries the next one.
func launch(ctx context.Context, create func(port int) (*Server, error)) error {
	ctx, cancel := context.WithTimeout(ctx, startMax)
	defer cancel()
	var err error
	for range portsMax {
		var port int
		if port, err = freePort(ctx); err != nil {
			return err
		}
		var s *Server
		if s, err = create(port); err != nil {
			return err
		}
		if err = s.Restart(ctx); err == nil {
			running.Store(s, nil)
			return nil
		}
		err = errors.Join(err, s.backend.remove(context.WithoutCancel(ctx)))
		if !portTaken(err) {
			return err
		}
	}
	return err
}

func freePort(ctx context.Context) (int, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

// portTaken reads the error's text, because PostgreSQL's log and the Docker engine give nothing
// else.
func portTaken(err error) bool {
	text := strings.ToLower(err.Error())
	for _, phrase := range []string{"address already in use", "port is already allocated", "ports are not available"} {
		if strings.Contains(text, phrase) {
			return true
		}
	}
	return false
}

// choose picks the kind: what the options force, then an address, then Docker, then the embedded
// kind.
func choose(ctx context.Context, embedded bool, address string) (Kind, error) {
	switch {
	case embedded:
		return KindEmbedded, nil
	case address != "":
		return KindExternal, nil
	}
	err := pingDocker(ctx)
	switch {
	case err == nil:
		return KindContainer, nil
	case env("REQUIRE_CONTAINERS") == "1":
		return "", fmt.Errorf("REQUIRE_CONTAINERS=1, but no Docker engine answers (start one, or name the servers in DATABASE_URL and KAFKA_BROKERS): %w", err)
	}
	return KindEmbedded, ctx.Err()
}

// replaceable reports whether the embedded kind may replace a container that does not start: an
// engine may answer without having the image, or a way to get it.
func replaceable(ctx context.Context, kind Kind) bool {
	return kind == KindContainer && ctx.Err() == nil && env("REQUIRE_CONTAINERS") != "1"
}

// embeddedInstead starts the embedded kind and puts the reason into its description.
func embeddedInstead[S interface{ describe(note string) }](why error, start func() (S, error)) (S, error) {
	server, err := start()
	if err != nil {
		return server, errors.Join(why, err)
	}
	server.describe(fmt.Sprintf("; a Docker engine answers, but no container starts: %.200s", strings.ReplaceAll(why.Error(), "\n", " ")))
	return server, nil
}

func (s *Server) describe(note string) { s.Description += note }

func env(name string) string {
	return os.Getenv(name) //nolint:forbidigo // the environment names the servers, to tests and commands alike
}

// preload is a library for embedded PostgreSQL servers, which .ci/clock sets.
func preload() string { return env("EMBEDDED_POSTGRES_PRELOAD") }

// running are the servers that StopAll stops. They belong to the process: the first test that needs
// one starts it, and only the end of the process is a common place to stop them.
var running sync.Map //nolint:gochecknoglobals // see above

// StopAll stops every server that this process started and has not stopped yet.
func StopAll(ctx context.Context) error {
	var errs []error
	for s := range running.Range {
		errs = append(errs, s.(*Server).Stop(ctx))
	}
	return errors.Join(errs...)
}

// outside is a server that is no process of this program: one that others started, or kfake.
type outside struct {
	noKill string // why it cannot be killed
	stop   func()
}

func (outside) start(context.Context) error  { return nil }
func (outside) alive(context.Context) error  { return nil }
func (o outside) kill(context.Context) error { return errors.New(o.noKill) }
func (o outside) remove(context.Context) error {
	if o.stop != nil {
		o.stop()
	}
	return nil
}

var external = outside{noKill: "kill an external server: this program did not start it; start one with Own set"} //nolint:gochecknoglobals // a constant
