package verify

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup"
)

// claimsPage is how many IDs one statement looks for.
const claimsPage = 2000

// windowSlack allows for a claim at the very end of its window, which may just have been forgotten.
const windowSlack = time.Hour

type position struct {
	topic     string
	partition int32
}

// claims has the group's positions when the run began, and the claims that are still to be looked
// up.
type claims struct {
	next      map[position]int64
	consumers map[string][]int32
	rules     map[string]map[string]dedup.IDRule // by topic and rule
	aliases   map[string]string                  // what a topic is called in IDs
	windows   map[string]time.Duration           // the longest; 0: forever
	waiting   map[string]*pending                // by topic
}

type pending struct {
	ids     []uuid.UUID
	records []int // for each ID the index in places: a record has an ID by each rule
	places  []inspect.Place
}

func readClaims(ctx context.Context, db operator.Querier, schema, group string) (*claims, error) {
	c := &claims{next: map[position]int64{}, consumers: map[string][]int32{}, rules: map[string]map[string]dedup.IDRule{}, aliases: map[string]string{}, windows: map[string]time.Duration{}, waiting: map[string]*pending{}}
	var p position
	var next int64
	err := operator.Each(ctx, db, fmt.Sprintf("read the positions of group %q", group), schema, positionsSQL, []any{group}, []any{&p.topic, &p.partition, &next}, func() error {
		c.next[p] = next
		return nil
	})
	if err != nil {
		return nil, err
	}
	var id int32
	var topic, text, alias string
	var window *float64
	err = operator.Each(ctx, db, fmt.Sprintf("read the consumers of group %q", group), schema, consumersSQL, []any{group}, []any{&id, &topic, &text, &window, &alias}, func() error {
		c.aliases[topic] = alias
		known := len(c.consumers[topic]) > 0
		c.consumers[topic] = append(c.consumers[topic], id)
		rule, err := dedup.ParseIDRule(text)
		if err != nil {
			return err
		}
		if !known {
			c.rules[topic] = map[string]dedup.IDRule{}
		}
		c.rules[topic][text] = rule
		switch {
		case window == nil:
			c.windows[topic] = 0
		case !known || c.windows[topic] > 0:
			c.windows[topic] = max(c.windows[topic], time.Duration(*window*float64(time.Second)))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(c.consumers) == 0 {
		return nil, fmt.Errorf("group %q: no consumer of this group ever claimed: check the name in --group", group)
	}
	return c, nil
}

// claim queues the lookup of the claim of a record before the group's position: claims are looked
// up in batches.
func (r *run) claim(ctx context.Context, record *kgo.Record) error {
	next, known := r.claims.next[position{record.Topic, record.Partition}]
	if !known || record.Offset >= next || len(r.claims.consumers[record.Topic]) == 0 {
		return nil
	}
	var ids []uuid.UUID
	for _, rule := range r.claims.rules[record.Topic] {
		if text, scope := inspect.Carried(record, rule); text != "" {
			ids = append(ids, dedup.MessageID(scope, []byte(text)))
			if alias, isTopic := r.claims.aliases[scope]; isTopic && alias != scope {
				ids = append(ids, dedup.MessageID(alias, []byte(text)))
			}
		}
	}
	if len(ids) == 0 {
		return nil
	}
	if window := r.claims.windows[record.Topic]; window > 0 {
		oldest := r.now.Add(windowSlack - window)
		forgotten := func(id uuid.UUID) bool { at, timed := dedup.Time(id); return timed && at.Before(oldest) }
		if record.Timestamp.Before(oldest) || slices.ContainsFunc(ids, forgotten) {
			return nil
		}
	}
	waiting := r.claims.waiting[record.Topic]
	if waiting == nil {
		waiting = &pending{}
		r.claims.waiting[record.Topic] = waiting
	}
	for _, id := range ids {
		waiting.ids, waiting.records = append(waiting.ids, id), append(waiting.records, len(waiting.places))
	}
	waiting.places = append(waiting.places, inspect.Place{Topic: record.Topic, Partition: record.Partition, Offset: record.Offset})
	if len(waiting.ids) < claimsPage {
		return nil
	}
	return r.lookForClaims(ctx, record.Topic)
}

func (r *run) flushClaims(ctx context.Context) error {
	if r.claims == nil {
		return nil
	}
	for topic := range r.claims.waiting {
		if err := r.lookForClaims(ctx, topic); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) lookForClaims(ctx context.Context, topic string) error {
	waiting := r.claims.waiting[topic]
	unclaimed, err := operator.Rows(ctx, r.db, "look for claims", r.Schema, unclaimedSQL, pgx.RowTo[int], r.claims.consumers[topic], waiting.ids, waiting.records)
	if err != nil {
		return err
	}
	for _, record := range unclaimed {
		id := waiting.ids[slices.Index(waiting.records, record)]
		r.found(&r.report.Unclaimed, "message %s at %s is before the position of group %s, but not claimed", id, waiting.places[record], r.Group)
	}
	r.report.Claimed += int64(len(waiting.places))
	*waiting = pending{waiting.ids[:0], waiting.records[:0], waiting.places[:0]}
	return nil
}
