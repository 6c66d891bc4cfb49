package main

import (
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

func canReplace() error { return nil }

// replace makes this process run another program. It still dies with its parent: the kernel keeps
// that wish for the thread that replaces itself.
func replace(name string, arguments ...string) error {
	path, err := exec.LookPath(name)
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	return syscall.Exec(path, append([]string{name}, arguments...), os.Environ())
}
