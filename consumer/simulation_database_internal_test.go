package consumer

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// simulatedDatabase has the position, the claims, the effects and the parked messages of one
// partition. A transaction's statements are not simulated one by one: it claims (and waits for other
// transactions with the same messages), handles, and commits or not.
type simulatedDatabase struct {
	m  *simulation
	mu sync.Mutex
	simulatedTables
	server  time.Time
	earlier []simulatedTables // states after the last commits; a failover goes back to one
	open    [simulatedMax]bool
	quiet   bool           // nothing fails any more
	asked   map[string]int // numbers the statements by what they are about
}

type simulatedTables struct {
	row      storedPosition
	claimed  [simulatedMax]bool
	effects  [simulatedMax]int
	parked   [simulatedMax]bool
	attempts [simulatedMax]int
}

func newSimulatedDatabase(m *simulation) simulatedDatabase {
	return simulatedDatabase{m: m, server: time.Now(), asked: map[string]int{}}
}

func (d *simulatedDatabase) String() string {
	return fmt.Sprintf("position %s, effects %v, parked %v", positionText(d.row.next), d.effects[:d.m.records], d.parked[:d.m.records])
}

func positionText(p *int64) string {
	if p == nil {
		return "none"
	}
	return fmt.Sprint(*p)
}

// number counts what is asked about the same thing. The caller holds mu.
func (d *simulatedDatabase) number(what string, at int) int {
	key := fmt.Sprint(what, at)
	d.asked[key]++
	return d.asked[key]
}

// hold is the transaction of a takeover.
func (d *simulatedDatabase) hold(c *Consumer, running bool, committed *committedOffset) held {
	d.mu.Lock()
	defer d.mu.Unlock()
	k := known{
		group: "g", topic: simulatedTopic, met: 1, row: d.row, running: running, dedup: DedupByID, consumer: 1, rule: "rule",
		log: &topicLog{cluster: "c", topicID: positionTopic, end: int64(d.m.records), committed: committed},
	}
	k.row.server = d.server
	taken := c.decide(k)
	epoch := d.row.epoch + 1
	by, rule := int32(1), "rule"
	from := taken.decision.storeFrom
	d.row = storedPosition{
		topicID: positionTopic, next: taken.decision.next, epoch: epoch, handledFrom: &from, handledBy: &by, handledRule: &rule, knownEpoch: &epoch,
		resumeAt: d.row.resumeAt, held: true, heldOffset: taken.decision.next, stuck: taken.pos.stuck,
	}
	if taken.decision.ordered {
		d.row.resumeAt = nil
	}
	d.m.note("%s takes the position over in epoch %d, stored %s: %s", c.owner, epoch, positionText(d.row.next), taken.decision.why)
	d.save()
	return taken
}

func (d *simulatedDatabase) giveUp(p *position) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.row.epoch == p.epoch {
		d.row.released = true
	}
}

// order is an operator who rewinds the group.
func (d *simulatedDatabase) order(r *rand.Rand) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.row.next != nil {
		at := r.Int64N(*d.row.next + 1)
		d.row.resumeAt = &at
		d.m.note("an operator orders to resume at %d", at)
	}
}

// failOver loses up to n commits. What is open is rolled back, since its server is another one.
func (d *simulatedDatabase) failOver(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n = min(n, len(d.earlier)-1); n < 0 {
		return
	}
	d.simulatedTables = d.earlier[len(d.earlier)-1-n]
	d.earlier = d.earlier[:len(d.earlier)-n]
	d.server = time.Now()
	d.m.note("the database fails over and loses %d commits: %s, epoch %d", n, d, d.row.epoch)
}

// save is called after each commit.
func (d *simulatedDatabase) save() { d.earlier = append(d.earlier, d.simulatedTables) }

func (d *simulatedDatabase) calm() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.quiet = true
	d.m.note("from here on nothing fails")
}

func (d *simulatedDatabase) done() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.row.next != nil && *d.row.next >= int64(d.m.records)
}

// atEnd checks that each message has one effect or is parked.
func (d *simulatedDatabase) atEnd() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.m.records {
		if d.parked[i] == (d.effects[i] > 0) {
			d.m.fail("message %d has %d effects, parked %v", i, d.effects[i], d.parked[i])
		}
	}
}

// refuse is what a transaction or statement may meet on its way; nil: nothing.
func (d *simulatedDatabase) refuse(r *rand.Rand) error {
	d.mu.Lock()
	quiet := d.quiet
	d.mu.Unlock()
	if quiet {
		return nil
	}
	switch r.IntN(40) {
	case 0:
		return &pgconn.PgError{Code: pgerr.SerializationFailure}
	case 1:
		return &pgconn.PgError{Code: "57P01"}
	case 2:
		return errSimulated // the connection breaks
	case 3:
		return &pgconn.PgError{Code: "22003"}
	}
	return nil
}

// checked reports whether a position is still the caller's. The caller holds mu.
func (d *simulatedDatabase) checked(p *position) *failure {
	fence := func(err error) *failure { return &failure{origin: originEngine, index: unknownIndex, err: err} }
	if !p.server.Equal(d.server) && d.m.mistake != "the server is not checked" {
		return fence(fmt.Errorf("%w: %w", errFenced, errServerChanged))
	}
	if p.epoch != d.row.epoch && d.m.mistake != "the epoch is not checked" || p.stored != nil && (d.row.next == nil || *d.row.next < *p.stored) {
		return fence(&pgconn.PgError{Code: "EO001"})
	}
	return nil
}

// transact is engine.transact with a simulated database.
func (d *simulatedDatabase) transact(ctx context.Context, w *work) (outcome, *failure) {
	first := int(w.msgs[0].Offset)
	d.mu.Lock()
	n := d.number("transaction", first)
	d.mu.Unlock()
	r := d.m.draw("transaction", first, n)
	ended := func() (outcome, *failure) {
		return outcome{}, &failure{origin: originHandler, index: unknownIndex, err: context.Cause(ctx)}
	}
	if !simulatedSleep(ctx, simulatedWait(r, 3*time.Millisecond)) {
		return ended()
	}
	if err := d.refuse(r); err != nil {
		return outcome{}, &failure{origin: originEngine, index: unknownIndex, err: err}
	}
	if !d.lock(ctx, w) {
		return outcome{}, &failure{origin: originEngine, index: unknownIndex, err: &pgconn.PgError{Code: pgerr.LockNotAvailable}}
	}
	unlock := func() { d.unlock(w) }
	s, c, f := d.claim(w)
	if f == nil {
		f = d.handle(ctx, r, s)
	}
	if f != nil {
		unlock()
		return outcome{}, f
	}
	return d.commit(r, w, s, c, unlock)
}

// lock waits for other transactions with the same claims.
func (d *simulatedDatabase) lock(ctx context.Context, w *work) bool {
	for waited := time.Duration(0); waited < 2*time.Second; waited += 11 * time.Millisecond {
		d.mu.Lock()
		free := true
		for _, msg := range w.msgs {
			free = free && !d.open[msg.Offset]
		}
		if free {
			for _, msg := range w.msgs {
				d.open[msg.Offset] = true
			}
		}
		d.mu.Unlock()
		if free {
			return true
		}
		if !simulatedSleep(ctx, 11*time.Millisecond) {
			return false
		}
	}
	return false
}

func (d *simulatedDatabase) unlock(w *work) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, msg := range w.msgs {
		d.open[msg.Offset] = false
	}
}

// claim is the first round trip: engine.beginAsking.
func (d *simulatedDatabase) claim(w *work) (*selection, claimed, *failure) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.m.members[0].consumer.engine
	c := claimed{fresh: make([]bool, len(w.msgs))}
	if !w.pos.server.Equal(d.server) && d.m.mistake != "the server is not checked" {
		return nil, c, &failure{origin: originEngine, index: unknownIndex, err: fmt.Errorf("%w: %w", errFenced, errServerChanged)}
	}
	for i, msg := range w.msgs {
		c.fresh[i] = !d.claimed[msg.Offset]
	}
	w.hints = nil
	if e.holdsKeys() {
		if w.hints = w.held.of(w.msgs); len(w.hints) > 0 {
			c.held = d.parkedKeys()
		}
	}
	return e.choose(w, c), c, nil
}

// parkedKeys lists the keys that are held. The caller holds mu.
func (d *simulatedDatabase) parkedKeys() map[keyHash]struct{} {
	keys := map[keyHash]struct{}{}
	for i, is := range d.parked {
		if is && d.m.keys[i] != 0 {
			keys[sha256.Sum256([]byte{d.m.keys[i]})] = struct{}{}
		}
	}
	return keys
}

// handle is the handler. A message may fail always, or this time.
func (d *simulatedDatabase) handle(ctx context.Context, r *rand.Rand, s *selection) *failure {
	for i, msg := range s.handle {
		if !simulatedSleep(ctx, simulatedWait(r, 20*time.Millisecond)) {
			return &failure{origin: originHandler, index: unknownIndex, err: context.Cause(ctx)}
		}
		f := &failure{origin: originHandler, index: s.index[i], err: errSimulated}
		switch d.m.draw("message", int(msg.Offset), 0).IntN(15) {
		case 0: // it never succeeds
			return f
		case 1:
			f.err = Permanent(errSimulated)
			return f
		}
		d.mu.Lock()
		quiet := d.quiet
		d.mu.Unlock()
		if quiet {
			continue
		}
		switch r.IntN(30) {
		case 0:
			return f
		case 1:
			f.index = unknownIndex
			return f
		case 2:
			f.origin, f.err = originStatement, &pgconn.PgError{Code: pgerr.Deadlock}
			return f
		case 3:
			f.origin, f.lost = originStatement, true
			return f
		}
	}
	return nil
}

// commit is the last round trip. Its answer may be lost, and the commit may follow later or never.
func (d *simulatedDatabase) commit(r *rand.Rand, w *work, s *selection, c claimed, unlock func()) (outcome, *failure) {
	w.held.add(s.keys)
	time.Sleep(simulatedWait(r, 3*time.Millisecond))
	unknown := &failure{origin: originCommit, index: unknownIndex, lost: true, err: errNoCommitAnswer}
	d.mu.Lock()
	quiet := d.quiet
	d.mu.Unlock()
	switch fate := r.IntN(30); {
	case quiet:
	case fate == 0: // never
		unlock()
		return outcome{}, unknown
	case fate == 1: // later, unless its server fails
		copied, late := *w, simulatedWait(r, time.Second)
		d.m.aside.Go(func() {
			time.Sleep(late)
			_, _ = d.apply(&copied, s)
			unlock()
		})
		return outcome{}, unknown
	case fate == 2: // it was, and the answer is lost
		_, _ = d.apply(w, s)
		unlock()
		return outcome{}, unknown
	case fate == 3:
		unlock()
		return outcome{}, &failure{origin: originCommit, index: unknownIndex, err: &pgconn.PgError{Code: pgerr.SerializationFailure}}
	}
	stored, f := d.apply(w, s)
	unlock()
	if f != nil {
		return outcome{}, f
	}
	w.stored = stored
	return outcome{fresh: len(s.handle), parked: s.report(OnFailurePark), unheld: unheld(w.hints, c.held, s.keys)}, nil
}

// apply commits: the check of the position, the effects, the claims and the parked messages.
func (d *simulatedDatabase) apply(w *work, s *selection) (*int64, *failure) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.checked(w.pos); f != nil {
		d.m.note("epoch %d is refused", w.pos.epoch)
		return nil, f
	}
	for _, msg := range s.handle {
		at := int(msg.Offset)
		d.effects[at]++
		if d.effects[at] > 1 || d.parked[at] {
			d.m.fail("message %d has a second effect, or is parked, too", at)
		}
		d.ordered(at)
	}
	for _, msg := range s.parked {
		d.parked[msg.Offset] = true
	}
	for _, msg := range append(s.handle[:len(s.handle):len(s.handle)], s.parked...) {
		d.claimed[msg.Offset] = d.m.mistake != "claims are not stored"
	}
	var stored *int64
	if !w.apart {
		stored = d.advance(w.msgs[len(w.msgs)-1].next())
	}
	d.m.note("epoch %d commits %s: %d handled, %d parked, position %s", w.pos.epoch, offsetsText(w.msgs), len(s.handle), len(s.parked), positionText(d.row.next))
	d.save()
	return stored, nil
}

func offsetsText(msgs []*Message) string {
	var text []string
	for _, msg := range msgs {
		text = append(text, fmt.Sprint(msg.Offset))
	}
	return strings.Join(text, " ")
}

// ordered checks that a message comes before all later ones that must follow it, and that none
// before it is parked. The caller holds mu.
func (d *simulatedDatabase) ordered(at int) {
	if d.m.cfg.Order == OrderUnordered {
		return
	}
	for other := range d.m.records {
		same := d.m.keys[other] == d.m.keys[at] && d.m.keys[at] != 0
		if other > at && d.effects[other] > 0 && (same || d.m.cfg.Order == OrderByPartition) {
			d.m.fail("message %d ran after message %d", at, other)
		}
		if other < at && d.parked[other] && same {
			d.m.fail("message %d ran, and message %d of its key is parked", at, other)
		}
	}
}

// advance moves the position. The caller holds mu.
func (d *simulatedDatabase) advance(to int64) *int64 {
	if d.row.next == nil || *d.row.next < to {
		d.row.next = &to
	}
	for i := range *d.row.next {
		if d.effects[i] == 0 && !d.parked[i] {
			d.m.fail("the position is %d, and message %d is neither handled nor parked", *d.row.next, i)
		}
	}
	next := *d.row.next
	return &next
}
