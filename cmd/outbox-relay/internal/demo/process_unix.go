//go:build unix

package demo

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// supported reports whether this system has the signals that the demo needs.
func supported() error { return nil }

// isolate puts the child into its own process group: Ctrl-C at the terminal reaches only the
// parent, which ends the children in its own order. If the parent is killed, a running child notices
// that its standard input ends, and a frozen one gets SIGHUP and SIGCONT from the kernel, as every
// stopped group that lost its parent.
func isolate(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

func freeze(p *os.Process) error { return signal(p, syscall.SIGSTOP) }

func resume(p *os.Process) error { return signal(p, syscall.SIGCONT) }

func terminate(p *os.Process) error { return signal(p, syscall.SIGTERM) }

func signal(p *os.Process, s syscall.Signal) error {
	if err := p.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}
