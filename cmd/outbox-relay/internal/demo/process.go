package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/effectonce/effectonce/internal/pause"
)

// process is one place in the fleet, such as "relay 2". Several operating system processes may run
// in it, one after the other.
type process struct {
	job   job
	fleet *fleet

	mu      sync.Mutex
	cmd     *exec.Cmd     // nil: none is running
	exited  chan struct{} // closed when cmd has ended
	frozen  bool
	leaving bool // it was told or forced to end
	retired bool // no further child may start in this place
	crashes []string
}

// fleet holds all processes of a run.
type fleet struct {
	command   []string
	logs      string // directory of one log file for each process
	processes []*process
	failed    chan error // a process that cannot be kept running

	ctx     context.Context //nolint:containedctx // ends the children that are left when the run is over
	cancel  context.CancelFunc
	waiters sync.WaitGroup
}

// restartPause is the time that an orchestrator would take to restart a process.
const restartPause = 300 * time.Millisecond

// crashesMax is how often one process may end unexpectedly before the run fails.
const crashesMax = 3

func newFleet(ctx context.Context, command []string, logs string, jobs []job) *fleet {
	f := &fleet{command: command, logs: logs, failed: make(chan error, len(jobs))}
	f.ctx, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
	for _, j := range jobs {
		f.processes = append(f.processes, &process{job: j, fleet: f})
	}
	return f
}

// close kills all running children and waits for them to end.
func (f *fleet) close() {
	f.cancel()
	f.waiters.Wait()
}

// start starts the processes of a role, with jobs that begin now.
func (f *fleet) start(r role) error {
	for _, p := range f.of(r) {
		p.job.Start = time.Now()
		if err := p.start(); err != nil {
			return err
		}
	}
	return nil
}

// of returns the processes of a role.
func (f *fleet) of(r role) []*process {
	return slices.DeleteFunc(slices.Clone(f.processes), func(p *process) bool { return p.job.Role != r })
}

// stop asks the processes of a role to end, and kills those that do not end within the limit.
func (f *fleet) stop(ctx context.Context, r role, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var problems []error
	for _, p := range f.of(r) {
		problems = append(problems, p.leave(true))
	}
	for _, p := range f.of(r) {
		if !p.wait(ctx) {
			problems = append(problems, fmt.Errorf("%s did not end within %v of SIGTERM and was killed%s", p.job.Name, limit, p.logTail()), p.kill())
			p.wait(context.WithoutCancel(ctx))
		}
	}
	return errors.Join(problems...)
}

// crashes describes each unexpected end of a process.
func (f *fleet) crashes() []string {
	var all []string
	for _, p := range f.processes {
		p.mu.Lock()
		all = append(all, p.crashes...)
		p.mu.Unlock()
	}
	return all
}

func (p *process) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil || p.retired || p.fleet.ctx.Err() != nil {
		return nil
	}
	task, err := json.Marshal(p.job)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("log of %s: %w", p.job.Name, err)
	}
	// The child has its own handle.
	defer func() { _ = log.Close() }()
	cmd := exec.CommandContext(p.fleet.ctx, p.fleet.command[0], p.fleet.command[1:]...) //nolint:gosec // this program itself
	cmd.Stdout, cmd.Stderr = log, log
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	isolate(cmd)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.job.Name, err)
	}
	// The job fits into the pipe. If the child has already ended, Wait reports it.
	_, _ = stdin.Write(append(task, '\n'))
	p.cmd, p.exited, p.frozen, p.leaving = cmd, make(chan struct{}), false, false
	p.fleet.waiters.Go(func() { p.watch(cmd) })
	return nil
}

// watch waits for the end of a child, and replaces it unless it has finished or is retired.
func (p *process) watch(cmd *exec.Cmd) {
	err := cmd.Wait()
	p.mu.Lock()
	p.cmd, p.frozen = nil, false
	close(p.exited)
	finished := p.job.Role == roleShop && err == nil
	if p.retired || finished || p.fleet.ctx.Err() != nil {
		p.mu.Unlock()
		return
	}
	if !p.leaving {
		p.crashes = append(p.crashes, fmt.Sprintf("%s ended unexpectedly with %s%s", p.job.Name, cmd.ProcessState, p.logTail()))
	}
	crashes := p.crashes
	p.mu.Unlock()
	if n := len(crashes); n > crashesMax {
		p.fleet.failed <- fmt.Errorf("%s\nit ended %d times", crashes[n-1], n)
		return
	}
	if !pause.For(p.fleet.ctx, restartPause) {
		return
	}
	if err := p.start(); err != nil {
		p.fleet.failed <- err
	}
}

// wait returns true when no child is running, false if ctx ends first.
func (p *process) wait(ctx context.Context) bool {
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

// leave asks the child to end. retire: no further child starts in its place.
func (p *process) leave(retire bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leaving, p.retired = true, p.retired || retire
	if p.cmd == nil {
		return nil
	}
	return terminate(p.cmd.Process)
}

// kill ends the child with SIGKILL, frozen or not; watch replaces it. It does nothing if no child is running.
func (p *process) kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return nil
	}
	p.leaving = true
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.job.Name, err)
	}
	return nil
}

// restart ends the child with SIGTERM, within a limit; watch replaces it.
func (p *process) restart(ctx context.Context, limit time.Duration) error {
	polite, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if p.leave(false) == nil && p.wait(polite) {
		return nil
	}
	return p.kill()
}

// freeze stops the child wherever it is, perhaps in the middle of a transaction.
func (p *process) freeze() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || p.leaving {
		return nil
	}
	if err := freeze(p.cmd.Process); err != nil {
		return fmt.Errorf("freeze %s: %w", p.job.Name, err)
	}
	p.frozen = true
	return nil
}

// resume lets a frozen child continue.
func (p *process) resume() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil || !p.frozen {
		return nil
	}
	if err := resume(p.cmd.Process); err != nil {
		return fmt.Errorf("resume %s: %w", p.job.Name, err)
	}
	p.frozen = false
	return nil
}

// healthy reports whether a child is running, not frozen, and not ending.
func (p *process) healthy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd != nil && !p.frozen && !p.leaving
}

func (p *process) logPath() string { return filepath.Join(p.fleet.logs, p.job.Name+".log") }

// logTailBytes is how much of a log goes into an error.
const logTailBytes = 3000

// logTail returns the end of the log, to append to an error's text.
func (p *process) logTail() string {
	text, err := os.ReadFile(p.logPath())
	if err != nil || len(text) == 0 {
		return ""
	}
	return fmt.Sprintf("; the end of its log:\n%s", text[max(0, len(text)-logTailBytes):])
}
