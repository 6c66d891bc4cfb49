package inspect

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/keys"
	"github.com/effectonce/effectonce/internal/parked"
)

// Explanation is everything that is known of a message.
type Explanation struct {
	Asked string      `json:"asked"`
	Known bool        `json:"known"`
	IDs   []uuid.UUID `json:"ids"` // under which consumers may claim it
	// Requests are those whose idempotency key was asked for, or which published the message.
	Requests []keys.Row `json:"requests"`
	Outbox   []Row      `json:"outbox"`
	Dead     []Dead     `json:"dead"`
	// Scheduled are messages for later; the relay moves them to the outbox, under the same ID, when they are due.
	Scheduled []Scheduled      `json:"scheduled"`
	Records   []Record         `json:"records"` // in topics
	Searched  *Search          `json:"searched"`
	Claims    []Claim          `json:"claims"`
	Attempts  []Attempt        `json:"attempts"`
	Parked    []parked.Message `json:"parked"`
	Children  []Row            `json:"children"` // what its handlers published into this outbox
	Actions   []parked.Action  `json:"actions"`
	// KafkaError says why topics could not be searched, or not to their end. Empty: they were, or there are no brokers
	// to ask.
	KafkaError string `json:"kafka_error"`
}

// Row is a row of the outbox.
type Row struct {
	Seq          int64      `json:"seq"`
	ID           uuid.UUID  `json:"id"`
	Topic        string     `json:"topic"`
	Key          parked.Key `json:"key"` // text, or base64: and bytes; null: none
	Shard        int16      `json:"shard"`
	CreatedAt    time.Time  `json:"created_at"`
	PayloadBytes *int64     `json:"payload_bytes"` // null: a tombstone
	// States of it, by relay: published, waiting or dead.
	States map[string]string `json:"states"`
}

// States of a row.
const (
	StatePublished = "published"
	StateWaiting   = "waiting"
	StateDead      = "dead"
)

// Dead is a row of outbox_dead.
type Dead struct {
	Relay    string     `json:"relay"`
	Seq      int64      `json:"seq"`
	ID       uuid.UUID  `json:"id"`
	Topic    string     `json:"topic"`
	Key      parked.Key `json:"key"`
	Reason   string     `json:"reason"`
	Error    string     `json:"error"`
	Attempts int32      `json:"attempts"`
	State    string     `json:"state"`
	DiedAt   time.Time  `json:"died_at"`
}

// Scheduled is a row of outbox_scheduled.
type Scheduled struct {
	ID           uuid.UUID  `json:"id"`
	Topic        string     `json:"topic"`
	Key          parked.Key `json:"key"`
	DueAt        time.Time  `json:"due_at"`
	CreatedAt    time.Time  `json:"created_at"`
	PayloadBytes *int64     `json:"payload_bytes"`
	// OverdueSeconds is since it was due; 0: it is not yet.
	OverdueSeconds float64 `json:"overdue_seconds"`
}

// Record is the message in a topic.
type Record struct {
	Place
	Time         time.Time  `json:"time"`
	Key          parked.Key `json:"key"`
	PayloadBytes *int64     `json:"payload_bytes"`
	MessageID    string     `json:"message_id"` // as it carries it
}

// Search is what was read of topics.
type Search struct {
	Topics   []string  `json:"topics"`
	Since    time.Time `json:"since"`
	Records  int       `json:"records"`
	Complete bool      `json:"complete"` // up to the end of the topics
}

// Claim is a row of processed_messages or processed_forever.
type Claim struct {
	ID          uuid.UUID `json:"id"`
	Consumer    string    `json:"consumer"`
	Group       string    `json:"group"`
	ProcessedAt time.Time `json:"processed_at"`
	Forever     bool      `json:"forever"`
}

// Attempt is a row of message_attempts: handlers failed at it, and it is neither done nor parked.
type Attempt struct {
	ID        uuid.UUID `json:"id"`
	Consumer  string    `json:"consumer"`
	Attempts  int32     `json:"attempts"`
	Error     string    `json:"error"`
	UpdatedAt time.Time `json:"updated_at"`
}

// Explain finds a message by its ID or its place. Without kafka (nil) topics are not searched. An error of Kafka's is part of
// the explanation: what the database knows is shown while brokers are away.
func Explain(ctx context.Context, db Querier, kafka *Kafka, q Question) (*Explanation, error) {
	e := &explainer{Question: q, db: db, kafka: kafka, names: newNames(q.Text), out: &Explanation{Asked: q.Text, Searched: nil}}
	for _, step := range []func(context.Context) error{
		e.lookAtPlace, e.readRequests, e.readRows, e.searchTopics, e.readRows, e.readStates, e.readConsumers, e.readChildren, e.readActions, e.readRequestActions,
	} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return e.result(), nil
}

type explainer struct {
	Question
	db     Querier
	kafka  *Kafka
	names  *names
	place  *Place // asked for
	read   map[uuid.UUID]bool
	scopes []string // topics of consumers
	out    *Explanation
}

// lookAtPlace turns a place into the ID that its record carries.
func (e *explainer) lookAtPlace(ctx context.Context) (err error) {
	if e.scopes, err = e.consumerTopics(ctx); err != nil {
		return err
	}
	place, is := parsePlace(e.Text)
	if !is {
		for _, topic := range slices.Concat(e.scopes, e.Topics) {
			e.names.addScope(topic)
		}
		return nil
	}
	e.place = &place
	e.names = newNames("")
	clear(e.names.texts)
	var record *kgo.Record
	var topicID uuid.UUID
	err = e.askKafka(ctx, func(ctx context.Context) (err error) {
		record, topicID, err = e.kafka.at(ctx, place)
		return err
	})
	if err != nil || record == nil {
		return err
	}
	e.out.Records = append(e.out.Records, newRecord(record))
	text, scope := Carried(record)
	e.names.addScope(scope)
	if text == "" {
		e.names.ids[coordinatesID(place, topicID)] = true
		return nil
	}
	e.names.addText(text)
	return nil
}

// askKafka asks, and takes no more than half of the time that is left, since the database is to be asked too. Once Kafka
// failed it is not asked again.
func (e *explainer) askKafka(ctx context.Context, ask func(context.Context) error) error {
	if e.kafka == nil || e.out.KafkaError != "" {
		return nil
	}
	limited, cancel := ctx, context.CancelFunc(func() {})
	if deadline, some := ctx.Deadline(); some {
		limited, cancel = context.WithTimeout(ctx, time.Until(deadline)/2)
	}
	defer cancel()
	err := ask(limited)
	if err != nil && ctx.Err() == nil {
		e.out.KafkaError, err = err.Error(), nil
	}
	return err
}

// readRows reads rows of the outbox by IDs that were not asked for yet.
func (e *explainer) readRows(ctx context.Context) error {
	var fresh []uuid.UUID
	for _, id := range e.names.rowIDs() {
		if !e.read[id] {
			fresh = append(fresh, id)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	if e.read == nil {
		e.read = map[uuid.UUID]bool{}
	}
	for _, id := range fresh {
		e.read[id] = true
	}
	rows, err := e.rows(ctx, fresh, 0)
	if err != nil {
		return err
	}
	e.out.Outbox = append(e.out.Outbox, rows...)
	dead, err := e.dead(ctx, fresh)
	if err != nil {
		return err
	}
	e.out.Dead = append(e.out.Dead, dead...)
	scheduled, err := e.scheduled(ctx, fresh)
	if err != nil {
		return err
	}
	e.out.Scheduled = append(e.out.Scheduled, scheduled...)
	for _, row := range rows {
		e.names.addScope(row.Topic)
		e.names.addText(row.ID.String())
	}
	for _, row := range dead {
		e.names.addScope(row.Topic)
		e.names.addText(row.ID.String())
	}
	for _, row := range scheduled {
		e.names.addScope(row.Topic)
	}
	return nil
}

// readStates tells of each row what each relay did with it.
func (e *explainer) readStates(ctx context.Context) error {
	return e.states(ctx, e.out.Outbox)
}

// ids are in a fixed order.
func (n *names) sorted() []uuid.UUID {
	return slices.SortedFunc(maps.Keys(n.ids), func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
}

// result puts in what was learned, with [] for nothing.
func (e *explainer) result() *Explanation {
	x := e.out
	x.IDs = e.names.sorted()
	x.Known = len(x.Requests)+len(x.Outbox)+len(x.Dead)+len(x.Scheduled)+len(x.Records)+len(x.Claims)+len(x.Attempts)+len(x.Parked)+len(x.Actions) > 0
	x.IDs, x.Outbox, x.Dead, x.Scheduled, x.Records = some(x.IDs), some(x.Outbox), some(x.Dead), some(x.Scheduled), some(x.Records)
	x.Claims, x.Attempts, x.Parked = some(x.Claims), some(x.Attempts), some(x.Parked)
	x.Requests = some(x.Requests)
	x.Children, x.Actions = some(x.Children), some(x.Actions)
	return x
}

func some[T any](all []T) []T {
	if all == nil {
		return []T{}
	}
	return all
}

func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}
