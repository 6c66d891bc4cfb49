package relay

import (
	"errors"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
)

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
	streaks  map[int16]*streak // by shard
}

// streak is the refusals of rows that were alone. They are an outage and not the rows' fault while
// the brokers refuse rows of several keys and take none. A row is at fault if the brokers refuse it,
// take another row, and refuse it again; or if fewer keys were refused and no row is behind them.
type streak struct {
	taken int64               // how often the brokers took rows after a refusal
	keys  map[refusedKey]bool // refused since they took a row
	first map[int64]int64     // by seq, until the row is published: taken at the first refusal; -1: at fault
}

func refusedKeyOf(r *row) refusedKey {
	if r.key == nil {
		return refusedKey{topicKey{topic: r.topic}, r.seq}
	}
	return refusedKey{topicKey: keyOf(r)}
}

// outageKeys is how many keys are several.
const outageKeys = 3

// refusedKey is a key of a topic. A row without a key is a key of its own, by its seq.
type refusedKey struct {
	topicKey
	seq int64
}

// atFault notes that the brokers refused a row that was alone, and reports whether the row is the
// cause. A size is always the row's.
func (p *publisher) atFault(r *row, reason Reason) bool {
	if reason == ReasonTooLarge {
		return true
	}
	p.suspects.mu.Lock()
	defer p.suspects.mu.Unlock()
	s := p.suspects.streaks[p.lease.shard]
	if s == nil {
		s = &streak{keys: map[refusedKey]bool{}, first: map[int64]int64{}}
		if p.suspects.streaks == nil {
			p.suspects.streaks = map[int16]*streak{}
		}
		p.suspects.streaks[p.lease.shard] = s
	}
	first, again := s.first[r.seq]
	if again && first < s.taken {
		return true
	}
	s.first[r.seq], s.keys[refusedKeyOf(r)] = s.taken, true
	return false
}

// outage reports whether rows of several keys were refused and none was taken since.
func (p *publisher) outage() bool {
	p.suspects.mu.Lock()
	defer p.suspects.mu.Unlock()
	s := p.suspects.streaks[p.lease.shard]
	return s != nil && len(s.keys) >= outageKeys
}

// inStreak reports whether a row's key was refused.
func (p *publisher) inStreak(r *row) bool {
	p.suspects.mu.Lock()
	defer p.suspects.mu.Unlock()
	s := p.suspects.streaks[p.lease.shard]
	return s != nil && s.keys[refusedKeyOf(r)]
}

// took ends the streak: the brokers took rows. The next refusal of a row of the streak is final.
func (p *publisher) took(rows ...*row) {
	p.suspects.mu.Lock()
	defer p.suspects.mu.Unlock()
	s := p.suspects.streaks[p.lease.shard]
	if s == nil || len(s.first) == 0 {
		return
	}
	for _, r := range rows {
		delete(s.first, r.seq)
	}
	if len(s.keys) > 0 {
		s.taken++
		clear(s.keys)
	}
}

// blame makes the next refusal of rows final.
func (p *publisher) blame(rows []*row) {
	p.suspects.mu.Lock()
	defer p.suspects.mu.Unlock()
	for _, r := range rows {
		p.suspects.streaks[p.lease.shard].first[r.seq] = -1
	}
}

// undecided separates rows that are refused and may be innocent, because no row was taken since, from
// other dead rows.
func (p *publisher) undecided(dead []deadRow) (open, others []deadRow) {
	p.suspects.mu.Lock()
	defer p.suspects.mu.Unlock()
	s := p.suspects.streaks[p.lease.shard]
	if s == nil {
		return nil, dead
	}
	for _, d := range dead {
		if first, noted := s.first[d.row.seq]; noted && first == s.taken && p.suspects.refusals[d.row.seq] != nil {
			open = append(open, d)
		} else {
			others = append(others, d)
		}
	}
	return open, others
}

// reopen forgets refusals: the rows are tried again, alone.
func (r *Relay) reopen(open []deadRow) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	for _, d := range open {
		delete(r.suspects.refusals, d.row.seq)
		r.suspects.seqs[d.row.seq] = true
	}
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

// clearSuspects clears rows that were acknowledged, or that are dead.
func (p *publisher) clearSuspects(rows []*row) {
	p.suspects.mu.Lock()
	defer p.suspects.mu.Unlock()
	for _, row := range rows {
		delete(p.suspects.seqs, row.seq)
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

// verdict is why a refused row is dead.
func verdict(err error) error {
	return fmt.Errorf("%w: fix the cause and retry the row, or discard it", err)
}

// produceError is why the brokers did not take records, with the remedy if the cause is not in them.
func produceError(topic string, err error) error {
	remedy := ""
	if errors.Is(err, kerr.InvalidTimestamp) {
		remedy = "; it is the time of publishing: compare the clocks of relay and brokers, and see message.timestamp.* of the topic"
	}
	return fmt.Errorf("produce to topic %q: %w%s", topic, fromOutlet(err), remedy)
}

// outageError is why rows wait that were refused: see streak.
func outageError(topic string, err error) error {
	return fmt.Errorf("%w; rows of several keys were refused in a row, so they wait: correct what refuses them, or pause the topic", produceError(topic, err))
}

// errTaken is why refused rows are tried again, although the transaction's row was taken.
var errTaken = errors.New("the brokers took a row behind refused ones: those are tried again")

// refusedAlone is a refusal after which the work starts over soon: the refused row is now known.
type refusedAlone struct{ cause error }

func (r *refusedAlone) Error() string { return r.cause.Error() }
func (r *refusedAlone) Unwrap() error { return r.cause }
