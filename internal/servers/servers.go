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
)

// Kind says where a server comes from.
type Kind string

// The kinds of servers, in the order in which they are preferred.
const (
	KindExternal  Kind = "external"  // named by the environment or the options; never stopped
	KindContainer Kind = "container" // in the Docker engine of this machine
	KindEmbedded  Kind = "embedded"  // PostgreSQL from downloaded binaries, or kfake in this process
)

const (
	startMax   = 4 * time.Minute // until a server answers, pulling its image included
	attemptMax = 3 * time.Second // one attempt to talk to it
	pollEvery  = 25 * time.Millisecond
	portsMax   = 5 // free ports to try: another process may take one between the look and the start
)

// errExited ends the wait for a server that will never answer.
var errExited = errors.New("the server exited")

// backend is one way of running a server.
type backend interface {
	start(ctx context.Context) error
	alive(ctx context.Context) error // errExited with the end of its log, once it is gone
	kill(ctx context.Context) error  // as a crash would: nothing is flushed or said goodbye to
	remove(ctx context.Context) error
}

// Server is what PostgreSQL and Kafka have in common. Its methods are for one goroutine at a time.
type Server struct {
	Description string // one line for people: what was taken, and where it listens
	Kind        Kind

	backend backend
	ready   func(context.Context) error
}

// Stop ends the server and removes its data. An external one is left alone. Calling it again does
// nothing.
func (s *Server) Stop(ctx context.Context) error {
	if !running.forget(s) {
		return nil
	}
	return s.backend.remove(ctx)
}

// Kill ends the server like a crash: SIGKILL for a container, an immediate shutdown for an embedded
// PostgreSQL. What was committed is still there after Restart. Servers that this program does not run
// as a process of their own return an error.
func (s *Server) Kill(ctx context.Context) error {
	return s.backend.kill(ctx)
}

// Restart starts a server that was killed, at the address that it had, and waits until it answers.
func (s *Server) Restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startMax)
	defer cancel()
	if err := s.backend.start(ctx); err != nil {
		return err
	}
	return s.await(ctx)
}

// await returns once the server answers. Neither an open port nor a line in a log is taken for an
// answer: Docker's proxy accepts before the server does, and logs differ between images.
func (s *Server) await(ctx context.Context) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
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
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until the server answers: %w; its last answer: %w", ctx.Err(), err)
		case <-tick.C:
		}
	}
}

// launch runs a new server on a free port of 127.0.0.1, or on the next one if somebody else was faster.
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
			running.add(s)
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

// portTaken reads the error's text, because that is all that PostgreSQL's log and the Docker engine give.
func portTaken(err error) bool {
	text := strings.ToLower(err.Error())
	for _, phrase := range []string{"address already in use", "port is already allocated", "ports are not available"} {
		if strings.Contains(text, phrase) {
			return true
		}
	}
	return false
}

// choose picks the kind: what the options force, then an address, then Docker, then what the program brings.
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

// replaceable tells whether the embedded kind may stand in for a container that does not start: an engine
// may answer and still have no image, and no way to one.
func replaceable(ctx context.Context, kind Kind) bool {
	return kind == KindContainer && ctx.Err() == nil && env("REQUIRE_CONTAINERS") != "1"
}

// embeddedInstead starts the embedded kind and says why in its description.
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

// StopAll stops every server that this process started and has not stopped yet.
func StopAll(ctx context.Context) error {
	var errs []error
	for _, s := range running.list() {
		errs = append(errs, s.Stop(ctx))
	}
	return errors.Join(errs...)
}

// running is what StopAll stops. It belongs to the process, as the servers do: they are started by
// whichever test needs them first, and the end of the process is the only common place to stop them.
var running registry //nolint:gochecknoglobals // see above

type registry struct {
	mu      sync.Mutex
	servers map[*Server]struct{}
}

func (r *registry) add(s *Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.servers == nil {
		r.servers = map[*Server]struct{}{}
	}
	r.servers[s] = struct{}{}
}

func (r *registry) forget(s *Server) (known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, known = r.servers[s]
	delete(r.servers, s)
	return known
}

func (r *registry) list() []*Server {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]*Server, 0, len(r.servers))
	for s := range r.servers {
		all = append(all, s)
	}
	return all
}

// external is a server that somebody else runs.
type external struct{}

func (external) start(context.Context) error  { return nil }
func (external) alive(context.Context) error  { return nil }
func (external) remove(context.Context) error { return nil }
func (external) kill(context.Context) error {
	return errors.New("kill an external server: not ours to kill; start one with Own set")
}
