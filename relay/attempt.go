package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/outbox"
)

// attempt is one try to publish some rows: a page of the outbox, or a page of released dead rows. A
// row that cannot be published moves from rows to dead when that is found, together with the later
// rows of its key.
type attempt struct {
	rows    []*row        // to be published, in order
	records []*kgo.Record // as many as rows
	dead    []deadRow
	bytes   int

	// Progress before the attempt, and the furthest place that it may move to after it. Zero for
	// dead rows, which progress has passed.
	from, end cursor
	released  bool   // the rows are from outbox_dead
	dropped   []*row // rows that Config.Topic does not publish

	// behind are the keys that a dead row holds, with the seq of their first such row in the page, or
	// ofEarlierPage.
	behind map[topicKey]int64
	skip   bool // Config.SkipDead
}

// target is what takes rows: Kafka, Kafka with transactions, or a Sink.
type target interface {
	// publish hands over the rows of an attempt in order. It makes sure that progress moves behind
	// them once they are acknowledged, and never past a dead row before that row is in outbox_dead.
	// ctx ends when the relay must stop; work ends only when the work on the shard has failed.
	publish(work, ctx context.Context, a *attempt) error
	// afterPage is called after every read, including empty ones; it commits a transaction that is old
	// enough. It returns when it must be called again at the latest.
	afterPage(work, ctx context.Context, full bool) (time.Duration, error)
	// store is called every ProgressEvery, from a goroutine of its own. It writes progress to the
	// database.
	store(ctx context.Context) error
	// finish waits for what was handed over, at the end of the work. ctx bounds it.
	finish(work, ctx context.Context) error
}

// deadRow is a row that cannot be published, and why.
type deadRow struct {
	row      *row
	reason   Reason
	err      string
	waitsFor string // the topic in Kafka; empty: something else
}

const ofEarlierPage = math.MinInt64

type topicKey struct{ topic, key string }

func keyOf(r *row) topicKey { return topicKey{r.topic, string(r.key)} }

var errPaused = errors.New("the topic is paused: its rows are published when it is resumed")

var errBehind = errors.New("an earlier row of this key is dead")

// give moves a row to dead and marks the rest of its key as held. A row without a key has no order
// to keep.
func (a *attempt) give(r *row, reason Reason, err error) {
	a.dead = append(a.dead, deadRow{row: r, reason: reason, err: bounds.ErrorText(err)})
	if r.key == nil || a.skip && reason.ofRow() {
		return
	}
	if first, ok := a.behind[keyOf(r)]; !ok || r.seq < first {
		a.behind[keyOf(r)] = r.seq
	}
}

// held reports whether a dead row of the same key, before this one, holds a row. A later row of the
// page may have become dead first: the row itself was wrong, and this one waits for Kafka's answer.
func (a *attempt) held(r *row) bool {
	if r.key == nil || len(a.behind) == 0 {
		return false
	}
	first, ok := a.behind[keyOf(r)]
	return ok && first < r.seq
}

// withoutHeld moves rows behind a dead one to dead, and returns the others.
func (a *attempt) withoutHeld(rows []*row, records []*kgo.Record) ([]*row, []*kgo.Record) {
	keptRows, keptRecords := rows[:0:0], records[:0:0]
	for i, r := range rows {
		if a.held(r) {
			a.give(r, ReasonBehind, errBehind)
			continue
		}
		keptRows, keptRecords = append(keptRows, r), append(keptRecords, records[i])
	}
	return keptRows, keptRecords
}

// upTo returns where progress may be after a row of the attempt: nowhere for dead rows.
func (a *attempt) upTo(r *row) cursor {
	if a.released {
		return cursor{}
	}
	return cursor{from: a.from.from, to: cmp.Or(a.end.to, a.end.from), seq: r.seq, floor: a.from.floor}
}

// try makes an attempt of a page of the outbox that was read at one cursor and ends at another.
func (p *publisher) try(ctx context.Context, page *page, from, end cursor) (*attempt, error) {
	rows, err := p.dead.notOwned(ctx, page.rows)
	if err != nil {
		return nil, err
	}
	behind, err := p.dead.behind(ctx, rows)
	if err != nil {
		return nil, err
	}
	a := &attempt{from: from, end: end, bytes: page.bytes, behind: behind, skip: p.cfg.SkipDead}
	return a, p.separate(ctx, a, rows)
}

// tryReleased makes an attempt of released dead rows. A row that is still held back stays where it
// is.
func (p *publisher) tryReleased(ctx context.Context, page *page) (*attempt, error) {
	a := &attempt{bytes: page.bytes, behind: map[topicKey]int64{}, skip: p.cfg.SkipDead, released: true}
	return a, p.separate(ctx, a, page.rows)
}

// separate separates rows that can be produced from those that cannot.
func (p *publisher) separate(ctx context.Context, a *attempt, rows []row) error {
	to, err := p.destinations(ctx, rows)
	if err != nil {
		return err
	}
	if err := p.learnTopics(ctx, to); err != nil {
		return err
	}
	a.rows, a.records = make([]*row, 0, len(rows)), make([]*kgo.Record, 0, len(rows))
	maker := record.NewMaker(len(rows))
	var changed error
	for i := range rows {
		r := &rows[i]
		if a.held(r) {
			a.give(r, ReasonBehind, errBehind)
			continue
		}
		made, reason, err := p.record(ctx, maker, r, to[i])
		if err != nil && reason == "" { // the other rows may be larger still
			changed = err
			continue
		}
		if err != nil {
			if a.give(r, reason, err); reason == ReasonUnknownTopic || reason == ReasonNotAuthorized {
				a.dead[len(a.dead)-1].waitsFor = to[i].topic
			}
			continue
		}
		if made == nil {
			a.dropped = append(a.dropped, r)
			continue
		}
		a.rows, a.records = append(a.rows, r), append(a.records, made)
	}
	return changed
}

// record builds the record of a row, or returns why Kafka would refuse it. It returns neither if the
// row is not published.
func (p *publisher) record(ctx context.Context, maker *record.Maker, r *row, to destination) (*kgo.Record, Reason, error) {
	headers, err := outbox.DecodeHeaders(r.headers)
	if err != nil {
		return nil, ReasonBadHeaders, err
	}
	if p.lease.obeys.Load().has(r.topic) {
		return nil, ReasonPaused, errPaused
	}
	if to.none {
		return nil, "", nil
	}
	topic := to.topic
	if p.cfg.Topic != nil && !topicName.MatchString(topic) {
		return nil, ReasonRefused, fmt.Errorf("Config.Topic returned %.260q: Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens: fix Config.Topic and retry the row, or discard it", topic)
	}
	headers, partition, err := record.TakePartition(headers)
	if err != nil {
		return nil, ReasonBadPartition, err
	}
	if p.cfg.Sink == nil {
		bytes := (&outbox.Message{Key: r.key, Payload: r.payload, Headers: headers}).RecordBytes()
		if reason, err := p.topics.judge(topic, bytes); err != nil {
			return nil, reason, err
		}
		if !p.topics.fits(topic, bytes) {
			return nil, "", errLimitsChanged
		}
	}
	if partition != nil {
		if err := p.offers(ctx, topic, *partition); err != nil {
			return nil, ReasonBadPartition, err
		}
	}
	made := record.Make(maker, record.Row{ID: r.id, Topic: topic, Key: r.key, Payload: r.payload, CreatedAt: r.created}, headers)
	if partition != nil {
		record.SetPartition(made, *partition)
	}
	return made, "", nil
}

func (p *publisher) learnTopics(ctx context.Context, to []destination) error {
	if p.cfg.Sink != nil {
		return nil
	}
	var names []string
	asked := map[string]bool{}
	for i := range to {
		name := to[i].topic
		if asked[name] || to[i].none || p.cfg.Topic != nil && !topicName.MatchString(name) {
			continue
		}
		asked[name] = true
		if _, fresh := p.topics.get(name); !fresh {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return p.learn(ctx, names)
}

// errTopicPanicked ends Run: the row must be neither lost nor passed.
var errTopicPanicked = errors.New("Config.Topic panicked")

// destination is where a row goes.
type destination struct {
	topic string // in Kafka
	none  bool   // Config.Topic does not publish the row
}

// destinations returns where rows go.
func (p *publisher) destinations(ctx context.Context, rows []row) ([]destination, error) {
	all := make([]destination, len(rows))
	for i := range rows {
		switch r := &rows[i]; {
		case p.cfg.Topic != nil:
			var err error
			if all[i], err = p.chosen(ctx, r); err != nil {
				return nil, err
			}
		case i > 0 && rows[i-1].topic == r.topic:
			all[i] = all[i-1]
		default:
			all[i].topic = p.cfg.TopicPrefix + r.topic
		}
	}
	return all, nil
}

// chosen asks Config.Topic where a row goes.
func (p *publisher) chosen(ctx context.Context, r *row) (to destination, err error) {
	headers, err := outbox.DecodeHeaders(r.headers)
	if err != nil {
		return destination{topic: p.cfg.TopicPrefix + r.topic}, nil // the row is dead for its headers
	}
	defer func() {
		if cause := recover(); cause != nil {
			p.cfg.Logger.ErrorContext(ctx, "Config.Topic panicked", "relay", p.cfg.Name, "seq", r.seq, "id", r.id, "panic", cause, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w on the row with seq %d, id %s, topic %q: %v", errTopicPanicked, r.seq, r.id, r.topic, cause)
		}
	}()
	topic, ok := p.cfg.Topic(Message{ID: r.id, Topic: r.topic, Key: r.key, Payload: r.payload, Headers: headers})
	return destination{p.cfg.TopicPrefix + topic, !ok}, nil
}
