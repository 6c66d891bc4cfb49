package consumer

import "sync"

// changes passes state changes to Hooks.State, one at a time and in order, from a separate
// goroutine: the hook may call Status, and no partition waits for it.
type changes struct {
	wanted  bool // a hook is configured
	arrived chan struct{}

	mu   sync.Mutex
	list []StateChange
}

// changesMax bounds the changes that wait while the hook does not return. Beyond it, later changes
// of a partition are merged into one.
const changesMax = 10_000

func newChanges(wanted bool) *changes {
	return &changes{wanted: wanted, arrived: make(chan struct{}, 1)}
}

func (q *changes) add(change StateChange) {
	if !q.wanted {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.merged(change) {
		q.list = append(q.list, change)
	}
	select {
	case q.arrived <- struct{}{}:
	default:
	}
}

func (q *changes) merged(change StateChange) bool {
	if len(q.list) < changesMax {
		return false
	}
	for i := len(q.list) - 1; i >= 0; i-- {
		if last := &q.list[i]; last.Topic == change.Topic && last.Partition == change.Partition {
			last.To, last.Err = change.To, change.Err
			return true
		}
	}
	return false
}

func (q *changes) drain() []StateChange {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := q.list
	q.list = nil
	return list
}

// passOn calls the hook for each change until done is closed, and then for the remaining ones.
func (q *changes) passOn(e *engine, done <-chan struct{}) {
	for ended := false; !ended; {
		select {
		case <-q.arrived:
		case <-done:
			ended = true
		}
		for _, change := range q.drain() {
			e.hook(nil, func() { e.cfg.Hooks.State(change) })
		}
	}
}
