package demo

import (
	"os/exec"
	"runtime"
)

// spawner starts children from one thread that lives as long as the run. Linux sends a child's
// death signal when the thread that started it ends, and the Go runtime may end threads at any
// time.
type spawner struct {
	requests chan *exec.Cmd
	started  chan error
}

func newSpawner() *spawner {
	s := &spawner{requests: make(chan *exec.Cmd), started: make(chan error)}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for cmd := range s.requests {
			s.started <- cmd.Start()
		}
	}()
	return s
}

// start may be called by several goroutines: requests and answers alternate, because the thread
// takes no second request before the answer to the first one is received.
func (s *spawner) start(cmd *exec.Cmd) error {
	s.requests <- cmd
	return <-s.started
}

func (s *spawner) close() { close(s.requests) }
