package servers

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
)

// asOrdinaryUser runs f, what f executes and the files that it creates without root's rights. The
// raw system calls change one thread only; those of package syscall would change the process. The
// goroutine keeps its thread and never unlocks it. Go ends such a thread with its goroutine, and
// starts new threads from another one. So nothing else ever runs with these credentials, and f
// never runs with others.
func asOrdinaryUser(f func() error) error {
	if os.Geteuid() != 0 {
		return f()
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := dropThread(); err != nil {
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

func dropThread() error {
	const id = ordinary
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("drop root's groups: %w", errno)
	}
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESGID, id, id, id); errno != 0 {
		return fmt.Errorf("become group %d: %w", id, errno)
	}
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, id, id, id); errno != 0 {
		return fmt.Errorf("become user %d: %w", id, errno)
	}
	return nil
}
