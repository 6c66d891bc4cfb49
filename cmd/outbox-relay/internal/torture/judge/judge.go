package judge

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// Judge compares the evidence.
func Judge(e *Evidence) Verdict {
	j := &judgement{e: e, forged: map[int64]bool{}, deadForged: map[string]bool{}}
	j.place()
	j.producers()
	j.topic()
	dead := j.deadLetters()
	children := j.children()
	for _, g := range e.Scene.Groups {
		if g.Parent == 0 {
			j.group(g, dead[g.Number])
			j.offspring(g, children[g.Number])
			j.journal(g)
			j.fences(g)
			j.conflicts(g)
		}
	}
	j.expired()
	j.money()
	j.calls()
	j.requests()
	j.unanswered()
	j.positions()
	j.pauses()
	for _, r := range j.e.Resumed {
		if r.Next != r.Ordered {
			j.v.blame(&j.v.Unsettled, "%s was ordered to resume at %d, and did at %d", r.Partition, r.Ordered, r.Next)
		}
	}
	j.rewinds()
	for _, text := range e.Left {
		j.v.blame(&j.v.Unsettled, "left at the end: %s", text)
	}
	for _, text := range e.Stuck {
		j.v.blame(&j.v.Stuck, "%s", text)
	}
	for _, file := range e.Leaked {
		j.v.blame(&j.v.Leaked, "a password is in %s", file)
	}
	return j.v
}

type judgement struct {
	e *Evidence
	v Verdict

	forged     map[int64]bool             // in the topic of orders
	deadForged map[string]bool            // group/order: dead-lettered
	places     map[string]map[int64]int32 // by topic and order
}

// producers compares what producers know with the table. Only a promotion may lose what was
// confirmed.
func (j *judgement) producers() {
	for _, b := range j.e.Acked {
		sum, present := int64(0), int64(0)
		for id := b.First; id < b.First+b.Count; id++ {
			o, ok := j.e.Orders[id]
			if !ok {
				if !j.e.LostCommits {
					j.v.blame(&j.v.Lost, "order %d was confirmed, and is not in the table", id)
				}
				continue
			}
			present++
			sum += o.Amount
		}
		if present == b.Count && sum != b.Sum {
			j.v.blame(&j.v.Money, "orders %d to %d: the producer wrote amounts of %d, the table has %d", b.First, b.First+b.Count-1, b.Sum, sum)
		}
	}
	for _, b := range j.e.Undone {
		for id := b.First; id < b.First+b.Count; id++ {
			if _, ok := j.e.Orders[id]; ok {
				j.v.blame(&j.v.Phantoms, "order %d was rolled back, and is in the table", id)
			}
		}
	}
	j.v.Messages = len(j.e.Orders)
}

// fact returns the order that a body is about, and blames it if there is none.
func (j *judgement) fact(b scene.Body, where string) (Order, bool) {
	o, ok := j.e.Orders[b.Order]
	switch {
	case !ok && j.e.LostCommits:
		return o, false // published, and then lost by the promotion
	case !ok:
		j.v.blame(&j.v.Phantoms, "%s is about order %d, which nobody committed", where, b.Order)
	case o.Key != b.Key || o.Version != b.Version || o.Amount != b.Amount:
		j.v.blame(&j.v.Phantoms, "%s says %+v, the order is %+v", where, b, o)
		return o, false
	}
	return o, ok
}

// lastVersions is the order per key of what is seen one after the other.
type lastVersions map[int32]int64

func (j *judgement) follow(last lastVersions, key int32, version int64, where string) {
	if version == 0 {
		return
	}
	if version <= last[key] {
		j.v.blame(&j.v.OutOfOrder, "%s: key %d, version %d comes after version %d", where, key, version, last[key])
	}
	last[key] = max(last[key], version)
}

func (r Record) where() string { return fmt.Sprintf("%s/%d/%d", r.Topic, r.Partition, r.Offset) }

// topic walks the topic of orders by partition and offset.
func (j *judgement) topic() {
	seen := make(map[string]int, len(j.e.Orders))
	last, homes := lanes{}, map[string]int32{}
	for _, r := range j.e.Records {
		j.v.Records++
		if r.Topic != j.e.Topic {
			continue
		}
		if _, garbage := j.e.Garbage[r.ID]; garbage {
			continue
		}
		if r.Unreadable != "" {
			j.v.blame(&j.v.Phantoms, "%s is no order: %s", r.where(), r.Unreadable)
			continue
		}
		if _, known := j.e.Forged[r.Body.Order]; known && r.Body.Forged {
			j.forged[r.Body.Order] = true
			continue
		}
		o, ok := j.fact(r.Body, r.where())
		if !ok {
			continue
		}
		if r.ID != o.MessageID {
			j.v.blame(&j.v.Phantoms, "%s has ID %s, order %d was published under %s", r.where(), r.ID, r.Body.Order, o.MessageID)
			continue
		}
		if seen[r.ID]++; seen[r.ID] > 1 {
			continue
		}
		if home, known := homes[r.Key]; known && home != r.Partition && !j.e.Grown[r.Topic] {
			j.v.blame(&j.v.OutOfOrder, "%s: its key is in partition %d, too", r.where(), home)
		}
		homes[r.Key] = r.Partition
		if in, judged := j.lane(r.Body.Order, ""); judged {
			j.follow(last.of(in), o.Key, o.Version, r.where())
		}
	}
	for id, o := range j.e.Orders {
		n := seen[o.MessageID]
		if n == 0 {
			j.v.blame(&j.v.Lost, "order %d (message %s) is not in the topic", id, o.MessageID)
		}
		if extra := n - 1 - j.e.Copied[o.MessageID]; extra > 0 && j.e.Scene.Relay.ExactlyOnce && !j.again() && !j.e.LostCommits {
			j.v.blame(&j.v.Doubled, "order %d (message %s) is in the topic %d times, %d of them copied from outside, although the relay is exactly-once", id, o.MessageID, n, j.e.Copied[o.MessageID])
		}
	}
}

// again reports whether a relay may publish again, although it is exactly-once: what an operator asked
// for, what got new numbers, and what is above the floor of a database that was restored.
func (j *judgement) again() bool { return j.e.Replayed || j.e.SequenceBack || j.e.Restored }

// deadLetters returns how often each group dead-lettered each order.
func (j *judgement) deadLetters() map[int16]map[int64]int {
	all := map[int16]map[int64]int{}
	for _, g := range j.e.Scene.Groups {
		if !g.DeadLetter {
			continue
		}
		ids := map[int64]map[string]bool{}
		for _, r := range j.e.Records {
			if r.Topic != j.e.DeadTopic(g.Number) || r.Unreadable != "" { // garbage ends there, too
				continue
			}
			if _, known := j.e.Forged[r.Body.Order]; known && r.Body.Forged {
				j.deadForged[fmt.Sprintf("%d/%d", g.Number, r.Body.Order)] = true
				continue
			}
			if _, ok := j.fact(r.Body, r.where()); ok {
				if ids[r.Body.Order] == nil {
					ids[r.Body.Order] = map[string]bool{}
				}
				ids[r.Body.Order][r.ID] = true
			}
		}
		all[g.Number] = map[int64]int{}
		for order, different := range ids {
			all[g.Number][order] = len(different)
		}
	}
	return all
}

// group judges the effects of a group that handles orders: one of each, in order.
func (j *judgement) group(g scene.Group, dead map[int64]int) {
	done := j.effects(g)
	for id, o := range j.e.Orders {
		_, discarded := j.e.Discarded[fmt.Sprintf("%d/%d", g.Number, id)]
		gone := dead[id]
		if discarded {
			gone++
		}
		j.v.Parked += gone
		switch n := done[id]; {
		case n > 1:
			j.v.blame(&j.v.Doubled, "group %d: order %d has %d effects", g.Number, id, n)
		case n+gone > 1 && !j.e.LostCommits: // the first attempt may be among what was lost
			j.v.blame(&j.v.Doubled, "group %d: order %d has %d effects, and was dead-lettered or discarded %d times", g.Number, id, n, gone)
		case n+gone == 0:
			j.v.blame(&j.v.Lost, "group %d: order %d (key %d, version %d, kind %d) has no effect", g.Number, id, o.Key, o.Version, o.Kind)
		case gone > 0 && (o.Kind == scene.KindPlain || o.Kind == scene.KindLater) && (!g.Calls || !scene.IsCalled(id)): // a call may fail
			j.v.blame(&j.v.Lost, "group %d: order %d was dead-lettered or discarded, although nothing is wrong with it", g.Number, id)
		case n > 0 && o.Kind == scene.KindForever:
			j.v.blame(&j.v.Phantoms, "group %d: order %d has an effect, although its handler always fails", g.Number, id)
		}
	}
}

// effects walks the effects of a group and counts them by order.
func (j *judgement) effects(g scene.Group) map[int64]int {
	done := make(map[int64]int, len(j.e.Effects[g.Number]))
	last, children := lanes{}, ""
	if g.Parent > 0 {
		children = j.e.ChildTopic(g.Parent)
	}
	for _, effect := range j.e.Effects[g.Number] {
		j.v.Effects++
		where := fmt.Sprintf("group %d: the effect of order %d", g.Number, effect.Order)
		o, ok := j.fact(scene.Body{Order: effect.Order, Key: effect.Key, Version: effect.Version, Amount: effect.Amount}, where)
		if !ok {
			continue
		}
		in, judged := j.lane(effect.Order, children)
		if done[effect.Order]++; done[effect.Order] == 1 && j.ordered(g) && judged {
			j.follow(last.of(in), o.Key, o.Version, where)
		}
	}
	return done
}

// ordered reports whether the effects of a group follow the versions: if each of its parents does.
func (j *judgement) ordered(g scene.Group) bool {
	if g.Order == "none" {
		return false
	}
	for _, parent := range j.e.Scene.Groups {
		if parent.Number == g.Parent {
			return j.ordered(parent)
		}
	}
	return true
}

// children returns the message IDs of the children of each group's orders.
func (j *judgement) children() map[int16]map[int64]map[string]bool {
	all := map[int16]map[int64]map[string]bool{}
	for _, g := range j.e.Scene.Groups {
		if !g.Children {
			continue
		}
		born := map[int64]map[string]bool{}
		for _, r := range j.e.Records {
			if r.Topic != j.e.ChildTopic(g.Number) {
				continue
			}
			o, ok := j.fact(r.Body, r.where())
			if !ok {
				continue
			}
			j.derived(g, o, r)
			if born[r.Body.Order] == nil {
				born[r.Body.Order] = map[string]bool{}
			}
			born[r.Body.Order][r.ID] = true
		}
		all[g.Number] = born
	}
	return all
}

// offspring judges the children of a group, and the effects of the group that handles them.
func (j *judgement) offspring(g scene.Group, born map[int64]map[string]bool) {
	if !g.Children {
		return
	}
	parents := make(map[int64]bool, len(j.e.Effects[g.Number]))
	for _, effect := range j.e.Effects[g.Number] {
		if scene.HasChild(effect.Order) {
			parents[effect.Order] = true
		}
	}
	for order, ids := range born {
		switch {
		case !parents[order]:
			j.v.blame(&j.v.Phantoms, "group %d: order %d has a child, and no effect", g.Number, order)
		case len(ids) > 1:
			j.v.blame(&j.v.Doubled, "group %d: order %d has %d children", g.Number, order, len(ids))
		}
	}
	for _, kid := range j.e.Scene.Groups {
		if kid.Parent != g.Number {
			continue
		}
		done := j.effects(kid)
		for order := range parents {
			if len(born[order]) == 0 {
				j.v.blame(&j.v.Lost, "group %d: the child of order %d is not in the topic", g.Number, order)
				continue
			}
			j.v.Messages++
			switch n := done[order]; {
			case n == 0:
				j.v.blame(&j.v.Lost, "group %d: the child of order %d has no effect", kid.Number, order)
			case n > 1:
				j.v.blame(&j.v.Doubled, "group %d: the child of order %d has %d effects", kid.Number, order, n)
			}
		}
	}
}

// money compares balances, which handlers change by UPDATE, with their effects.
func (j *judgement) money() {
	type account struct {
		group int16
		key   int32
	}
	type total struct{ amount, n int64 }
	sums := map[account]total{}
	for group, effects := range j.e.Effects {
		for _, effect := range effects {
			t := sums[account{group, effect.Key}]
			sums[account{group, effect.Key}] = total{t.amount + effect.Amount, t.n + 1}
		}
	}
	for _, b := range j.e.Balances {
		if t := sums[account{b.Group, b.Key}]; t.amount != b.Balance || t.n != b.Effects {
			j.v.blame(&j.v.Money, "group %d: the balance of key %d is %d of %d effects, its effects are %d of %d", b.Group, b.Key, b.Balance, b.Effects, t.amount, t.n)
		}
	}
}

// calls judges the calls to the foreign system: those for one thing have one key, and every effect
// whose handler calls has its call.
func (j *judgement) calls() {
	owners := map[string]string{}
	for what, keys := range j.e.Calls {
		j.v.Calls += len(keys)
		if len(keys) > 1 {
			j.v.blame(&j.v.Doubled, "the foreign system was called for %s under %d keys", what, len(keys))
		}
		want, known := j.callKey(what)
		for key := range keys {
			if known && len(keys) == 1 && key != want {
				j.v.blame(&j.v.Doubled, "the foreign system was called for %s under key %s, the documented one is %s: a repetition would have another", what, key, want)
			}
			if other, taken := owners[key]; taken {
				j.v.blame(&j.v.Lost, "the foreign system was called for %s and %s under one key", what, other)
			}
			owners[key] = what
		}
	}
	for _, g := range j.e.Scene.Groups {
		for _, effect := range j.e.Effects[g.Number] {
			if g.Calls && scene.IsCalled(effect.Order) && len(j.e.Calls[fmt.Sprintf("%d/%d", g.Number, effect.Order)]) == 0 {
				j.v.blame(&j.v.Lost, "group %d: order %d has its effect without its call", g.Number, effect.Order)
			}
		}
	}
}

// requests judges the HTTP requests: one order for each key, and the answers name it.
func (j *judgement) requests() {
	orders := map[string][]int64{}
	for id, o := range j.e.Orders {
		if o.Request != "" {
			orders[o.Request] = append(orders[o.Request], id)
		}
	}
	for key, ids := range orders {
		if len(ids) > 1 {
			j.v.blame(&j.v.Doubled, "request %s ordered %d times", key, len(ids))
		}
	}
	answered := map[string]string{}
	for _, a := range j.e.Answers {
		j.v.Requests++
		if first, ok := answered[a.Key]; ok && first != a.Order && !j.wasLost(first) {
			j.v.blame(&j.v.Doubled, "request %s was answered with order %s, and with order %s", a.Key, first, a.Order)
		}
		answered[a.Key] = a.Order
		ids := orders[a.Key]
		switch {
		case a.Status != 201:
			j.v.blame(&j.v.Lost, "request %s was answered with %d", a.Key, a.Status)
		case len(ids) == 0 && !j.e.LostCommits:
			j.v.blame(&j.v.Lost, "request %s was confirmed, and there is no order", a.Key)
		case len(ids) == 1 && a.Order != strconv.FormatInt(ids[0], 10) && !j.wasLost(a.Order):
			j.v.blame(&j.v.Lost, "request %s was answered with order %s, its order is %d", a.Key, a.Order, ids[0])
		}
	}
}

// wasLost reports whether an order may have been confirmed, and lost by a promotion.
func (j *judgement) wasLost(order string) bool {
	id, err := strconv.ParseInt(order, 10, 64)
	_, present := j.e.Orders[id]
	return j.e.LostCommits && err == nil && !present
}

// unanswered judges that every request has an answer in the end.
func (j *judgement) unanswered() {
	answered := map[string]bool{}
	for _, a := range j.e.Answers {
		answered[a.Key] = true
	}
	for _, key := range j.e.Asked {
		if !answered[key] {
			j.v.blame(&j.v.Stuck, "request %s never had an answer", key)
		}
	}
}

// positions judges that a stored position goes back only where an operator ordered it.
func (j *judgement) positions() {
	last, ordered := map[string]int64{}, map[string]int{}
	for _, m := range j.e.Moves {
		if m.Ordered {
			ordered[m.Partition]++
			continue
		}
		if m.Next < last[m.Partition] && !j.e.LostCommits {
			if ordered[m.Partition] == 0 {
				j.v.blame(&j.v.Backwards, "the position of %s went from %d to %d", m.Partition, last[m.Partition], m.Next)
			} else {
				ordered[m.Partition]--
			}
		}
		last[m.Partition] = m.Next
	}
}

// String is a line for people.
func (v *Verdict) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d messages, %d effects, %d requests: lost %d, doubled %d, out of order %d", v.Messages, v.Effects, v.Requests, v.Lost, v.Doubled, v.OutOfOrder)
	for _, more := range []struct {
		name string
		n    int
	}{{"phantoms", v.Phantoms}, {"wrong balances", v.Money}, {"unsettled", v.Unsettled}, {"positions back", v.Backwards}, {"stuck", v.Stuck}, {"leaked", v.Leaked}} {
		if more.n > 0 {
			fmt.Fprintf(&b, ", %s %d", more.name, more.n)
		}
	}
	return b.String()
}
