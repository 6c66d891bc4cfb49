package relay

import "sync"

// suspects are rows whose record failed with an error that a retry does not fix. The client fails
// all buffered records of a partition together, so most of them are not the cause. Each is produced
// again alone, and only a row that fails alone is dead.
type suspects struct {
	mu   sync.Mutex
	seqs map[int64]bool
	// refusals are Kafka's errors for rows that were alone in a transaction, which the error made
	// void. Such a row moves to outbox_dead when it is read again; the error is kept until then.
	// There may be several: the work starts over for each.
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

// clearSuspects clears rows that were acknowledged.
func (r *Relay) clearSuspects(rows []*row) {
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

// refusal returns the error that is kept for a row.
func (r *Relay) refusal(seq int64) error {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	return r.suspects.refusals[seq]
}

// forgetRefusals removes the errors of rows whose error is stored.
func (r *Relay) forgetRefusals(dead []deadRow) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	for _, d := range dead {
		delete(r.suspects.refusals, d.row.seq)
	}
}

// refusedAlone is a refusal after which the work starts over at once: the refused row is now known.
type refusedAlone struct{ cause error }

func (r *refusedAlone) Error() string { return r.cause.Error() }
func (r *refusedAlone) Unwrap() error { return r.cause }
