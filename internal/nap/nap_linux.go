package nap

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// clock is a timerfd: see timerfd_create(2).
type clock struct{ file *os.File }

func newClock() clock {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return clock{}
	}
	return clock{os.NewFile(uintptr(fd), "timerfd")} // it does not block, so reads of it wait in the runtime's epoll_wait
}

func (c clock) sleep(d time.Duration) bool {
	if c.file == nil {
		return false
	}
	once := unix.ItimerSpec{Value: unix.NsecToTimespec(d.Nanoseconds())}
	if err := control(c.file, func(fd int) error { return unix.TimerfdSettime(fd, 0, &once, nil) }); err != nil {
		return false
	}
	var expired [8]byte
	_, err := c.file.Read(expired[:])
	return err == nil
}

// control calls f with the descriptor. File.Fd would make the file blocking.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	if err != nil {
		return err
	}
	return failed
}

func (c clock) close() {
	if c.file != nil {
		_ = c.file.Close()
	}
}
