package consumer

import (
	"errors"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/explore"
)

var exploreLarge = flag.String("explore", "", `"large": the models with their larger bounds`)

// The model of parking. One holder handles a partition, batch by batch; an operator retries and
// discards. Each step is one transaction, or the time between two. engine.choose decides.
const parkMessages = 4

type parkBounds struct {
	messages, batch           int
	keys                      [parkMessages]byte
	fails, crashes, operators int
	statesMax                 int
}

// parkBreak is a planted mistake.
type parkBreak struct {
	forgetsHeld   bool // parking does not add the key to the held ones
	notLoaded     bool // a takeover does not load the held keys
	notPromoted   bool // the trigger parked_promote is missing
	unclaimed     bool // a parked message is stored without its claim
	gaps          bool // a release takes messages behind one that has a reason of its own
	notLocked     bool // a release does not lock its rows
	hintsForever  bool // a key counts as held without a question to the database
	retriesBehind bool // a message may be retried before the first one of its key
}

// Where a message is, in parked_messages.
const (
	parkNone = iota
	parkParked
	parkBehind
	parkRetry
)

type parkMessage struct {
	claimed   bool
	state     uint8
	own       bool // it is parked for a reason of its own
	effects   uint8
	discarded bool
}

type parkState struct {
	messages  [parkMessages]parkMessage
	position  uint8
	held      uint8 // keys, bits; in memory
	loaded    bool
	releasing uint8 // messages that a release has read; bits
	last      [2]uint8
	disorder  bool

	fails, crashes, operators uint8
}

func (b parkBounds) key(i int) uint8 { return b.keys[i] - 'a' }

// first returns the first parked message of a key, or -1.
func (b parkBounds) first(s *parkState, key uint8) int {
	for i := range b.messages {
		if s.messages[i].state != parkNone && b.key(i) == key {
			return i
		}
	}
	return -1
}

// effect notes that a handler's transaction is committed.
func (b parkBounds) effect(s *parkState, i int) {
	s.messages[i].effects++
	key := b.key(i)
	if int(s.last[key]) > i {
		s.disorder = true
	}
	s.last[key] = uint8(i)
}

// leave deletes a parked row; the trigger makes the next one of its key the first.
func (b parkBounds) leave(s *parkState, i int, broken parkBreak) {
	was := s.messages[i].state
	s.messages[i].state, s.messages[i].own = parkNone, false
	next := b.first(s, b.key(i))
	if was == parkBehind || next < 0 || broken.notPromoted {
		return
	}
	if m := &s.messages[next]; m.state == parkBehind {
		m.state = parkRetry
		if m.own {
			m.state = parkParked
		}
	}
}

// handle is the transaction of a batch from Kafka: claim, choose, park, position. culprit is parked
// for a reason of its own; -1: none.
func (b parkBounds) handle(s parkState, msgs []int, culprit int, broken parkBreak) parkState {
	e := &engine{cfg: Config{Order: OrderByKey, OnFailure: OnFailurePark, Forever: true}}
	w, c := &work{pos: &position{}}, claimed{held: map[keyHash]struct{}{}}
	for _, i := range msgs {
		msg := &Message{Key: []byte{b.keys[i]}, Offset: int64(i)}
		if i == culprit {
			msg.park = &parking{reason: reasonFailed}
		}
		w.msgs, c.fresh = append(w.msgs, msg), append(c.fresh, !s.messages[i].claimed)
		if key := b.key(i); s.held&(1<<key) != 0 {
			if b.first(&s, key) >= 0 || broken.hintsForever {
				c.held[*(&fleet{partition: &partition{engine: e}}).line(msg)] = struct{}{}
			} else {
				s.held &^= 1 << key
			}
		}
	}
	chosen := e.choose(w, c)
	for _, msg := range chosen.handle {
		s.messages[msg.Offset].claimed = true
		b.effect(&s, int(msg.Offset))
	}
	for n, msg := range chosen.parked {
		m := &s.messages[msg.Offset]
		m.claimed, m.state, m.own = !broken.unclaimed, parkParked, chosen.why[n].reason != reasonBehind
		if chosen.behind[n] {
			m.state = parkBehind
		}
		if !broken.forgetsHeld {
			s.held |= 1 << b.key(int(msg.Offset))
		}
	}
	return s
}

func (b parkBounds) consumerSteps(s parkState, broken parkBreak, to func(parkState, string, ...any)) {
	if !s.loaded {
		n := s
		n.loaded = true
		for i := range b.messages {
			if s.messages[i].state != parkNone && !broken.notLoaded {
				n.held |= 1 << b.key(i)
			}
		}
		to(n, "consumer: takes the partition over, held keys %b", n.held)
		return
	}
	var msgs []int
	for i := int(s.position); i < b.messages && len(msgs) < b.batch; i++ {
		msgs = append(msgs, i)
		for culprit := -1; culprit <= i; culprit++ {
			if culprit >= 0 && (culprit < int(s.position) || int(s.fails) == b.fails || s.messages[culprit].claimed) {
				continue
			}
			n := b.handle(s, msgs, culprit, broken)
			if culprit >= 0 {
				n.fails++
			}
			n.position = uint8(i + 1)
			to(n, "consumer: commits %v, parks %d (-1: none)", msgs, culprit)
		}
	}
}

func (b parkBounds) releaseSteps(s parkState, broken parkBreak, to func(parkState, string, ...any)) {
	if !s.loaded {
		return
	}
	for i := range b.messages {
		if s.messages[i].state != parkRetry {
			continue
		}
		if first := b.first(&s, b.key(i)); first != i && !broken.retriesBehind {
			n := s
			n.messages[i].state, n.messages[i].own = parkBehind, false
			to(n, "consumer: sets %d back behind %d", i, first)
			continue
		}
		if s.releasing == 0 { // releaseSQL: the first, and those behind it without a gap
			n := s
			for j, taken := i, 0; j < b.messages && taken < b.batch; j++ {
				m := s.messages[j]
				if m.state == parkNone || b.key(j) != b.key(i) {
					continue
				}
				if j != i && (m.state != parkBehind || m.own) && !broken.gaps {
					break
				}
				if j == i || m.state == parkBehind && !m.own {
					n.releasing |= 1 << j
					taken++
				}
			}
			to(n, "consumer: reads %b to release them", n.releasing)
		}
	}
	if s.releasing == 0 {
		return
	}
	b.released(s, broken, to)
}

// released is the transaction of a release: each prefix may commit, and the next message may fail.
func (b parkBounds) released(s parkState, broken parkBreak, to func(parkState, string, ...any)) {
	n := s
	for i := range b.messages {
		if s.releasing&(1<<i) == 0 {
			continue
		}
		if int(n.fails) < b.fails && n.messages[i].state != parkNone {
			failed := n
			failed.fails++
			failed.releasing = 0
			failed.messages[i].state, failed.messages[i].own = parkParked, true
			to(failed, "consumer: %d fails again and stays parked", i)
		}
		n.releasing &^= 1 << i
		if n.messages[i].state != parkNone || broken.notLocked { // lockParkedSQL finds the row
			b.effect(&n, i)
			b.leave(&n, i, broken)
		}
		to(n, "consumer: commits the release up to %d", i)
	}
}

func (b parkBounds) otherSteps(s parkState, broken parkBreak, to func(parkState, string, ...any)) {
	if int(s.crashes) < b.crashes && s.loaded {
		n := s
		n.crashes++
		n.loaded, n.held, n.releasing = false, 0, 0
		to(n, "consumer: crashes")
		if s.position > 0 {
			n.position--
			to(n, "consumer: crashes, and its group is rewound by one")
		}
	}
	if int(s.operators) == b.operators {
		return
	}
	for i := range b.messages {
		m := s.messages[i]
		if m.state == parkNone {
			continue
		}
		n := s
		n.operators++
		if first := b.first(&s, b.key(i)); (first == i || broken.retriesBehind) && m.state != parkRetry {
			n.messages[i].state = parkRetry
			to(n, "operator: retries %d", i)
		} else if first != i && m.state == parkBehind {
			n.messages[i].state = parkRetry
			to(n, "by SQL: state of %d becomes retry", i)
		}
		if b.first(&s, b.key(i)) == i {
			n := s
			n.operators++
			n.messages[i].discarded = true
			b.leave(&n, i, broken)
			to(n, "operator: discards %d", i)
		}
	}
}

var errPark = errors.New("invariant")

func (b parkBounds) check(s parkState) error {
	if s.disorder {
		return fmt.Errorf("%w: effects of a key are out of order", errPark)
	}
	for i := range b.messages {
		switch m := s.messages[i]; {
		case m.effects > 1:
			return fmt.Errorf("%w: message %d has two effects", errPark, i)
		case m.effects > 0 && m.state != parkNone:
			return fmt.Errorf("%w: message %d is done and parked", errPark, i)
		case m.discarded && m.effects > 0:
			return fmt.Errorf("%w: message %d is discarded and has an effect", errPark, i)
		case i < int(s.position) && m.effects == 0 && m.state == parkNone && !m.discarded:
			return fmt.Errorf("%w: message %d is lost", errPark, i)
		case m.state == parkBehind && b.first(&s, b.key(i)) == i:
			return fmt.Errorf("%w: message %d waits behind none", errPark, i)
		}
	}
	return nil
}

func (b parkBounds) model(broken parkBreak) explore.Model[parkState] {
	return explore.Model[parkState]{
		Steps: func(s parkState, to func(parkState, string, ...any)) {
			b.consumerSteps(s, broken, to)
			b.releaseSteps(s, broken, to)
			b.otherSteps(s, broken, to)
		},
		Check: b.check, StatesMax: b.statesMax,
	}
}

// Property: whatever fails, and whoever retries, discards or crashes in between, a message has one
// effect or stays parked, effects of a key are in the order of the partition, and no parked message
// is stranded.
func TestModelOfParking(t *testing.T) {
	t.Parallel()
	b := parkBounds{messages: 4, batch: 2, keys: [parkMessages]byte{'a', 'a', 'b', 'a'}, fails: 2, crashes: 1, operators: 2, statesMax: 5_000_000}
	if *exploreLarge == "large" {
		b.batch, b.fails, b.crashes, b.operators = 3, 3, 2, 4
	}
	begun := time.Now()
	result, err := b.model(parkBreak{}).Run()
	t.Logf("%d states, %d steps, depth %d, %v", result.States, result.Steps, result.Depth, time.Since(begun).Round(time.Millisecond))
	require.NoError(t, err)
}

// Property: the model finds each of the mistakes that its rules are against.
func TestModelOfParkingFindsMistakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		broken parkBreak
		want   string
	}{
		"parking forgets the key":           {parkBreak{forgetsHeld: true}, "out of order"},
		"a takeover loads no keys":          {parkBreak{notLoaded: true}, "out of order"},
		"nothing promotes the next one":     {parkBreak{notPromoted: true}, "waits behind none"},
		"parked without its claim":          {parkBreak{unclaimed: true}, "done and parked|two effects|waits behind none"},
		"a release steps over a reason":     {parkBreak{gaps: true}, "out of order"},
		"a release locks no rows":           {parkBreak{notLocked: true}, "has an effect"},
		"the memory decides what is held":   {parkBreak{hintsForever: true}, "waits behind none"},
		"a later one is retried before one": {parkBreak{retriesBehind: true}, "out of order"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := parkBounds{messages: 3, batch: 3, keys: [parkMessages]byte{'a', 'a', 'a'}, fails: 2, crashes: 1, operators: 2, statesMax: 5_000_000}
			_, err := b.model(c.broken).Run()
			var found *explore.Violation
			require.ErrorAs(t, err, &found)
			require.Regexp(t, c.want, found.Err.Error())
			t.Log(found)
		})
	}
}
