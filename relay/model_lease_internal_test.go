package relay

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/explore"
)

// The model of the lease of a shard. Two replicas take it, renew it, freeze at any place and
// continue. Time is a step of its own: all other steps take none. A statement is three steps: the
// process reads its clock, the database executes, the answer arrives. lease.trust and entry.after
// are the engine's; acquireSQL, beatSQL and the chain of advanceSQL are written out. With
// transactions (exactly), Kafka fences the previous producer of the same id and aborts what it has
// open; without, every record that is sent is published.
const (
	leaseRows     = 3
	leaseReplicas = 2
)

type leaseBounds struct {
	exactly                          bool
	length, time                     uint8
	renewals, crashes, fails, chains uint8
	rows                             uint8
	keys                             [leaseRows]byte
	statesMax                        int
}

// leaseBreak is a planted mistake.
type leaseBreak struct {
	chainUnchecked  bool // progress is written without comparing its number in the chain
	storesUnacked   bool // progress covers what is in flight
	stepsOver       bool // rows behind a refused row of their key are published
	trustsAnswer    bool // trust counts from the answer
	clockStops      bool // trust is measured by a clock that stops while the process is frozen
	heldUnchecked   bool // a transaction is committed without a look at the lease
	takesEarly      bool // a lease is taken before it ends
	unfenced        bool // the next holder does not fence the producer
	journalOlder    bool // the copy in the database counts, not the journal
	epochUnrenewed  bool // a renewal does not compare the epoch
	readsBeforeInit bool // the journal is read before the producer is fenced
}

const (
	leaseNone      = iota
	leaseAsking    // it has read its clock
	leaseTaken     // the database executed, the answer is on its way
	leaseHeld      // it has the answer
	leaseFenced    // its producer is the current one
	leaseRead      // only with readsBeforeInit
	leasePublishes // it knows where to begin
)

type leaseReplica struct {
	phase, renews        uint8
	asked, trusted       uint8 // tenths
	epoch, chain         uint8
	storedEpoch          uint8 // of progress, when the lease was taken
	at, sent             uint8 // progress, rows in flight or in the transaction
	dead                 uint8 // bits
	checked, copied, own bool  // own: it is the producer's current instance
}

type leaseState struct {
	now, until, owner, epoch, chain uint8
	stored, storedEpoch             uint8 // progress in the database
	replicas                        [leaseReplicas]leaseReplica
	journal, journalEpoch           uint8
	published                       [leaseRows]uint8
	dead                            uint8
	renewals, crashes, fails        uint8
	wrong                           uint8
}

const (
	leaseDisorder = 1 + iota
	leaseWentBack
)

// trust asks the engine how long a lease is trusted.
func (b leaseBounds) trust(asked uint8) uint8 {
	var l lease
	begin := time.Unix(0, 0)
	l.trust(begin.Add(time.Duration(asked)*time.Second), time.Duration(b.length)*time.Second)
	return uint8(l.trusted.Load().Sub(begin) / (time.Second / 10))
}

func (r leaseReplica) held(now uint8) bool { return now*10 < r.trusted }

func (b leaseBounds) leaseSteps(s leaseState, i int, broken leaseBreak, to func(leaseState, string, ...any)) {
	r := s.replicas[i]
	n := s
	m := &n.replicas[i]
	switch r.phase {
	case leaseNone:
		m.phase, m.asked = leaseAsking, s.now
		to(n, "replica %d: asks for the lease", i)
	case leaseAsking:
		if s.owner != 0 && s.until >= s.now && !broken.takesEarly {
			*m = leaseReplica{}
			to(n, "replica %d: another one has the lease", i)
			return
		}
		if s.chain >= b.chains {
			return
		}
		n.epoch, n.until, n.owner, n.chain = s.epoch+1, s.now+b.length, uint8(i+1), s.chain+1
		m.phase, m.epoch, m.chain, m.at, m.storedEpoch = leaseTaken, n.epoch, n.chain, s.stored, s.storedEpoch
		to(n, "database: replica %d has the lease, epoch %d, until %d", i, n.epoch, n.until)
	case leaseTaken:
		from := r.asked
		if broken.trustsAnswer {
			from = s.now
		}
		m.phase, m.asked, m.trusted = leaseHeld, 0, b.trust(from)
		to(n, "replica %d: trusts the lease until %d tenths", i, m.trusted)
	case leaseHeld:
		switch {
		case !b.exactly:
			m.phase = leasePublishes
			to(n, "replica %d: begins at %d", i, m.at)
		case broken.readsBeforeInit:
			b.read(&n, i, broken)
			m.phase = leaseRead
			to(n, "replica %d: reads the journal, begins at %d", i, m.at)
		default:
			b.fence(&n, i, broken)
			m.phase = leaseFenced
			to(n, "replica %d: is the producer", i)
		}
	case leaseFenced:
		b.read(&n, i, broken)
		m.phase = leasePublishes
		to(n, "replica %d: reads the journal, begins at %d", i, m.at)
	case leaseRead:
		b.fence(&n, i, broken)
		m.phase = leasePublishes
		to(n, "replica %d: is the producer", i)
	}
}

func (b leaseBounds) fence(s *leaseState, i int, broken leaseBreak) {
	for other := range s.replicas {
		if !broken.unfenced {
			s.replicas[other].own = false
		}
	}
	s.replicas[i].own = true
}

// read is toTransactions.begin.
func (b leaseBounds) read(s *leaseState, i int, broken leaseBreak) {
	r := &s.replicas[i]
	found := &entry{Epoch: int64(s.journalEpoch), Published: int64(s.journal)}
	stored := &lease{stored: progressed{epoch: int64(r.storedEpoch), published: int64(r.at)}}
	r.copied = true
	if found.after(stored) && !broken.journalOlder {
		r.at, r.copied = s.journal, false
	}
}

func (b leaseBounds) renewSteps(s leaseState, i int, broken leaseBreak, to func(leaseState, string, ...any)) {
	r := s.replicas[i]
	if r.phase < leaseHeld {
		return
	}
	n := s
	m := &n.replicas[i]
	switch r.renews {
	case 0:
		if s.renewals < b.renewals {
			n.renewals++
			m.renews, m.asked = 1, s.now
			to(n, "replica %d: asks to renew", i)
		}
	case 1:
		m.renews = 0
		if s.owner == uint8(i+1) && (s.epoch == r.epoch || broken.epochUnrenewed) {
			m.renews = 2
			n.until = s.now + b.length
		}
		to(n, "database: renews for replica %d until %d, epoch %d", i, n.until, r.epoch)
	case 2:
		from := r.asked
		if broken.trustsAnswer {
			from = s.now
		}
		m.renews, m.asked, m.trusted = 0, 0, b.trust(from)
		to(n, "replica %d: trusts the lease until %d tenths", i, m.trusted)
	}
}

// record publishes a row, for readers of committed records.
func (b leaseBounds) record(s *leaseState, row uint8) {
	if s.published[row] == 0 {
		for before := range row {
			if b.keys[before] == b.keys[row] && s.published[before] == 0 {
				s.wrong = leaseDisorder
			}
		}
	}
	s.published[row] = min(s.published[row]+1, 2)
}

// blocked reports whether a row waits behind a dead row of its key.
func (b leaseBounds) blocked(dead, row uint8) bool {
	for before := range row {
		if dead&(1<<before) != 0 && b.keys[before] == b.keys[row] {
			return true
		}
	}
	return false
}

// store writes the next row of the chain, with the rows that are dead.
func (b leaseBounds) store(s *leaseState, i int, at uint8, broken leaseBreak) bool {
	r := &s.replicas[i]
	if r.chain != s.chain && !broken.chainUnchecked {
		return false
	}
	if at < s.stored {
		s.wrong = leaseWentBack
	}
	s.stored, s.storedEpoch, s.dead = at, r.epoch, s.dead|r.dead
	if broken.chainUnchecked {
		return true
	}
	s.chain++
	r.chain = s.chain
	return true
}

// plainSteps sends rows one by one, in order, and stores progress behind the acknowledged ones.
func (b leaseBounds) plainSteps(s leaseState, i int, broken leaseBreak, to func(leaseState, string, ...any)) {
	r := s.replicas[i]
	next := r.at + r.sent
	dead := s.dead | r.dead
	if next < b.rows {
		n := s
		m := &n.replicas[i]
		switch {
		case dead&(1<<next) != 0 || b.blocked(dead, next) && !broken.stepsOver:
			m.dead |= 1 << next
			m.sent++
			to(n, "replica %d: row %d is dead, or behind a dead row", i, next)
		default:
			b.record(&n, next)
			m.sent++
			to(n, "replica %d: row %d is published and acknowledged", i, next)
			if s.fails < b.fails {
				n := s
				n.fails++
				n.replicas[i].dead |= 1 << next
				n.replicas[i].sent++
				to(n, "replica %d: row %d is refused", i, next)
			}
		}
	}
	behind := r.at + r.sent
	if broken.storesUnacked && behind < b.rows {
		behind++
	}
	if behind > r.at {
		if s.chain >= b.chains && r.chain == s.chain {
			return
		}
		n := s
		if b.store(&n, i, behind, broken) {
			n.replicas[i].at, n.replicas[i].sent, n.replicas[i].dead = behind, 0, 0
			to(n, "replica %d: stores progress %d", i, behind)
			return
		}
		n.replicas[i] = leaseReplica{}
		to(n, "replica %d: cannot store progress, and ends", i)
	}
}

// transactionSteps adds rows to a transaction, looks at the lease, commits and copies progress.
func (b leaseBounds) transactionSteps(s leaseState, i int, broken leaseBreak, to func(leaseState, string, ...any)) {
	r := s.replicas[i]
	if !r.checked && r.at+r.sent < b.rows {
		n := s
		n.replicas[i].sent++
		to(n, "replica %d: adds row %d to its transaction", i, r.at+r.sent)
	}
	if !r.checked && r.sent > 0 {
		n := s
		if !r.held(s.now) && !broken.heldUnchecked {
			n.replicas[i] = leaseReplica{}
			to(n, "replica %d: does not hold the lease any more, and ends", i)
		} else {
			n.replicas[i].checked = true
			to(n, "replica %d: holds the lease, and will commit", i)
		}
	}
	if r.checked {
		n := s
		m := &n.replicas[i]
		if !r.own {
			*m = leaseReplica{}
			to(n, "Kafka: refuses replica %d, which is fenced", i)
		} else {
			for row := r.at; row < r.at+r.sent; row++ {
				b.record(&n, row)
			}
			m.at, m.sent, m.checked, m.copied = r.at+r.sent, 0, false, false
			n.journal, n.journalEpoch = m.at, r.epoch
			to(n, "Kafka: commits rows before %d for replica %d, epoch %d", m.at, i, r.epoch)
		}
	}
	if !r.copied && r.sent == 0 && (s.chain < b.chains || r.chain != s.chain) {
		n := s
		if b.store(&n, i, r.at, broken) {
			n.replicas[i].copied = true
			to(n, "replica %d: copies progress %d", i, r.at)
		} else {
			n.replicas[i] = leaseReplica{}
			to(n, "replica %d: cannot store progress, and ends", i)
		}
	}
}

func (b leaseBounds) otherSteps(s leaseState, broken leaseBreak, to func(leaseState, string, ...any)) {
	if s.now < b.time {
		n := s
		n.now++
		to(n, "time: %d", n.now)
		for i := range s.replicas {
			if broken.clockStops && s.replicas[i].trusted > 0 && s.replicas[i].trusted < 200 {
				n := n
				n.replicas[i].trusted += 10
				to(n, "time: %d, and the clock of replica %d stops", n.now, i)
			}
		}
	}
	for i, r := range s.replicas {
		if r.phase == leaseNone {
			continue
		}
		n := s
		if r.phase >= leaseHeld && !r.held(s.now) {
			n.replicas[i] = leaseReplica{}
			to(n, "replica %d: does not trust its lease any more, and ends", i)
		} else if s.crashes < b.crashes {
			n.crashes++
			n.replicas[i] = leaseReplica{}
			to(n, "replica %d: crashes", i)
		}
	}
}

func (b leaseBounds) check(s leaseState) error {
	switch s.wrong {
	case leaseDisorder:
		return fmt.Errorf("%w: a row was published before an earlier one of its key", errModel)
	case leaseWentBack:
		return fmt.Errorf("%w: progress went back", errModel)
	}
	for row := range b.rows {
		if row < s.stored && s.published[row] == 0 && s.dead&(1<<row) == 0 {
			return fmt.Errorf("%w: row %d is behind progress, and lost", errModel, row)
		}
		if b.exactly && s.published[row] > 1 {
			return fmt.Errorf("%w: row %d was published twice", errModel, row)
		}
		if s.published[row] > 1 && s.epoch < 2 {
			return fmt.Errorf("%w: row %d was published twice without a takeover", errModel, row)
		}
	}
	return nil
}

func (b leaseBounds) model(broken leaseBreak) explore.Model[leaseState] {
	return explore.Model[leaseState]{
		Steps: func(s leaseState, to func(leaseState, string, ...any)) {
			for i, r := range s.replicas {
				b.leaseSteps(s, i, broken, to)
				b.renewSteps(s, i, broken, to)
				switch {
				case r.phase != leasePublishes:
				case b.exactly:
					b.transactionSteps(s, i, broken, to)
				default:
					b.plainSteps(s, i, broken, to)
				}
			}
			b.otherSteps(s, broken, to)
		},
		Check: b.check, StatesMax: b.statesMax,
	}
}

var (
	leasePlain   = leaseBounds{length: 1, time: 3, fails: 1, chains: 5, rows: 3, keys: [leaseRows]byte{'a', 'b', 'a'}, statesMax: 8_000_000}
	leaseExactly = leaseBounds{exactly: true, length: 1, time: 4, chains: 6, rows: 2, keys: [leaseRows]byte{'a', 'a', 'a'}, statesMax: 8_000_000}
	leaseRenewed = leaseBounds{exactly: true, length: 1, time: 3, renewals: 1, chains: 5, rows: 1, keys: [leaseRows]byte{'a', 'a', 'a'}, statesMax: 8_000_000}
)

// Property: wherever a replica freezes, crashes or is overtaken, first occurrences of a key are in
// order, no row is lost and progress does not go back; with transactions no row is published twice.
func TestModelOfLeases(t *testing.T) {
	t.Parallel()
	for name, b := range map[string]leaseBounds{"at least once": leasePlain, "exactly once": leaseExactly, "exactly once, renewals": leaseRenewed} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if *exploreLarge == "large" {
				b.time, b.renewals, b.crashes, b.chains = b.time+1, b.renewals+1, b.crashes+1, b.chains+1
				b.statesMax = 40_000_000
			}
			begun := time.Now()
			result, err := b.model(leaseBreak{}).Run()
			t.Logf("%d states, %d steps, depth %d, %v", result.States, result.Steps, result.Depth, time.Since(begun).Round(time.Millisecond))
			require.NoError(t, err)
		})
	}
}

// Property: the model finds each of the mistakes that its rules are against.
func TestModelOfLeasesFindsMistakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		bounds leaseBounds
		broken leaseBreak
		want   string
	}{
		"progress without its number":         {leasePlain, leaseBreak{chainUnchecked: true}, "went back"},
		"progress covers rows in flight":      {leasePlain, leaseBreak{storesUnacked: true}, "lost"},
		"a failed row is stepped over":        {leasePlain, leaseBreak{stepsOver: true}, "before an earlier one"},
		"trust counts from the answer":        {leaseExactly, leaseBreak{trustsAnswer: true}, "twice"},
		"the process's clock stops":           {leaseExactly, leaseBreak{clockStops: true}, "twice"},
		"a commit without the lease":          {leaseExactly, leaseBreak{heldUnchecked: true}, "twice"},
		"a lease is taken before it ends":     {leaseExactly, leaseBreak{takesEarly: true}, "twice"},
		"the previous producer is not fenced": {leaseExactly, leaseBreak{unfenced: true}, "twice"},
		"the copy counts, not the journal":    {leaseExactly, leaseBreak{journalOlder: true}, "twice"},
		"the journal is read before fencing":  {leaseExactly, leaseBreak{readsBeforeInit: true}, "twice"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := c.bounds.model(c.broken).Run()
			var found *explore.Violation
			require.ErrorAs(t, err, &found)
			require.Regexp(t, c.want, found.Err.Error())
			t.Log(found)
		})
	}
}
