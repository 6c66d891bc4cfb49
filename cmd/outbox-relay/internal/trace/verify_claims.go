package trace

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
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

// claims has the group's positions when the run began, and what its consumers claim of each topic that they read.
type claims struct {
	next   map[position]int64
	topics map[string]*topicClaims
}

// topicClaims also has the claims of a topic that are still to be looked up.
type topicClaims struct {
	consumers []int32
	rules     map[string]dedup.IDRule // by their texts
	alias     string                  // what the topic is called in IDs
	window    time.Duration           // the longest; 0: forever

	ids     []uuid.UUID
	records []int // for each ID the index in places: a record has an ID by each rule
	places  []topicscan.Place
}

func readClaims(ctx context.Context, db operator.Querier, schema, group string) (*claims, error) {
	c := &claims{next: map[position]int64{}, topics: map[string]*topicClaims{}}
	var p position
	var next int64
	err := operator.Each(ctx, db, fmt.Sprintf("read the positions of group %q", group), schema, groupPositionsSQL, []any{group}, []any{&p.topic, &p.partition, &next}, func() error {
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
		rule, err := dedup.ParseIDRule(text)
		if err != nil {
			return err
		}
		t, known := c.topics[topic]
		if !known {
			t = &topicClaims{rules: map[string]dedup.IDRule{}}
			c.topics[topic] = t
		}
		t.alias, t.consumers, t.rules[text] = alias, append(t.consumers, id), rule
		switch {
		case window == nil:
			t.window = 0
		case !known || t.window > 0:
			t.window = max(t.window, time.Duration(*window*float64(time.Second)))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(c.topics) == 0 {
		return nil, fmt.Errorf("group %q: no consumer of this group ever claimed: check the name in --group", group)
	}
	return c, nil
}

// claim queues the lookup of the claim of a record before the group's position: claims are looked
// up in batches.
func (r *run) claim(ctx context.Context, record *kgo.Record) error {
	next, known := r.claims.next[position{record.Topic, record.Partition}]
	t := r.claims.topics[record.Topic]
	if !known || record.Offset >= next || t == nil {
		return nil
	}
	var ids []uuid.UUID
	for _, rule := range t.rules {
		if text, scope := Carried(record, rule); text != "" {
			ids = append(ids, dedup.MessageID(scope, []byte(text)))
			if named := r.claims.topics[scope]; named != nil && named.alias != scope {
				ids = append(ids, dedup.MessageID(named.alias, []byte(text)))
			}
		}
	}
	if len(ids) == 0 {
		return nil
	}
	if t.window > 0 {
		oldest := r.now.Add(windowSlack - t.window)
		forgotten := func(id uuid.UUID) bool { at, timed := dedup.Time(id); return timed && at.Before(oldest) }
		if record.Timestamp.Before(oldest) || slices.ContainsFunc(ids, forgotten) {
			return nil
		}
	}
	for _, id := range ids {
		t.ids, t.records = append(t.ids, id), append(t.records, len(t.places))
	}
	t.places = append(t.places, topicscan.PlaceOf(record))
	if len(t.ids) < claimsPage {
		return nil
	}
	return r.lookForClaims(ctx, t)
}

func (r *run) flushClaims(ctx context.Context) error {
	if r.claims == nil {
		return nil
	}
	for _, t := range r.claims.topics {
		if err := r.lookForClaims(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) lookForClaims(ctx context.Context, t *topicClaims) error {
	unclaimed, err := operator.Rows(ctx, r.db, "look for claims", r.Schema, unclaimedSQL, pgx.RowTo[int], t.consumers, t.ids, t.records)
	if err != nil {
		return err
	}
	for _, record := range unclaimed {
		id := t.ids[slices.Index(t.records, record)]
		r.found(&r.report.Unclaimed, "message %s at %s is before the position of group %s, but not claimed", id, t.places[record], r.Group)
	}
	r.report.Claimed += int64(len(t.places))
	t.ids, t.records, t.places = t.ids[:0], t.records[:0], t.places[:0]
	return nil
}
