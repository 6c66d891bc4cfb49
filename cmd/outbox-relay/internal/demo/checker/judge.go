package checker

import (
	"cmp"
	"fmt"
	"slices"
)

// Order is a fact: the shop committed it. The versions of a key are 1, 2, 3, … in commit order.
type Order struct {
	ID        int64
	MessageID string
	Key       string
	Version   int64
	Amount    int64
}

// Record is one record of the topic, decoded.
type Record struct {
	Partition int32
	Offset    int64
	MessageID string
	Key       string
	OrderID   int64
	Version   int64
	Amount    int64
	// Unreadable is why a record is no order event; the fields above may then be zero.
	Unreadable string
}

// Effect is one row that a consumer wrote. Sequence increases in commit order among the rows of one
// key.
type Effect struct {
	Sequence  int64
	OrderID   int64
	MessageID string
	Key       string
	Version   int64
	Amount    int64
}

// Evidence is everything that Judge looks at, in any order.
type Evidence struct {
	Orders   []Order
	Records  []Record
	Effects  []Effect
	Balances map[string]int64 // by key: the sum of the effects in the consumers' own UPDATE
}

// Verdict counts the differences. If all fields from Undelivered on are zero, the promise is kept.
type Verdict struct {
	Orders              int `json:"orders"`               // committed by the shop
	Delivered           int `json:"delivered"`            // orders that are in the topic at least once
	Records             int `json:"records"`              // records in the topic
	DuplicatesDelivered int `json:"duplicates_delivered"` // records beyond the first of their message ID
	Effects             int `json:"effects"`              // rows of effects

	Undelivered   int `json:"undelivered"`    // orders that are not in the topic
	Lost          int `json:"lost"`           // orders without an effect
	Doubled       int `json:"doubled"`        // effects beyond the first of their order
	OutOfOrder    int `json:"out_of_order"`   // first occurrences, in the topic or as an effect, behind a later version of their key
	Phantoms      int `json:"phantoms"`       // records and effects whose content no order has
	WrongBalances int `json:"wrong_balances"` // keys whose balance is not the sum of their orders

	Examples []string `json:"examples,omitempty"` // the first few differences as text
}

// Held reports whether every order had its effect exactly once and in order, and nothing else
// happened.
func (v Verdict) Held() bool {
	return v.Undelivered == 0 && v.Lost == 0 && v.Doubled == 0 && v.OutOfOrder == 0 && v.Phantoms == 0 && v.WrongBalances == 0
}

// examplesMax is how many differences are described: more would hide the count.
const examplesMax = 10

func (v *Verdict) example(format string, args ...any) {
	if len(v.Examples) < examplesMax {
		v.Examples = append(v.Examples, fmt.Sprintf(format, args...))
	}
}

// Judge compares the evidence.
func Judge(evidence Evidence) Verdict {
	v := Verdict{Orders: len(evidence.Orders), Records: len(evidence.Records), Effects: len(evidence.Effects)}
	orders := make(map[int64]Order, len(evidence.Orders))
	for _, o := range evidence.Orders {
		orders[o.ID] = o
	}
	delivered := v.judgeTopic(evidence.Records, orders)
	done := v.judgeEffects(evidence.Effects, orders)
	for _, o := range evidence.Orders {
		if !delivered[o.ID] {
			v.Undelivered++
			v.example("order %d (%s, version %d) is not in the topic", o.ID, o.Key, o.Version)
		}
		if done[o.ID] == 0 {
			v.Lost++
			v.example("order %d (%s, version %d) has no effect", o.ID, o.Key, o.Version)
		}
	}
	v.judgeBalances(evidence)
	return v
}

// judgeTopic walks every partition by offset, as a consumer would see it.
func (v *Verdict) judgeTopic(records []Record, orders map[int64]Order) (delivered map[int64]bool) {
	records = slices.SortedFunc(slices.Values(records), func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	delivered = make(map[int64]bool, len(orders))
	seen := make(map[string]bool, len(records))
	versions := make(map[string]int64)
	homes := make(map[string]int32)
	for _, r := range records {
		if r.Unreadable != "" {
			v.Phantoms++
			v.example("record %d/%d is no order event: %s", r.Partition, r.Offset, r.Unreadable)
			continue
		}
		first := !seen[r.MessageID]
		seen[r.MessageID] = true
		if !first {
			v.DuplicatesDelivered++
		}
		claim := Order{ID: r.OrderID, MessageID: r.MessageID, Key: r.Key, Version: r.Version, Amount: r.Amount}
		if fact, ok := orders[r.OrderID]; !ok || fact != claim {
			v.Phantoms++
			v.example("record %d/%d says %+v, the shop says %+v", r.Partition, r.Offset, claim, fact)
			continue
		}
		delivered[r.OrderID] = true
		if !first {
			continue
		}
		home, known := homes[r.Key]
		if !known {
			homes[r.Key], home = r.Partition, r.Partition
		}
		// There is no order across partitions, so a key in two of them has lost its order.
		if home != r.Partition || r.Version < versions[r.Key] {
			v.OutOfOrder++
			v.example("record %d/%d: %s version %d comes after version %d of partition %d", r.Partition, r.Offset, r.Key, r.Version, versions[r.Key], home)
		}
		versions[r.Key] = max(versions[r.Key], r.Version)
	}
	v.Delivered = len(delivered)
	return delivered
}

// judgeEffects walks the effects in commit order and returns how many each order had.
func (v *Verdict) judgeEffects(effects []Effect, orders map[int64]Order) (done map[int64]int) {
	effects = slices.SortedFunc(slices.Values(effects), func(a, b Effect) int {
		return cmp.Compare(a.Sequence, b.Sequence)
	})
	done = make(map[int64]int, len(orders))
	versions := make(map[string]int64)
	for _, e := range effects {
		claim := Order{ID: e.OrderID, MessageID: e.MessageID, Key: e.Key, Version: e.Version, Amount: e.Amount}
		fact, ok := orders[e.OrderID]
		if !ok || fact != claim {
			v.Phantoms++
			v.example("effect %d says %+v, the shop says %+v", e.Sequence, claim, fact)
		}
		if !ok {
			continue
		}
		done[e.OrderID]++
		if n := done[e.OrderID]; n > 1 {
			v.Doubled++
			v.example("order %d (%s, version %d) has effect number %d", e.OrderID, e.Key, e.Version, n)
			continue
		}
		if e.Version < versions[e.Key] {
			v.OutOfOrder++
			v.example("effect %d: %s version %d was applied after version %d", e.Sequence, e.Key, e.Version, versions[e.Key])
		}
		versions[e.Key] = max(versions[e.Key], e.Version)
	}
	return done
}

// judgeBalances finds what counting rows cannot find: an UPDATE that was lost, or applied twice,
// although its INSERT was applied once.
func (v *Verdict) judgeBalances(evidence Evidence) {
	want := make(map[string]int64)
	for _, o := range evidence.Orders {
		want[o.Key] += o.Amount
	}
	keys := make(map[string]bool, len(want))
	for key := range want {
		keys[key] = true
	}
	for key := range evidence.Balances {
		keys[key] = true
	}
	for key := range keys {
		if want[key] != evidence.Balances[key] {
			v.WrongBalances++
			v.example("balance of %s is %d, its orders add up to %d", key, evidence.Balances[key], want[key])
		}
	}
}
