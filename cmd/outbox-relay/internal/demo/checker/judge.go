package checker

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
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
	Order     // as the record has it
	// Unreadable is why a record is no order event; the fields above may then be zero.
	Unreadable string
}

// Effect is one row that a consumer wrote. Sequence increases in commit order among the rows of one
// key.
type Effect struct {
	Sequence int64
	Order    // as the effect has it
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
		if fact, ok := orders[r.ID]; !ok || fact != r.Order {
			v.Phantoms++
			v.example("record %d/%d says %+v, the shop says %+v", r.Partition, r.Offset, r.Order, fact)
			continue
		}
		delivered[r.ID] = true
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
		fact, ok := orders[e.ID]
		if !ok || fact != e.Order {
			v.Phantoms++
			v.example("effect %d says %+v, the shop says %+v", e.Sequence, e.Order, fact)
		}
		if !ok {
			continue
		}
		done[e.ID]++
		if n := done[e.ID]; n > 1 {
			v.Doubled++
			v.example("order %d (%s, version %d) has effect number %d", e.ID, e.Key, e.Version, n)
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

const ordersSQL = `-- checker.orders
SELECT id, message_id::text, customer, version, amount FROM shop.orders`

const effectsSQL = `-- checker.effects
SELECT sequence, order_id, message_id::text, customer, version, amount FROM shop.effects`

const balancesSQL = `-- checker.balances
SELECT customer, balance FROM shop.balances`

// ReadDatabase fills in orders, effects and balances from a schema. It reads all of them from one
// snapshot, so that a process that still writes cannot cause a difference.
func ReadDatabase(ctx context.Context, conn *pgx.Conn, schema string, evidence *Evidence) error {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return fmt.Errorf("check the database: %w", err)
	}
	defer tx.Rollback(ctx)
	quoted := pgx.Identifier{schema}.Sanitize() + "."
	query := func(sql string) pgx.Rows {
		// CollectRows returns this error, together with its own.
		rows, _ := tx.Query(ctx, strings.ReplaceAll(sql, "shop.", quoted))
		return rows
	}
	if evidence.Orders, err = pgx.CollectRows(query(ordersSQL), pgx.RowToStructByPos[Order]); err != nil {
		return fmt.Errorf("read the orders: %w", err)
	}
	if evidence.Effects, err = pgx.CollectRows(query(effectsSQL), pgx.RowToStructByPos[Effect]); err != nil {
		return fmt.Errorf("read the effects: %w", err)
	}
	evidence.Balances = make(map[string]int64)
	var key string
	var balance int64
	_, err = pgx.ForEachRow(query(balancesSQL), []any{&key, &balance}, func() error {
		evidence.Balances[key] = balance
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the balances: %w", err)
	}
	return nil
}

// event is the body of a record, as described in the demo's documentation.
type event struct {
	Order    *int64 `json:"order"`
	Customer string `json:"customer"`
	Version  int64  `json:"version"`
	Amount   int64  `json:"amount"`
}

// ReadTopic fills in the records of a topic, from its first offset to the end that it had when the
// call began. options have to reach the brokers (seeds, TLS, SASL) and must not name a consumer
// group.
func ReadTopic(ctx context.Context, options []kgo.Opt, topic string, evidence *Evidence) error {
	client, err := kgo.NewClient(options...)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	defer client.Close()
	extent, err := topicscan.ExtentOf(ctx, client, time.Time{}, topic)
	if err == nil && len(extent) == 0 {
		err = kerr.UnknownTopicOrPartition
	}
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	err = topicscan.Scan(ctx, options, map[string]topicscan.Extent{topic: extent}, func(r *kgo.Record) error {
		evidence.Records = append(evidence.Records, decode(r))
		return nil
	})
	if err != nil {
		return fmt.Errorf("read topic %s: %w", topic, err)
	}
	return nil
}

func decode(r *kgo.Record) Record {
	record := Record{Partition: r.Partition, Offset: r.Offset, Order: Order{Key: string(r.Key)}}
	for _, h := range r.Headers {
		if h.Key == "message-id" {
			record.MessageID = string(h.Value)
		}
	}
	var body event
	switch err := json.Unmarshal(r.Value, &body); {
	case err != nil:
		record.Unreadable = err.Error()
	case record.MessageID == "":
		record.Unreadable = "no header message-id"
	case body.Order == nil:
		record.Unreadable = "no order number"
	case body.Customer != record.Key:
		record.Unreadable = fmt.Sprintf("its key is %q, its customer is %q", record.Key, body.Customer)
	default:
		record.ID, record.Version, record.Amount = *body.Order, body.Version, body.Amount
	}
	return record
}
