package consumer

import "sync"

// changes hands changes of state to Hooks.State, one at a time and in their order, from a goroutine of its own: the hook
// may ask for the Status, and no partition waits for it.
type changes struct {
	wanted  bool // there is a hook
	arrived chan struct{}

	mu   sync.Mutex
	list []StateChange
}

// changesMax bounds what waits while the hook does not return. Then later changes of a partition are made one.
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

func (q *changes) take() []StateChange {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := q.list
	q.list = nil
	return list
}

// passOn calls the hook for each change until done is closed, and for those that are left then. A hook that does not
// return is not called again in this run: each further one would be left behind, too.
func (q *changes) passOn(e *engine, done <-chan struct{}) {
	for ended, returns := false, true; !ended; {
		select {
		case <-q.arrived:
		case <-done:
			ended = true
		}
		for _, change := range q.take() {
			returns = returns && e.hook(func() { e.cfg.Hooks.State(change) })
		}
	}
}
