package consumer

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/explore"
)

// The model of the position and its epoch. Two members of a group take a partition over from each
// other, and a member that lost it continues until its transaction is refused. Each transaction is
// one step. The engine decides where a member begins (decideStart) and which messages are fresh
// (choose, work.ahead); advance_position and holdSQL are written out. A failover restores an
// earlier state of the database, with everything that it contains: effects, claims and positions.
const (
	positionMessages = 3
	positionMembers  = 2
)

type positionBounds struct {
	dedup Dedup
	batch int

	takeovers, rebalances, unknowns, failovers, orders, rewinds int

	statesMax int
}

// positionBreak is a planted mistake.
type positionBreak struct {
	epochUnchecked  bool // advance_position does not compare the epoch
	serverUnchecked bool // a transaction does not compare the server's run
	atKafkasOffset  bool // a takeover resumes at Kafka's offset, the position does not count
	atPosition      bool // a takeover resumes at the position, Kafka's offset does not count
	rewindForgotten bool // Kafka's offset does not say that it belongs to an unfinished rewind
	unknownIgnored  bool // without claims, an unknown COMMIT is repeated without a takeover
	wentBackIgnored bool // a member continues where it is, although the database lost commits
	commitsUnstored bool // Kafka's offset is committed before the transaction
}

const positionNone = -1

// positionRow is what the database has.
type positionRow struct {
	next, from, order int8
	epoch             uint8
	held              bool
	claimed           uint8 // bits
	effects           [positionMessages]uint8
}

type positionMember struct {
	asked, running, fenced bool
	seen                   positionCommit // Kafka's answer
	epoch, server          uint8
	known                  int8
	at                     uint8 // the next message; earlier ones are not in its memory
	begins, reached        int8  // assignment.begins, assignment.position
	mark                   int8  // to be committed to Kafka
	markRewind             int8
}

// positionCommit is Kafka's offset.
type positionCommit struct {
	offset, rewind int8
	foreign        bool
}

type positionState struct {
	row, standby positionRow
	lags         bool // the standby receives nothing more
	server       uint8
	members      [positionMembers]positionMember
	assigned     int8 // the member, for Kafka
	kafka        positionCommit
	again        uint8 // messages that a rewind with Kafka's tools wants delivered again; bits

	takeovers, rebalances, unknowns, failovers, orders, rewinds uint8
}

func (b positionBounds) start() positionState {
	s := positionState{row: positionRow{next: positionNone, from: positionNone, order: positionNone}, assigned: positionNone}
	s.kafka = positionCommit{offset: positionNone, rewind: positionNone}
	return s
}

func positionPointer(n int8) *int64 {
	if n < 0 {
		return nil
	}
	wide := int64(n)
	return &wide
}

func positionNumber(p *int64) int8 {
	if p == nil {
		return positionNone
	}
	return int8(*p)
}

var positionTopic = uuid.MustParse("6ba7b810-9dad-11d1-80b4-00c04fd430c8")

func (c positionCommit) engine() *committedOffset {
	switch {
	case c.offset < 0:
		return nil
	case c.foreign:
		return &committedOffset{offset: int64(c.offset)}
	default:
		return &committedOffset{int64(c.offset), commitMetadata("cluster", positionTopic, int64(c.offset), int64(c.rewind))}
	}
}

// decide is the engine's decision.
func (b positionBounds) decide(s *positionState, seen positionCommit, running bool, broken positionBreak) decision {
	k := known{
		group: "g", topic: "t", met: math.MaxInt32, running: running, dedup: b.dedup, consumer: 1, rule: "rule",
		row: storedPosition{
			topicID: positionTopic, next: positionPointer(s.row.next), epoch: int64(s.row.epoch), handledFrom: positionPointer(s.row.from),
			held: s.row.held, resumeAt: positionPointer(s.row.order),
		},
		log: &topicLog{cluster: "cluster", topicID: positionTopic, end: positionMessages, committed: seen.engine()},
	}
	if s.row.held {
		by, rule, epoch := int32(1), "rule", int64(s.row.epoch)
		k.row.handledBy, k.row.handledRule, k.row.knownEpoch = &by, &rule, &epoch
	}
	if broken.atPosition {
		k.log.committed = nil
	}
	d := decideStart(k)
	if broken.atKafkasOffset && !running && seen.offset >= 0 {
		d.at = int64(seen.offset)
	}
	return d
}

// take is the transaction of a takeover: holdSQL.
func (b positionBounds) take(s *positionState, i int, d decision) {
	s.row.epoch++
	s.row.held, s.row.next, s.row.from = true, positionNumber(d.next), int8(d.storeFrom)
	m := &s.members[i]
	m.epoch, m.server, m.known, m.fenced = s.row.epoch, s.server, s.row.next, false
	if d.ordered {
		s.row.order = positionNone
		s.again &^= 1<<d.at - 1 // the later order replaces the rewind
	}
}

func (b positionBounds) takeSteps(s positionState, i int, broken positionBreak, to func(positionState, string, ...any)) {
	m := s.members[i]
	if int(s.takeovers) == b.takeovers {
		return
	}
	switch {
	case m.running && m.fenced:
		n := s
		n.takeovers++
		b.take(&n, i, b.decide(&s, m.seen, true, broken))
		if now := n.row.next; m.known >= 0 && now < m.known && !broken.wentBackIgnored {
			n.members[i] = positionMember{}
			to(n, "member %d: takes the position back in epoch %d, at %d: the database lost commits, its session ends", i, n.row.epoch, now)
			return
		}
		to(n, "member %d: takes the position back in epoch %d, stored %d", i, n.row.epoch, n.row.next)
	case m.running:
	case m.asked:
		n := s
		n.takeovers++
		d := b.decide(&s, m.seen, false, broken)
		n.members[i] = positionMember{running: true, at: uint8(d.at), begins: int8(d.rewoundTo), mark: positionNone, markRewind: positionNone}
		b.take(&n, i, d)
		n.members[i].reached = n.row.next
		if d.moved {
			n.members[i].mark = int8(d.at)
		}
		to(n, "member %d: takes the position over in epoch %d, stored %d, begins at %d: %s", i, n.row.epoch, n.row.next, d.at, d.why)
	case s.assigned == int8(i):
		n := s
		n.members[i] = positionMember{asked: true, seen: s.kafka}
		to(n, "member %d: reads Kafka's offset, %d", i, s.kafka.offset)
	}
}

// handle is the transaction of a batch. It returns false if it is refused.
func (b positionBounds) handle(s *positionState, i, behind int, broken positionBreak) bool {
	m := s.members[i]
	if m.server != s.server && !broken.serverUnchecked {
		return false
	}
	if m.epoch != s.row.epoch && !broken.epochUnchecked || m.known >= 0 && s.row.next < m.known {
		return false
	}
	e := &engine{cfg: Config{Order: OrderUnordered, Forever: true, Dedup: b.dedup}}
	w, c := &work{pos: &position{stored: positionPointer(m.known)}}, claimed{}
	for at := int(m.at); at < behind; at++ {
		w.msgs, c.fresh = append(w.msgs, &Message{Offset: int64(at)}), append(c.fresh, s.row.claimed&(1<<at) == 0)
	}
	if b.dedup == DedupByPosition {
		c.fresh = w.ahead()
	}
	for _, msg := range e.choose(w, c).handle {
		s.row.effects[msg.Offset]++
		s.row.claimed |= 1 << msg.Offset
	}
	for _, msg := range w.msgs {
		s.again &^= 1 << msg.Offset
	}
	s.row.next = max(s.row.next, int8(behind))
	return true
}

// mark is session.mark.
func (m *positionMember) marks(next int8, broken positionBreak) {
	m.mark, m.markRewind = next, positionNone
	if next < m.reached && !broken.rewindForgotten {
		m.markRewind = m.begins
	}
	m.reached = max(m.reached, next)
}

func (b positionBounds) handleSteps(s positionState, i int, broken positionBreak, to func(positionState, string, ...any)) {
	m := s.members[i]
	if !m.running || m.fenced {
		return
	}
	if broken.commitsUnstored && s.assigned == int8(i) && m.at < positionMessages {
		n := s
		n.kafka = positionCommit{offset: int8(m.at) + 1, rewind: positionNone}
		to(n, "member %d: commits %d to Kafka first", i, m.at+1)
	}
	for behind := int(m.at) + 1; behind <= positionMessages && behind <= int(m.at)+b.batch; behind++ {
		n := s
		if !b.handle(&n, i, behind, broken) {
			n.members[i].fenced = true
			to(n, "member %d: is refused", i)
			return
		}
		if int(s.unknowns) < b.unknowns {
			lost := n
			lost.unknowns++
			lost.members[i].fenced = b.dedup == DedupByPosition && !broken.unknownIgnored // lane.wait
			to(lost, "member %d: commits %d to %d, the answer is lost", i, m.at, behind-1)
		}
		k := &n.members[i]
		k.at, k.known = uint8(behind), n.row.next
		k.marks(int8(behind), broken)
		to(n, "member %d: commits %d to %d", i, m.at, behind-1)
	}
}

func (b positionBounds) kafkaSteps(s positionState, to func(positionState, string, ...any)) {
	for i := range s.members {
		m := s.members[i]
		if m.running && s.assigned == int8(i) && m.mark >= 0 { // Kafka refuses members of an earlier generation
			n := s
			n.kafka = positionCommit{offset: m.mark, rewind: m.markRewind}
			n.members[i].mark, n.members[i].markRewind = positionNone, positionNone
			to(n, "member %d: commits %d to Kafka, rewind %d", i, m.mark, m.markRewind)
		}
		if m.running || m.asked {
			n := s
			n.members[i] = positionMember{}
			to(n, "member %d: ends", i)
		}
	}
	if int(s.rebalances) < b.rebalances {
		for i := int8(positionNone); i < positionMembers; i++ {
			if i != s.assigned {
				n := s
				n.rebalances++
				n.assigned = i
				if i >= 0 {
					n.members[i] = positionMember{} // session.assign ends a worker of an earlier assignment
				}
				to(n, "Kafka: assigns the partition to %d (-1: none)", i)
			}
		}
	}
	if s.assigned == positionNone && int(s.rewinds) < b.rewinds {
		for at := int8(0); at < s.row.next; at++ {
			n := s
			n.rewinds++
			n.kafka = positionCommit{offset: at, rewind: positionNone, foreign: true}
			n.again |= (1<<s.row.next - 1) &^ (1<<at - 1)
			to(n, "operator: rewinds the group to %d with Kafka's tools", at)
		}
	}
}

func (b positionBounds) databaseSteps(s positionState, to func(positionState, string, ...any)) {
	if int(s.orders) < b.orders {
		for at := int8(0); at < s.row.next; at++ {
			n := s
			n.orders++
			n.row.order = at
			to(n, "operator: orders to resume at %d", at)
		}
	}
	switch {
	case int(s.failovers) == b.failovers || !s.row.held:
	case s.lags:
		n := s
		n.row, n.standby, n.lags = s.standby, positionRow{}, false
		n.failovers++
		n.server++
		n.again &^= 1<<max(0, s.row.next) - 1
		if s.again != 0 {
			n.again = s.again & (1<<max(0, n.row.next) - 1)
		}
		to(n, "database: fails over to the standby, stored %d, epoch %d", n.row.next, n.row.epoch)
	default:
		n := s
		n.lags, n.standby = true, s.row
		to(n, "database: the standby receives nothing more")
	}
}

var errPosition = errors.New("invariant")

func (b positionBounds) check(s positionState) error {
	for i, n := range s.row.effects {
		if n > 1 {
			return fmt.Errorf("%w: message %d has two effects", errPosition, i)
		}
		if n == 0 && i < int(s.row.next) {
			return fmt.Errorf("%w: message %d is before the stored position and has no effect", errPosition, i)
		}
	}
	for i, m := range s.members {
		if !m.running || m.fenced || m.epoch != s.row.epoch || m.server != s.server || m.known > s.row.next {
			continue // its next transaction is refused
		}
		for at := range int(m.at) {
			if s.row.effects[at] == 0 {
				return fmt.Errorf("%w: message %d has no effect, and member %d is behind it", errPosition, at, i)
			}
		}
		if m.at == positionMessages && s.assigned == int8(i) && s.again != 0 {
			return fmt.Errorf("%w: a rewind is not carried out as a whole: %03b are not delivered again", errPosition, s.again)
		}
	}
	return nil
}

func (b positionBounds) model(broken positionBreak) explore.Model[positionState] {
	return explore.Model[positionState]{
		Start: b.start(),
		Steps: func(s positionState, to func(positionState, string, ...any)) {
			for i := range s.members {
				b.takeSteps(s, i, broken, to)
				b.handleSteps(s, i, broken, to)
			}
			b.kafkaSteps(s, to)
			b.databaseSteps(s, to)
		},
		Check: b.check, StatesMax: b.statesMax,
	}
}

// Property: with two members that hold a partition one after the other or believe so at the same
// time, with commits of unknown outcome, failovers that lose commits, orders of operators and
// rewinds with Kafka's tools, each message has one effect and none is skipped.
func TestModelOfPositions(t *testing.T) {
	t.Parallel()
	for name, b := range map[string]positionBounds{
		"claims by ID, failover":   {dedup: DedupByID, batch: 2, takeovers: 3, rebalances: 2, unknowns: 1, failovers: 1},
		"claims by ID, rewinds":    {dedup: DedupByID, batch: 2, takeovers: 3, rebalances: 4, orders: 1, rewinds: 1},
		"by position":              {dedup: DedupByPosition, batch: 2, takeovers: 4, rebalances: 3, unknowns: 1},
		"by position and failover": {dedup: DedupByPosition, batch: 2, takeovers: 3, rebalances: 2, unknowns: 1, failovers: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b.statesMax = 6_000_000
			if *exploreLarge == "large" {
				b.takeovers, b.unknowns = b.takeovers+1, b.unknowns+1
				b.statesMax = 40_000_000
			}
			begun := time.Now()
			result, err := b.model(positionBreak{}).Run()
			t.Logf("%d states, %d steps, depth %d, %v", result.States, result.Steps, result.Depth, time.Since(begun).Round(time.Millisecond))
			require.NoError(t, err)
		})
	}
}

// Property: the model finds each of the mistakes that its rules are against.
func TestModelOfPositionsFindsMistakes(t *testing.T) {
	t.Parallel()
	byID := positionBounds{dedup: DedupByID, batch: 2, takeovers: 3, rebalances: 2, unknowns: 1, failovers: 1}
	rewinds := positionBounds{dedup: DedupByID, batch: 2, takeovers: 3, rebalances: 4, rewinds: 1}
	byPosition := positionBounds{dedup: DedupByPosition, batch: 2, takeovers: 4, rebalances: 3, unknowns: 1}
	lost := positionBounds{dedup: DedupByPosition, batch: 2, takeovers: 4, rebalances: 2, failovers: 1}
	for name, c := range map[string]struct {
		bounds positionBounds
		broken positionBreak
		want   string
	}{
		"the epoch is not checked":                      {byPosition, positionBreak{epochUnchecked: true}, "two effects"},
		"the server is not checked":                     {lost, positionBreak{serverUnchecked: true}, "two effects|no effect"},
		"resumes at Kafka's offset only":                {byID, positionBreak{atKafkasOffset: true}, "no effect"},
		"resumes at the position only":                  {rewinds, positionBreak{atPosition: true}, "not carried out"},
		"Kafka's offset does not say that it rewinds":   {rewinds, positionBreak{rewindForgotten: true}, "not carried out"},
		"an unknown COMMIT is repeated at once":         {byPosition, positionBreak{unknownIgnored: true}, "two effects"},
		"continues behind a database that lost commits": {lost, positionBreak{wentBackIgnored: true}, "no effect"},
		"Kafka's offset is committed first":             {byID, positionBreak{commitsUnstored: true, atKafkasOffset: true}, "no effect"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.bounds.statesMax = 6_000_000
			_, err := c.bounds.model(c.broken).Run()
			var found *explore.Violation
			require.ErrorAs(t, err, &found)
			require.Regexp(t, c.want, found.Err.Error())
			t.Log(found)
		})
	}
}
