package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/effectonce/effectonce/internal/pause"
)

// Process is one place in the fleet, such as "relay 2". Several operating system processes may run
// in it, one after the other. Its methods may be called by several goroutines.
type Process struct {
	Name  string
	fleet *Fleet
	spec  Spec

	mu      sync.Mutex
	cmd     *exec.Cmd     // nil: none is running
	exited  chan struct{} // closed when cmd has ended
	frozen  bool
	leaving bool // it was told or forced to end
	held    bool // no child may start until Release
	retired bool // no further child may start in this place
	crashes []string
}

// Spec is what runs in a place.
type Spec struct {
	// Name of the process, its log and what messages call it.
	Name string
	// Command starts the child: program and arguments.
	Command []string
	// Env are variables for the child, as name=value, besides those of this process.
	Env []string
	// Input returns what the child reads as one line of JSON from its standard input, at each
	// start. The input stays open until this process ends, however it ends.
	Input func() any
	// Finishes means that a child that ends without an error has done its work, and is not
	// replaced. Otherwise that is a crash.
	Finishes bool
	// Expected is an exit status that is no crash: the child is replaced, however often that happens.
	// 0: none.
	Expected int
}

// Fleet holds the processes of a run.
type Fleet struct {
	// Failed gets the error of a process that cannot be kept running.
	Failed chan error

	logs      string // directory of one log file for each process
	processes []*Process
	spawner   *spawner

	ctx     context.Context //nolint:containedctx // ends the children that are left when the run is over
	cancel  context.CancelFunc
	waiters sync.WaitGroup
	once    sync.Once
}

// RestartPause is the time that an orchestrator would take to restart a process.
const RestartPause = 300 * time.Millisecond

// crashesMax is how often one process may end unexpectedly before the run fails.
const crashesMax = 3

// New returns a fleet whose processes log below a directory. None is started yet. The children end
// with Close, not with ctx.
func New(ctx context.Context, logs string, specs []Spec) *Fleet {
	f := &Fleet{logs: logs, spawner: newSpawner(), Failed: make(chan error, len(specs))}
	f.ctx, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
	for _, s := range specs {
		f.processes = append(f.processes, &Process{Name: s.Name, spec: s, fleet: f})
	}
	return f
}

// Close kills all running children and waits for them to end. Calling it again does nothing.
func (f *Fleet) Close() { f.once.Do(f.end) }

func (f *Fleet) end() {
	f.cancel()
	for _, p := range f.processes {
		p.mu.Lock()
		p.leaving, p.retired = true, true
		p.mu.Unlock()
	}
	f.waiters.Wait()
	f.spawner.close()
}

// All returns the processes for which is holds, in the order of New.
func (f *Fleet) All(is func(p *Process) bool) []*Process {
	var found []*Process
	for _, p := range f.processes {
		if is(p) {
			found = append(found, p)
		}
	}
	return found
}

// Frozen returns the names of the frozen processes.
func (f *Fleet) Frozen() []string {
	var names []string
	for _, p := range f.processes {
		p.mu.Lock()
		if p.frozen {
			names = append(names, p.Name)
		}
		p.mu.Unlock()
	}
	return names
}

// Crashes describes each unexpected end of a process.
func (f *Fleet) Crashes() []string {
	var all []string
	for _, p := range f.processes {
		p.mu.Lock()
		all = append(all, p.crashes...)
		p.mu.Unlock()
	}
	return all
}

// Stop asks processes to end, kills those that do not end within the limit, and starts none in
// their places again.
func Stop(ctx context.Context, processes []*Process, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var problems []error
	for _, p := range processes {
		p.mu.Lock()
		p.leaving, p.retired = true, true
		if p.cmd != nil {
			problems = append(problems, terminate(p.cmd.Process))
		}
		p.mu.Unlock()
	}
	for _, p := range processes {
		if !p.Wait(ctx) {
			problems = append(problems, fmt.Errorf("%s did not end within %v of SIGTERM and was killed%s", p.Name, limit, p.LogTail()), p.Kill())
			p.Wait(context.WithoutCancel(ctx))
		}
	}
	return errors.Join(problems...)
}

// Start starts a child, unless one is running or the place is retired.
func (p *Process) Start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil || p.retired || p.held || p.fleet.ctx.Err() != nil {
		return nil
	}
	input, err := json.Marshal(p.spec.Input())
	if err != nil {
		return err
	}
	log, err := os.OpenFile(p.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("log of %s: %w", p.Name, err)
	}
	// The child has its own handle.
	defer func() { _ = log.Close() }()
	cmd := exec.CommandContext(p.fleet.ctx, p.spec.Command[0], p.spec.Command[1:]...) //nolint:gosec // this program itself, or what its user names
	cmd.Stdout, cmd.Stderr = log, log
	if len(p.spec.Env) > 0 {
		cmd.Env = append(os.Environ(), p.spec.Env...)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	isolate(cmd)
	if err := p.fleet.spawner.start(cmd); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	// The input fits into the pipe. If the child has already ended, Wait reports it.
	_, _ = stdin.Write(append(input, '\n'))
	p.cmd, p.exited, p.frozen, p.leaving = cmd, make(chan struct{}), false, false
	p.fleet.waiters.Go(func() { p.watch(cmd) })
	return nil
}

// watch waits for the end of a child, and replaces it unless it was told to end.
func (p *Process) watch(cmd *exec.Cmd) {
	err := cmd.Wait()
	p.mu.Lock()
	p.cmd, p.frozen = nil, false
	close(p.exited)
	finished := p.spec.Finishes && err == nil
	if p.leaving || p.retired || finished || p.fleet.ctx.Err() != nil {
		p.mu.Unlock()
		return
	}
	var status *exec.ExitError
	if p.spec.Expected != 0 && errors.As(err, &status) && status.ExitCode() == p.spec.Expected {
		p.mu.Unlock()
		p.replace()
		return
	}
	crash := fmt.Errorf("%s ended unexpectedly with %w%s", p.Name, exitError(err), p.LogTail())
	p.crashes = append(p.crashes, crash.Error())
	crashes := len(p.crashes)
	p.mu.Unlock()
	if crashes > crashesMax {
		p.fleet.Failed <- fmt.Errorf("%w\nit ended %d times", crash, crashes)
		return
	}
	p.replace()
}

// replace starts another child in the place of one that ended.
func (p *Process) replace() {
	if !pause.For(p.fleet.ctx, RestartPause) {
		return
	}
	if err := p.Start(); err != nil {
		p.fleet.Failed <- err
	}
}

func exitError(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// Wait returns true when no child is running, false if ctx ends first.
func (p *Process) Wait(ctx context.Context) bool {
	p.mu.Lock()
	running, exited := p.cmd != nil, p.exited
	p.mu.Unlock()
	if !running {
		return true
	}
	select {
	case <-exited:
		return true
	case <-ctx.Done():
		return false
	}
}

// Kill ends the child with SIGKILL, frozen or not. It does nothing if no child is running.
func (p *Process) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return nil
	}
	p.leaving = true
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.Name, err)
	}
	return nil
}

// Restart ends the child with SIGTERM, within a limit, and starts it again.
func (p *Process) Restart(ctx context.Context, limit time.Duration) error {
	p.mu.Lock()
	if p.cmd != nil {
		p.leaving = true
		_ = terminate(p.cmd.Process) // it is killed below
	}
	p.mu.Unlock()
	polite, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if !p.Wait(polite) {
		if err := p.Kill(); err != nil {
			return err
		}
		p.Wait(context.WithoutCancel(ctx))
	}
	return p.Start()
}

// Hold stops processes as Stop does, but for a time: Release starts them again, and until then nothing
// else does.
func Hold(ctx context.Context, processes []*Process, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var problems []error
	for _, p := range processes {
		p.mu.Lock()
		p.held, p.leaving = true, true
		if p.cmd != nil {
			_ = terminate(p.cmd.Process) // it is killed below
		}
		p.mu.Unlock()
	}
	for _, p := range processes {
		if !p.Wait(ctx) {
			problems = append(problems, p.Kill())
			p.Wait(context.WithoutCancel(ctx))
		}
	}
	return errors.Join(problems...)
}

// Release starts processes that Hold stopped.
func Release(processes []*Process) error {
	var problems []error
	for _, p := range processes {
		p.mu.Lock()
		p.held = false
		p.mu.Unlock()
		problems = append(problems, p.Start())
	}
	return errors.Join(problems...)
}

// Freeze stops the child wherever it is, perhaps in the middle of a transaction.
func (p *Process) Freeze() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || p.leaving {
		return nil
	}
	if err := freeze(p.cmd.Process); err != nil {
		return fmt.Errorf("freeze %s: %w", p.Name, err)
	}
	p.frozen = true
	return nil
}

// Resume lets a frozen child continue.
func (p *Process) Resume() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || !p.frozen {
		return nil
	}
	if err := resume(p.cmd.Process); err != nil {
		return fmt.Errorf("resume %s: %w", p.Name, err)
	}
	p.frozen = false
	return nil
}

// Healthy reports whether a child is running, not frozen, and not ending.
func (p *Process) Healthy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd != nil && !p.frozen && !p.leaving
}

// LogPath is the file with the output of all children of this place.
func (p *Process) LogPath() string { return filepath.Join(p.fleet.logs, p.Name+".log") }

// logTailBytes is how much of a log goes into an error.
const logTailBytes = 3000

// LogTail returns the end of the log, to append to an error's text.
func (p *Process) LogTail() string {
	text, err := os.ReadFile(p.LogPath())
	if err != nil || len(text) == 0 {
		return ""
	}
	return fmt.Sprintf("; the end of its log:\n%s", text[max(0, len(text)-logTailBytes):])
}
