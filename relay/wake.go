package relay

import "sync"

// wake lets publishers poll the table before their pause is over.
type wake struct {
	mu sync.Mutex
	ch chan struct{}
}

// next returns a channel that the next call closes.
func (w *wake) next() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch == nil {
		w.ch = make(chan struct{})
	}
	return w.ch
}

func (w *wake) call() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch != nil {
		close(w.ch)
		w.ch = nil
	}
}

// Wake makes the relay poll the outbox now, instead of at the end of its pause (PollMax at most).
// It is for programs that publish and relay in one process. Call it after COMMIT. It is safe at any
// time and never blocks. A call that comes too early, or a missing call, only costs the pause.
func (r *Relay) Wake() { r.wake.call() }
