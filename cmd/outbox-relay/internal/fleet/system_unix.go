//go:build unix

package fleet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Supported reports whether this system has the signals that a fleet needs.
func Supported() error { return nil }

// isolate puts the child into its own process group: Ctrl-C at the terminal reaches only the
// parent, which ends the children in its own order.
func isolate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(cmd.SysProcAttr)
}

func freeze(p *os.Process) error { return signal(p, syscall.SIGSTOP) }

func resume(p *os.Process) error { return signal(p, syscall.SIGCONT) }

func terminate(p *os.Process) error { return signal(p, syscall.SIGTERM) }

func signal(p *os.Process, s syscall.Signal) error {
	if err := p.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// FreezeSelf stops this process wherever its threads are; another one resumes it after d, also where
// ctx ends meanwhile.
func FreezeSelf(ctx context.Context, d time.Duration) {
	resume := fmt.Sprintf("sleep %v; kill -CONT %d", d.Seconds(), os.Getpid())
	if exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", "-c", resume).Start() != nil { //nolint:gosec // our own values
		return
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
}
