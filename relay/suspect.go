package relay

import "sync"

// suspects are rows whose record failed with an error that trying again does not mend. The client fails
// everything that is buffered for a partition together, so most of them are innocent: each is produced
// again alone, and only one that fails alone is dead.
type suspects struct {
	mu   sync.Mutex
	seqs map[int64]bool
	// refusals are what Kafka said about rows that were alone in a transaction, which it made void: the row is
	// moved to outbox_dead when it is read again, and it is kept until then. There may be several: the work starts over for each.
	refusals map[int64]error
}

func (r *Relay) suspect(seq int64) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	if r.suspects.seqs == nil {
		r.suspects.seqs = map[int64]bool{}
	}
	r.suspects.seqs[seq] = true
}

func (r *Relay) anySuspect(rows []*row) bool {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	if len(r.suspects.seqs) == 0 {
		return false
	}
	for _, row := range rows {
		if r.suspects.seqs[row.seq] {
			return true
		}
	}
	return false
}

// acquit clears rows that were acknowledged.
func (r *Relay) acquit(rows []*row) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	for _, row := range rows {
		delete(r.suspects.seqs, row.seq)
	}
}

func (r *Relay) refuse(seq int64, err error) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	if r.suspects.refusals == nil {
		r.suspects.refusals = map[int64]error{}
	}
	r.suspects.refusals[seq] = err
	delete(r.suspects.seqs, seq)
}

// refusal returns what was said about a row.
func (r *Relay) refusal(seq int64) error {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	return r.suspects.refusals[seq]
}

// forgetRefusals is for rows of which it is stored.
func (r *Relay) forgetRefusals(dead []deadRow) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	for _, d := range dead {
		delete(r.suspects.refusals, d.row.seq)
	}
}

// refusedAlone is a refusal of which the work starts over at once: it is known now which row it is.
type refusedAlone struct{ cause error }

func (r *refusedAlone) Error() string { return r.cause.Error() }
func (r *refusedAlone) Unwrap() error { return r.cause }
