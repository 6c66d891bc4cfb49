package judge_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Groups of the evidence: first handles in order, has children and calls, and dead-letters; kid
// handles its children; loose handles without order, and its operator discards.
const (
	first, kid, loose = int16(1), int16(101), int16(2)
	topic             = "orders"
)

// Orders of the evidence.
const (
	mother    = int64(4)  // has a child
	plain     = int64(5)  // behind mother in the order of their key
	sick      = int64(6)  // failed until it was cured
	forLater  = int64(7)  // has no place in the order of its key
	called    = int64(64) // has a child, and a call
	hopeless  = int64(9)  // its handler always fails
	requested = int64(10) // of a request
	sister    = int64(12) // behind plain, has a child
)

func id(order int64) string {
	return uuid.NewSHA1(uuid.NameSpaceOID, binary.BigEndian.AppendUint64(nil, uint64(order))).String()
}

// derived is what the engine derives: the judge has to arrive at the same.
func derived(order int64, step string) string {
	return dedup.ChildID(uuid.MustParse(id(order)), step, time.UnixMilli(1_700_000_000_000+order)).String()
}

func child(order int64) string { return derived(order, scene.StepChild) }

func entry(order int64) string { return derived(order, "publish:0") }

func callKey(group int16) string {
	return dedup.CallKey(consumerName(group), uuid.MustParse(id(called)), scene.StepCharge).String()
}

func requestKey(key string) string {
	return idempotency.Key{Scope: scene.Tenant, Operation: scene.OperationCharged, Value: key}.ChildID(scene.StepCharge).String()
}

func consumerName(group int16) string { return fmt.Sprintf("group-%d", group) }

func journalTopic(group int16) string { return fmt.Sprintf("journal-%d", group) }

func childTopic(group int16) string { return fmt.Sprintf("children-%d", group) }

func deadTopic(group int16) string { return fmt.Sprintf("dead-%d", group) }

func body(o judge.Order, order int64) scene.Body {
	return scene.Body{Order: order, Key: o.Key, Version: o.Version, Amount: o.Amount, Kind: o.Kind}
}

func effect(e *judge.Evidence, order int64) judge.Effect {
	o := e.Orders[order]
	return judge.Effect{Order: order, Key: o.Key, Version: o.Version, Amount: o.Amount}
}

func record(e *judge.Evidence, in, messageID string, order int64) judge.Record {
	o := e.Orders[order]
	offset := int64(len(e.Records))
	return judge.Record{Topic: in, Partition: o.Key % 2, Offset: offset, ID: messageID, Key: fmt.Sprintf("key-%d", o.Key), Body: body(o, order)}
}

func add(e *judge.Evidence, r ...judge.Record) { e.Records = append(e.Records, r...) }

// clean is the evidence of a round that kept the promise.
func clean() *judge.Evidence {
	e := &judge.Evidence{
		Scene: scene.Scene{Groups: []scene.Group{
			{Number: first, Order: "partition", Shape: scene.ShapeBatch, Children: true, Calls: true, DeadLetter: true},
			{Number: kid, Order: "key", Parent: first},
			{Number: loose, Order: "none", Shape: scene.ShapeEach, Dedup: "payload", Journal: true, Fences: true},
		}},
		Topic: topic, ChildTopic: childTopic, DeadTopic: deadTopic, JournalTopic: journalTopic, Consumer: consumerName,
		Orders: map[int64]judge.Order{
			mother: {Key: 1, Version: 1, Amount: 10}, plain: {Key: 1, Version: 2, Amount: 20}, sister: {Key: 1, Version: 3, Amount: 30},
			sick: {Key: 2, Version: 1, Amount: 5, Kind: scene.KindPermanent}, called: {Key: 2, Version: 2, Amount: 7},
			forLater: {Key: 1, Amount: 3, Kind: scene.KindLater}, hopeless: {Key: 3, Version: 1, Amount: 9, Kind: scene.KindForever},
			requested: {Key: 4, Version: 1, Amount: 2, Request: "request-1"},
		},
		Acked:   []judge.Batch{{First: mother, Count: 4, Sum: 38}, {First: called, Count: 1, Sum: 7}, {First: hopeless, Count: 1, Sum: 9}, {First: sister, Count: 1, Sum: 30}},
		Unknown: []judge.Batch{{First: plain, Count: 1}, {First: 900, Count: 2}},
		Undone:  []judge.Batch{{First: 800, Count: 2}},
		Calls:   map[string]map[string]int{"1/64": {callKey(first): 2}, "request/request-1": {requestKey("request-1"): 1}},
		Answers: []judge.Answer{{Key: "request-1", Status: 201, Order: "10"}, {Key: "request-1", Status: 201, Order: "10"}},
		Moves:   []judge.Move{{Partition: "a/orders/0", Next: 5}, {Partition: "a/orders/1", Next: 2}, {Partition: "a/orders/0", Next: 9}},
		Effects: map[int16][]judge.Effect{}, Copied: map[string]int{}, Discarded: map[string]struct{}{"2/9": {}, "2/forged-5": {}},
		Forged: map[int64]struct{}{plain: {}}, Frozen: map[string]int{}, Struck: map[string]int{},
		Entries: map[int16][]int64{loose: {requested, sick}},
		Resumed: []judge.Resumption{{Partition: "a/orders/0", Ordered: 3, Next: 3}},
		Fenced:  map[int16][]judge.Version{loose: {{Key: 1, Version: 2}}},
	}
	for order, o := range e.Orders {
		o.MessageID = id(order)
		e.Orders[order] = o
	}
	for _, order := range []int64{mother, plain, forLater, sick, sister, called, hopeless, requested} {
		add(e, record(e, topic, id(order), order))
	}
	for _, order := range []int64{mother, called, sister} {
		add(e, record(e, childTopic(first), child(order), order))
		e.Effects[kid] = append(e.Effects[kid], effect(e, order))
	}
	add(e, record(e, deadTopic(first), "dead-9", hopeless), forged(e, topic, id(plain)), entryOf(e, requested), entryOf(e, sick))
	for _, order := range []int64{mother, plain, forLater, sister, sick, called, requested} {
		e.Effects[first] = append(e.Effects[first], effect(e, order))
		e.Effects[loose] = append([]judge.Effect{effect(e, order)}, e.Effects[loose]...)
	}
	return e
}

// forged is a record with the ID of plain and with other content.
func forged(e *judge.Evidence, in, messageID string) judge.Record {
	r := record(e, in, messageID, plain)
	r.Body.Forged, r.Body.Amount = true, r.Body.Amount+1
	return r
}

func entryOf(e *judge.Evidence, order int64) judge.Record {
	return judge.Record{Topic: journalTopic(loose), Offset: int64(len(e.Records)), ID: entry(order), Key: "key-0", Body: scene.Body{Order: order}}
}

// balance makes balances of the effects, as handlers do.
func balance(e *judge.Evidence) {
	e.Balances = nil
	for group, effects := range e.Effects {
		for key := int32(1); key <= 9; key++ {
			b := judge.Balance{Group: group, Key: key}
			for _, f := range effects {
				if f.Key == key {
					b.Balance, b.Effects = b.Balance+f.Amount, b.Effects+1
				}
			}
			e.Balances = append(e.Balances, b)
		}
	}
}

// differences are the counts of a verdict that are not zero.
type differences map[string]int

// of returns them by their names in JSON.
func of(t *testing.T, v judge.Verdict) differences {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	all := map[string]any{}
	require.NoError(t, json.Unmarshal(text, &all))
	found := differences{}
	for name, value := range all {
		if n, ok := value.(float64); ok && n > 0 && !slices.Contains(totals, name) {
			found[name] = int(n)
		}
	}
	assert.Equal(t, len(found) == 0, v.Held(), "Held must agree with the counts: %v", found)
	return found
}

// totals are counts that are no differences.
var totals = []string{"messages", "records", "effects", "parked", "requests", "calls"}

func drop(records []judge.Record, in string, order int64) []judge.Record {
	return slices.DeleteFunc(records, func(r judge.Record) bool { return r.Topic == in && r.Body.Order == order && !r.Body.Forged })
}

func without(effects []judge.Effect, order int64) []judge.Effect {
	return slices.DeleteFunc(effects, func(f judge.Effect) bool { return f.Order == order })
}

// swap exchanges the effect of mother with another one.
func swap(e *judge.Evidence, group int16, other int64) {
	list := e.Effects[group]
	at := func(order int64) int {
		return slices.IndexFunc(list, func(f judge.Effect) bool { return f.Order == order })
	}
	list[at(mother)], list[at(other)] = list[at(other)], list[at(mother)]
}

// rename gives the record of an order another ID.
func rename(e *judge.Evidence, in string, order int64, messageID string) {
	at := slices.IndexFunc(e.Records, func(r judge.Record) bool { return r.Topic == in && r.Body.Order == order })
	e.Records[at].ID = messageID
}

func place(e *judge.Evidence, order int64) int {
	return slices.IndexFunc(e.Records, func(r judge.Record) bool { return r.Topic == topic && r.Body.Order == order })
}

func exactly(e *judge.Evidence) { e.Scene.Relay.ExactlyOnce = true }

// Property: a round that kept the promise is not blamed, and what it did is counted.
func TestCleanRoundIsNotBlamed(t *testing.T) {
	t.Parallel()
	e := clean()
	balance(e)
	v := judge.Judge(e)
	assert.Empty(t, of(t, v), "%v", v.Examples)
	assert.Equal(t, judge.Verdict{Messages: 8 + 3, Records: 15, Effects: 7 + 7 + 3, Parked: 2, Requests: 2, Calls: 2}, v)
}

// Property: each planted difference is counted under its own field, and under no other.
func TestEachDifferenceIsCounted(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		plant  func(e *judge.Evidence)
		blamed differences
	}{
		// Producers.
		{"a confirmed order is not in the table", func(e *judge.Evidence) { e.Acked = append(e.Acked, judge.Batch{First: 700, Count: 1, Sum: 5}) }, differences{"lost": 1}},
		{"amounts differ from those that were confirmed", func(e *judge.Evidence) { e.Acked[0].Sum++ }, differences{"money": 1}},
		{"an order that was rolled back is in the table", func(e *judge.Evidence) { e.Undone = append(e.Undone, judge.Batch{First: plain, Count: 1}) }, differences{"phantoms": 1}},

		// The topic.
		{"an order is not in the topic", func(e *judge.Evidence) { e.Records = drop(e.Records, topic, plain) }, differences{"lost": 1}},
		{"a record is about an order that nobody committed", func(e *judge.Evidence) {
			add(e, judge.Record{Topic: topic, ID: "x", Body: scene.Body{Order: 700}})
		}, differences{"phantoms": 1}},
		{"a record has another amount than its order", func(e *judge.Evidence) {
			r := record(e, topic, id(plain), plain)
			r.Body.Amount++
			add(e, r)
		}, differences{"phantoms": 1}},
		{"a record has another version than its order", func(e *judge.Evidence) {
			r := record(e, topic, id(plain), plain)
			r.Body.Version++
			add(e, r)
		}, differences{"phantoms": 1}},
		{"a record has another key than its order", func(e *judge.Evidence) {
			r := record(e, topic, id(plain), plain)
			r.Body.Key++
			add(e, r)
		}, differences{"phantoms": 1}},
		{"a record has another ID than its order", func(e *judge.Evidence) { add(e, record(e, topic, "another", plain)) }, differences{"phantoms": 1}},
		{"a record cannot be read", func(e *judge.Evidence) {
			r := record(e, topic, id(plain), plain)
			r.Unreadable = "no JSON"
			add(e, r)
		}, differences{"phantoms": 1}},
		{"a key is in two partitions", func(e *judge.Evidence) { e.Records[place(e, sister)].Partition = 0 }, differences{"out_of_order": 1}},
		{"an order is behind the next one of its key", func(e *judge.Evidence) {
			a, b := place(e, mother), place(e, plain)
			e.Records[a], e.Records[b] = e.Records[b], e.Records[a]
		}, differences{"out_of_order": 1}},
		{"an exactly-once relay published twice", func(e *judge.Evidence) { exactly(e); add(e, record(e, topic, id(plain), plain)) }, differences{"doubled": 1}},
		{"an exactly-once relay published twice what was copied once", func(e *judge.Evidence) {
			exactly(e)
			e.Copied[id(plain)] = 1
			add(e, record(e, topic, id(plain), plain), record(e, topic, id(plain), plain))
		}, differences{"doubled": 1}},
		{"another message was copied", func(e *judge.Evidence) {
			exactly(e)
			e.Copied[id(mother)] = 1
			add(e, record(e, topic, id(plain), plain))
		}, differences{"doubled": 1}},

		// Groups that handle orders.
		{"an order has no effect", func(e *judge.Evidence) { e.Effects[loose] = without(e.Effects[loose], plain) }, differences{"lost": 1}},
		{"an order has two effects", func(e *judge.Evidence) { e.Effects[loose] = append(e.Effects[loose], effect(e, plain)) }, differences{"doubled": 1}},
		{"an effect is of an order that nobody committed", func(e *judge.Evidence) {
			e.Effects[loose] = append(e.Effects[loose], judge.Effect{Order: 700, Key: 1})
		}, differences{"phantoms": 1}},
		{"an effect has another amount than its order", func(e *judge.Evidence) {
			f := effect(e, plain)
			f.Amount++
			e.Effects[loose] = append(e.Effects[loose], f)
		}, differences{"phantoms": 1}},
		{"effects are out of order", func(e *judge.Evidence) { swap(e, first, plain) }, differences{"out_of_order": 1}},
		{"an order was discarded and handled", func(e *judge.Evidence) { e.Discarded["2/6"] = struct{}{} }, differences{"doubled": 1}},
		{"an order was dead-lettered and handled", func(e *judge.Evidence) { add(e, record(e, deadTopic(first), "dead-6", sick)) }, differences{"doubled": 1}},
		{"an order was dead-lettered and discarded", func(e *judge.Evidence) { e.Discarded["1/9"] = struct{}{} }, differences{"doubled": 1}},
		{"an order was dead-lettered under two IDs", func(e *judge.Evidence) { add(e, record(e, deadTopic(first), "dead-again", hopeless)) }, differences{"doubled": 1}},
		{"a healthy order was discarded", func(e *judge.Evidence) {
			e.Effects[loose] = without(e.Effects[loose], plain)
			e.Discarded["2/5"] = struct{}{}
		}, differences{"lost": 1}},
		{"a healthy order for later was discarded", func(e *judge.Evidence) {
			e.Effects[loose] = without(e.Effects[loose], forLater)
			e.Discarded["2/7"] = struct{}{}
		}, differences{"lost": 1}},
		{"a healthy order was dead-lettered", func(e *judge.Evidence) {
			e.Effects[first] = without(e.Effects[first], plain)
			add(e, record(e, deadTopic(first), "dead-5", plain))
		}, differences{"lost": 1}},
		{"a healthy order was discarded by a group that does not call", func(e *judge.Evidence) {
			e.Effects[loose] = without(e.Effects[loose], called)
			e.Discarded["2/64"] = struct{}{}
		}, differences{"lost": 1}},
		{"an order that always fails has an effect", func(e *judge.Evidence) {
			e.Effects[loose] = append(e.Effects[loose], effect(e, hopeless))
			delete(e.Discarded, "2/9")
		}, differences{"phantoms": 1}},
		{"an order that always fails is nowhere", func(e *judge.Evidence) { delete(e.Discarded, "2/9") }, differences{"lost": 1}},
		{"another group discarded", func(e *judge.Evidence) {
			delete(e.Discarded, "2/9")
			e.Discarded["3/9"] = struct{}{}
		}, differences{"lost": 1}},
		{"a dead letter is about an order that nobody committed", func(e *judge.Evidence) {
			add(e, judge.Record{Topic: deadTopic(first), ID: "x", Body: scene.Body{Order: 700}})
		}, differences{"phantoms": 1}},

		// Children.
		{"a child is not in the topic", func(e *judge.Evidence) {
			e.Records = drop(e.Records, childTopic(first), mother)
		}, differences{"lost": 1}},
		{"a child has no effect", func(e *judge.Evidence) { e.Effects[kid] = without(e.Effects[kid], mother) }, differences{"lost": 1}},
		{"a child has two effects", func(e *judge.Evidence) { e.Effects[kid] = append(e.Effects[kid], effect(e, called)) }, differences{"doubled": 1}},
		{"an order has two children", func(e *judge.Evidence) {
			add(e, record(e, childTopic(first), dedup.ChildID(uuid.MustParse(id(mother)), scene.StepChild, time.UnixMilli(1)).String(), mother))
		}, differences{"doubled": 1}},
		{"an order without effect has a child", func(e *judge.Evidence) { add(e, record(e, childTopic(first), child(hopeless), hopeless)) }, differences{"phantoms": 1}},
		{"a child is about an order that nobody committed", func(e *judge.Evidence) {
			add(e, judge.Record{Topic: childTopic(first), ID: "x", Body: scene.Body{Order: 700}})
		}, differences{"phantoms": 1}},
		{"children's effects are out of order", func(e *judge.Evidence) { swap(e, kid, sister) }, differences{"out_of_order": 1}},

		// The foreign system.
		{"a call has two keys", func(e *judge.Evidence) { e.Calls["1/64"]["another"] = 1 }, differences{"doubled": 1}},
		{"two calls have one key", func(e *judge.Evidence) { e.Calls["1/128"] = map[string]int{callKey(first): 1} }, differences{"lost": 1}},
		{"an effect has no call", func(e *judge.Evidence) { delete(e.Calls, "1/64") }, differences{"lost": 1}},

		{"a call has another key than the documented one", func(e *judge.Evidence) { e.Calls["1/64"] = map[string]int{"another": 1} }, differences{"doubled": 1}},
		{"a call has the key of another group", func(e *judge.Evidence) {
			e.Calls["1/64"] = map[string]int{callKey(loose): 1}
		}, differences{"doubled": 1}},
		{"a request's call has another key than the documented one", func(e *judge.Evidence) {
			e.Calls["request/request-1"] = map[string]int{requestKey("request-2"): 1}
		}, differences{"doubled": 1}},

		// IDs by the documented rule.
		{"a child has an ID that is not derived from its parent", func(e *judge.Evidence) {
			rename(e, childTopic(first), mother, child(sister))
		}, differences{"doubled": 1}},
		{"a child has an ID of another step", func(e *judge.Evidence) {
			rename(e, childTopic(first), mother, derived(mother, "publish:0"))
		}, differences{"doubled": 1}},
		{"a child has an ID that is none", func(e *judge.Evidence) { rename(e, childTopic(first), mother, "child") }, differences{"doubled": 1}},

		// Journals.
		{"an entry is not in the topic", func(e *judge.Evidence) { e.Records = drop(e.Records, journalTopic(loose), sick) }, differences{"lost": 1}},
		{"entries are out of order", func(e *judge.Evidence) { slices.Reverse(e.Entries[loose]) }, differences{"out_of_order": 1}},
		{"an entry was published that no handler committed", func(e *judge.Evidence) { add(e, entryOf(e, hopeless)) }, differences{"phantoms": 1}},
		{"an entry is of an order that nobody committed", func(e *judge.Evidence) {
			e.Entries[loose] = append(e.Entries[loose], 702)
			r := entryOf(e, 702)
			add(e, r)
		}, differences{"phantoms": 1, "lost": 1}},
		{"an entry has two IDs", func(e *judge.Evidence) {
			r := entryOf(e, sick)
			r.ID = entry(mother)
			add(e, r)
		}, differences{"doubled": 1}},
		{"an entry has an ID that is not derived from its parent", func(e *judge.Evidence) {
			rename(e, journalTopic(loose), sick, entry(mother))
		}, differences{"doubled": 1}},

		// Fences.
		{"a fence lets a version through twice", func(e *judge.Evidence) {
			e.Fenced[loose] = append(e.Fenced[loose], judge.Version{Key: 1, Version: 2})
		}, differences{"doubled": 1}},
		{"a fence lets an older version through", func(e *judge.Evidence) {
			e.Fenced[loose] = append(e.Fenced[loose], judge.Version{Key: 1, Version: 1})
		}, differences{"out_of_order": 1}},
		{"a fence holds the last version back", func(e *judge.Evidence) { e.Fenced[loose] = nil }, differences{"lost": 1}},

		// Two messages under one ID.
		{"a message under the ID of another one was dropped", func(e *judge.Evidence) { delete(e.Discarded, "2/forged-5") }, differences{"lost": 1}},
		{"a message under the ID of another one was handled", func(e *judge.Evidence) {
			f := effect(e, plain)
			f.Amount++
			e.Effects[loose] = append(e.Effects[loose], f)
		}, differences{"phantoms": 1}},
		{"a forged message that nobody forged", func(e *judge.Evidence) { delete(e.Forged, plain) }, differences{"phantoms": 1}},

		// Pauses.
		{"an order was published while its topic was paused", func(e *judge.Evidence) {
			at := e.Records[place(e, plain)]
			e.Paused = []judge.Pause{{Partition: at.Partition, From: at.Offset, To: at.Offset + 1}}
		}, differences{"phantoms": 1}},

		// Requests.
		{"a request ordered twice", func(e *judge.Evidence) {
			o := e.Orders[plain]
			o.Request = "request-1"
			e.Orders[plain] = o
		}, differences{"doubled": 1}},
		{"a request was refused", func(e *judge.Evidence) { e.Answers[0].Status = 422 }, differences{"lost": 1}},
		{"a request was confirmed without an order", func(e *judge.Evidence) {
			e.Answers = append(e.Answers, judge.Answer{Key: "request-2", Status: 201, Order: "77"})
		}, differences{"lost": 1}},
		{"a copy of a request got another one's answer", func(e *judge.Evidence) { e.Answers[1].Order = "11" }, differences{"lost": 1, "doubled": 1}},
		{"a request never had an answer", func(e *judge.Evidence) { e.Asked = append(e.Asked, "request-77") }, differences{"stuck": 1}},

		// Positions.
		{"a position went back", func(e *judge.Evidence) {
			e.Moves = append(e.Moves, judge.Move{Partition: "a/orders/0", Next: 8})
		}, differences{"backwards": 1}},
		{"a position went back twice after one order", func(e *judge.Evidence) {
			e.Moves = append(e.Moves, judge.Move{Partition: "a/orders/0", Ordered: true},
				judge.Move{Partition: "a/orders/0", Next: 3}, judge.Move{Partition: "a/orders/0", Next: 2})
		}, differences{"backwards": 1}},
		{"another partition was ordered back", func(e *judge.Evidence) {
			e.Moves = append(e.Moves, judge.Move{Partition: "a/orders/1", Ordered: true}, judge.Move{Partition: "a/orders/0", Next: 3})
		}, differences{"backwards": 1}},
		{"a position went back before the order", func(e *judge.Evidence) {
			e.Moves = append(e.Moves, judge.Move{Partition: "a/orders/0", Next: 3}, judge.Move{Partition: "a/orders/0", Ordered: true})
		}, differences{"backwards": 1}},

		{"an order to resume elsewhere was not carried out", func(e *judge.Evidence) {
			e.Resumed = append(e.Resumed, judge.Resumption{Partition: "a/orders/0", Ordered: 3, Next: 9})
		}, differences{"unsettled": 1}},

		// What the run and the tables say.
		{"something is left", func(e *judge.Evidence) { e.Left = []string{"parked", "dead"} }, differences{"unsettled": 2}},
		{"something did not end", func(e *judge.Evidence) { e.Stuck = []string{"a", "b", "c"} }, differences{"stuck": 3}},
		{"a password is in an output", func(e *judge.Evidence) { e.Leaked = []string{"relay-1.log"} }, differences{"leaked": 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			e := clean()
			test.plant(e)
			balance(e)
			v := judge.Judge(e)
			assert.Equal(t, test.blamed, of(t, v), "%v", v.Examples)
		})
	}
}

// Property: balances are compared with the effects, by amount and by number.
func TestBalancesAreCompared(t *testing.T) {
	t.Parallel()
	for name, plant := range map[string]func(b *judge.Balance){
		"amount": func(b *judge.Balance) { b.Balance-- },
		"number": func(b *judge.Balance) { b.Effects++ },
	} {
		e := clean()
		balance(e)
		plant(&e.Balances[slices.IndexFunc(e.Balances, func(b judge.Balance) bool { return b.Group == loose && b.Key == 1 })])
		v := judge.Judge(e)
		assert.Equal(t, differences{"money": 1}, of(t, v), name)
	}
	e := clean()
	balance(e)
	e.Balances = append(e.Balances, judge.Balance{Group: loose, Key: 50, Balance: 1, Effects: 1})
	v := judge.Judge(e)
	assert.Equal(t, differences{"money": 1}, of(t, v), "a balance without effects")
}

// Property: what the promise allows is not blamed.
func TestWhatIsAllowedIsNotBlamed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		plant func(e *judge.Evidence)
	}{
		{"the outcome of a commit is unknown, and it is in the table or not", func(e *judge.Evidence) {
			e.Unknown = append(e.Unknown, judge.Batch{First: mother, Count: 4}, judge.Batch{First: 700, Count: 50})
		}},
		{"an at-least-once relay publishes again, also behind later versions", func(e *judge.Evidence) {
			add(e, record(e, topic, id(mother), mother), record(e, topic, id(plain), plain), record(e, topic, id(mother), mother))
		}},
		{"copies from outside, where the relay is exactly-once", func(e *judge.Evidence) {
			exactly(e)
			e.Copied[id(mother)] = 2
			add(e, record(e, topic, id(mother), mother), record(e, topic, id(mother), mother))
		}},
		{"a copy that did not arrive", func(e *judge.Evidence) { exactly(e); e.Copied[id(mother)] = 2 }},
		{"an operator's replay, where the relay is exactly-once", func(e *judge.Evidence) {
			exactly(e)
			e.Replayed = true
			add(e, record(e, topic, id(mother), mother))
		}},
		{"rows that were renumbered, where the relay is exactly-once", func(e *judge.Evidence) {
			exactly(e)
			e.SequenceBack = true
			add(e, record(e, topic, id(mother), mother))
		}},
		{"a restored database, where the relay is exactly-once", func(e *judge.Evidence) {
			exactly(e)
			e.Restored = true
			add(e, record(e, topic, id(mother), mother))
		}},
		{"a message for later comes anywhere", func(e *judge.Evidence) {
			at := place(e, forLater)
			r := e.Records[at]
			e.Records = append(slices.Delete(e.Records, at, at+1), r)
			e.Effects[first] = append(without(e.Effects[first], forLater), effect(e, forLater))
		}},
		{"a group without order handles backwards", func(e *judge.Evidence) { slices.Reverse(e.Effects[loose]); swap(e, loose, sister) }},
		{"children of a group without order", func(e *judge.Evidence) {
			e.Scene.Groups[0].Order = "none"
			swap(e, kid, sister)
		}},
		{"a group of children without order", func(e *judge.Evidence) {
			e.Scene.Groups[1].Order = "none"
			swap(e, kid, sister)
		}},
		{"a child is published again under its ID", func(e *judge.Evidence) { add(e, record(e, childTopic(first), child(mother), mother)) }},
		{"a dead letter is published again under its ID", func(e *judge.Evidence) { add(e, record(e, deadTopic(first), "dead-9", hopeless)) }},
		{"a sick order was dead-lettered instead of handled", func(e *judge.Evidence) {
			e.Effects[first] = without(e.Effects[first], sick)
			add(e, record(e, deadTopic(first), "dead-6", sick))
		}},
		{"a sick order was discarded instead of handled", func(e *judge.Evidence) {
			e.Effects[loose] = without(e.Effects[loose], sick)
			e.Discarded["2/6"] = struct{}{}
		}},
		{"an order was dead-lettered whose call may have failed", func(e *judge.Evidence) {
			e.Effects[first], e.Effects[kid] = without(e.Effects[first], called), without(e.Effects[kid], called)
			e.Records = drop(e.Records, childTopic(first), called)
			add(e, record(e, deadTopic(first), "dead-64", called))
		}},
		{"one call was made many times under its key", func(e *judge.Evidence) { e.Calls["1/64"][callKey(first)] = 50 }},
		{"a call was made for an order without effect", func(e *judge.Evidence) { e.Calls["1/192"] = map[string]int{"any key": 1} }},
		{"a group that does not call", func(e *judge.Evidence) { e.Scene.Groups[0].Calls = false; delete(e.Calls, "1/64") }},
		{"a request without an answer", func(e *judge.Evidence) { e.Answers = nil }},
		{"a position is moved back by an order", func(e *judge.Evidence) {
			e.Moves = append(e.Moves, judge.Move{Partition: "a/orders/0", Ordered: true}, judge.Move{Partition: "a/orders/0", Next: 3}, judge.Move{Partition: "a/orders/0", Next: 9})
		}},
		{"an order moves a position forward", func(e *judge.Evidence) {
			e.Moves = append(e.Moves, judge.Move{Partition: "a/orders/0", Ordered: true}, judge.Move{Partition: "a/orders/0", Next: 30})
		}},
		{"a message under the ID of another one was dead-lettered", func(e *judge.Evidence) {
			e.Scene.Groups[0].Dedup = "payload"
			add(e, forged(e, deadTopic(first), "dead-forged"))
		}},
		{"a group that compares no contents drops a message under the ID of another one", func(e *judge.Evidence) {
			e.Scene.Groups[2].Dedup = "id"
			delete(e.Discarded, "2/forged-5")
		}},
		{"other things arrive while the topic is paused, and its orders before and after", func(e *judge.Evidence) {
			at := e.Records[place(e, plain)]
			e.Garbage, e.Copied[id(mother)] = map[string]struct{}{"garbage": {}}, 1
			add(e, judge.Record{Topic: topic, Partition: at.Partition, Offset: 101, ID: "garbage", Unreadable: "no JSON"})
			copied := record(e, topic, id(mother), mother)
			copied.Offset = 102
			other := forged(e, topic, id(plain))
			other.Offset = 103
			add(e, copied, other)
			e.Paused = []judge.Pause{
				{Partition: at.Partition, From: 101, To: 104},
				{Partition: at.Partition, From: at.Offset + 1, To: at.Offset + 1},
				{Partition: at.Partition + 1, From: 0, To: 200},
			}
		}},
		{"a relay was frozen: what it had in flight may arrive during a pause", func(e *judge.Evidence) {
			at := e.Records[place(e, plain)]
			e.Paused = []judge.Pause{{Partition: at.Partition, From: at.Offset, To: at.Offset + 1}}
			e.Frozen["relay"] = 1
		}},
		{"a relay froze itself: what it had in flight may arrive during a pause", func(e *judge.Evidence) {
			at := e.Records[place(e, plain)]
			e.Paused = []judge.Pause{{Partition: at.Partition, From: at.Offset, To: at.Offset + 1}}
			e.Struck["freeze-at relay.read"] = 1
		}},
		{"an entry is published again under its ID, also behind later ones", func(e *judge.Evidence) { add(e, entryOf(e, requested)) }},
		{"the call of a request's key, and of an order that a promotion lost", func(e *judge.Evidence) {
			e.LostCommits = true
			e.Calls["1/704"] = map[string]int{"any key": 1}
		}},
		{"a promotion lost entries of a journal", func(e *judge.Evidence) {
			e.LostCommits = true
			add(e, entryOf(e, 702))
			slices.Reverse(e.Entries[loose])
		}},
		{"a promotion lost a commit that was confirmed and published", func(e *judge.Evidence) {
			e.LostCommits = true
			e.Acked = append(e.Acked, judge.Batch{First: 700, Count: 1, Sum: 5}, judge.Batch{First: sister, Count: 2, Sum: 99})
			lost := scene.Body{Order: 700, Key: 1, Version: 9, Amount: 5}
			add(e, judge.Record{Topic: topic, ID: "x", Body: lost}, judge.Record{Topic: childTopic(first), ID: "x", Body: lost}, judge.Record{Topic: deadTopic(first), ID: "x", Body: lost})
		}},
		{"a promotion lost the order of a request", func(e *judge.Evidence) {
			e.LostCommits = true
			e.Answers = append(e.Answers, judge.Answer{Key: "request-2", Status: 201, Order: "77"})
		}},
		{"a promotion lost the first order of a request, whose answer was given", func(e *judge.Evidence) {
			e.LostCommits = true
			e.Answers[0].Order = "11"
		}},
		{"a promotion lost what an exactly-once relay knew of its progress", func(e *judge.Evidence) {
			exactly(e)
			e.LostCommits = true
			add(e, record(e, topic, id(plain), plain))
		}},
		{"a promotion lost the discard, or the parking, of an order that was handled then", func(e *judge.Evidence) {
			e.LostCommits = true
			e.Discarded["2/6"] = struct{}{}
			add(e, record(e, deadTopic(first), "dead-6", sick))
		}},
		{"a promotion lost the advance of a position", func(e *judge.Evidence) {
			e.LostCommits = true
			e.Moves = append(e.Moves, judge.Move{Partition: "a/orders/0", Next: 1})
		}},
		{"records of other topics", func(e *judge.Evidence) {
			add(e, judge.Record{Topic: "foreign", Unreadable: "no JSON"}, judge.Record{Topic: deadTopic(loose), ID: "x", Body: scene.Body{Order: 700}})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			e := clean()
			test.plant(e)
			balance(e)
			v := judge.Judge(e)
			assert.Empty(t, of(t, v), "%v", v.Examples)
		})
	}
}

// Property: a promotion excuses what it lost, and nothing else.
func TestPromotionExcusesOnlyWhatItLost(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		plant  func(e *judge.Evidence)
		blamed differences
	}{
		"no effect":       {func(e *judge.Evidence) { e.Effects[loose] = without(e.Effects[loose], plain) }, differences{"lost": 1}},
		"not in topic":    {func(e *judge.Evidence) { e.Records = drop(e.Records, topic, plain) }, differences{"lost": 1}},
		"two effects":     {func(e *judge.Evidence) { e.Effects[loose] = append(e.Effects[loose], effect(e, plain)) }, differences{"doubled": 1}},
		"other amount":    {func(e *judge.Evidence) { e.Acked[0].Sum++ }, differences{"money": 1}},
		"rolled back":     {func(e *judge.Evidence) { e.Undone = append(e.Undone, judge.Batch{First: plain, Count: 1}) }, differences{"phantoms": 1}},
		"two calls' keys": {func(e *judge.Evidence) { e.Calls["1/64"]["another"] = 1 }, differences{"doubled": 1}},
	} {
		e := clean()
		e.LostCommits = true
		test.plant(e)
		balance(e)
		v := judge.Judge(e)
		assert.Equal(t, test.blamed, of(t, v), "%s: %v", name, v.Examples)
	}
}

// Property: each count is added, each difference breaks the promise, and each difference is shown.
func TestVerdictForgetsNoCount(t *testing.T) {
	t.Parallel()
	shape := reflect.TypeFor[judge.Verdict]()
	for i := range shape.NumField() {
		field := shape.Field(i)
		if field.Type.Kind() != reflect.Int {
			continue
		}
		var v, sum judge.Verdict
		reflect.ValueOf(&v).Elem().Field(i).SetInt(7)
		sum.Add(v)
		sum.Add(v)
		assert.Equal(t, int64(14), reflect.ValueOf(sum).Field(i).Int(), "Add: %s", field.Name)
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		assert.Equal(t, slices.Contains(totals, name), v.Held(), "Held: %s", field.Name)
		if !slices.Contains(totals, name) {
			assert.Contains(t, v.String(), " 7", "String: %s", field.Name)
		}
	}
}

// Property: few differences of a kind are described, all are counted.
func TestExamplesAreFew(t *testing.T) {
	t.Parallel()
	e := clean()
	for n := range int64(100) {
		e.Undone, e.Acked = append(e.Undone, judge.Batch{First: plain, Count: 1}), append(e.Acked, judge.Batch{First: 700 + n, Count: 1})
	}
	balance(e)
	v := judge.Judge(e)
	assert.Equal(t, differences{"lost": 100, "phantoms": 100}, of(t, v))
	assert.Len(t, v.Examples, 10)
	var sum judge.Verdict
	sum.Add(v)
	sum.Add(v)
	assert.Len(t, sum.Examples, 20)
}

// Property: the judge shares no code with the engine that it judges.
func TestJudgeImportsNothingOfTheEngine(t *testing.T) {
	t.Parallel()
	list, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	require.NoError(t, err)
	const module = "github.com/effectonce/effectonce/"
	var own []string
	for name := range strings.Lines(string(list)) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(name), module); ok {
			own = append(own, rest)
		}
	}
	assert.Equal(t, []string{
		"cmd/outbox-relay/internal/topicscan", "cmd/outbox-relay/internal/torture/ledger",
		"cmd/outbox-relay/internal/torture/scene", "cmd/outbox-relay/internal/torture/judge",
	}, own)
}
