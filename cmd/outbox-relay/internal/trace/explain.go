package trace

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// Explanation is everything that is known about a message.
type Explanation struct {
	Asked string      `json:"asked"`
	Known bool        `json:"known"`
	IDs   []uuid.UUID `json:"ids"` // under which consumers may claim it
	// Requests are those whose idempotency key was asked for, and those that published the message.
	Requests []keys.Row `json:"requests"`
	Outbox   []Row      `json:"outbox"`
	Dead     []held.Row `json:"dead"`
	// Scheduled are scheduled messages. The relay moves them to the outbox, under the same ID, when
	// they are due.
	Scheduled []Scheduled `json:"scheduled"`
	Records   []Record    `json:"records"` // in topics
	Searched  *Search     `json:"searched"`
	At        *At         `json:"at"` // null: no place was asked for, or Kafka was not asked
	Claims    []Claim     `json:"claims"`
	// Passed are consumers whose position is past a record, and that have no claim of it. They
	// handled it, or parked it and an operator decided, and forgot the claim when its window was
	// over. Consumers that deduplicate by position keep no claims.
	Passed   []Passed          `json:"passed"`
	Parked   []held.Row        `json:"parked"`
	Children []Row             `json:"children"` // what its handlers published into this outbox
	Actions  []operator.Action `json:"actions"`
	// KafkaError is why topics could not be searched, or not to their end. Empty: they were
	// searched, or there are no brokers to ask.
	KafkaError string `json:"kafka_error"`
	// Problems are sections that could not be read, because a table is locked, or the role lacks a right.
	Problems []string `json:"problems"`
}

// Row is a row of the outbox.
type Row struct {
	Seq          int64     `json:"seq"`
	ID           uuid.UUID `json:"id"`
	Topic        string    `json:"topic"`
	Key          human.Key `json:"key"` // text, or base64: and bytes; null: none
	Shard        int16     `json:"shard"`
	CreatedAt    time.Time `json:"created_at"`
	PayloadBytes *int64    `json:"payload_bytes"` // null: a tombstone
	// States has its state by relay: published, waiting or dead.
	States map[string]string `db:"-" json:"states"`
}

// States of a row.
const (
	StatePublished = "published"
	StateWaiting   = "waiting"
	StateDead      = "dead"
)

// Scheduled is a row of outbox_scheduled.
type Scheduled struct {
	ID           uuid.UUID `json:"id"`
	Topic        string    `json:"topic"`
	Key          human.Key `json:"key"`
	DueAt        time.Time `json:"due_at"`
	CreatedAt    time.Time `json:"created_at"`
	PayloadBytes *int64    `json:"payload_bytes"`
	// OverdueSeconds is the time since it was due; 0: it is not due yet.
	OverdueSeconds float64 `json:"overdue_seconds"`
	Refused        *string `json:"refused"` // why the outbox did not take it
}

// Record is the message in a topic.
type Record struct {
	topicscan.Place
	Time         time.Time `json:"time"`
	Key          human.Key `json:"key"`
	PayloadBytes *int64    `json:"payload_bytes"`
	MessageID    string    `json:"message_id"` // as the record carries it
}

// Search is what was read from topics.
type Search struct {
	Topics   []string  `json:"topics"`
	Since    time.Time `json:"since"`
	Records  int       `json:"records"`
	Complete bool      `json:"complete"` // read up to the end of the topics
	Missing  []string  `json:"-"`        // those of Topics that do not exist
}

// Claim is a row of processed_messages or processed_forever.
type Claim struct {
	ID          uuid.UUID `json:"id"`
	Consumer    string    `json:"consumer"`
	Group       string    `json:"group"`
	ProcessedAt time.Time `json:"processed_at"`
	Forever     bool      `json:"forever"`
}

// Passed is a consumer that is past a record without a claim.
type Passed struct {
	topicscan.Place

	Consumer string `json:"consumer"`
	Group    string `json:"group"`
	Position int64  `json:"position"` // offset of the next message
	// WindowSeconds is how long claims are kept; null: forever.
	WindowSeconds *float64 `json:"window_seconds"`
}

// Explain finds a message by its ID or its place. Without kafka (nil) topics are not searched. A
// Kafka error is part of the explanation: what the database knows is shown even if no broker
// answers, and so is each section of the database that cannot be read.
func Explain(ctx context.Context, db operator.DB, kafka *Kafka, q Question) (*Explanation, error) {
	e := &explainer{
		Question: q, db: limited{db}, kafka: kafka, aliases: map[string][]string{}, read: map[uuid.UUID]bool{}, names: newNames(q.Text),
		out: &Explanation{ // the others are assigned, and none is null
			Asked: q.Text, Requests: []keys.Row{}, Outbox: []Row{}, Dead: []held.Row{}, Scheduled: []Scheduled{}, Records: []Record{}, Passed: []Passed{},
			Parked: []held.Row{}, Children: []Row{}, Problems: []string{},
		},
	}
	for _, step := range []func(context.Context) error{
		e.lookAtPlace, e.readRequests, e.readRows, e.searchTopics, e.readRows,
		func(ctx context.Context) error { return e.states(ctx, e.out.Outbox) },
		e.readClaims, e.readParked, e.readPassed, e.readChildren, e.readActions, e.readRequestActions,
	} {
		err := step(ctx)
		switch {
		case pgerr.State(err) != "" && !pgerr.OfServer(err):
			e.out.Problems = append(e.out.Problems, err.Error())
		case err != nil:
			return nil, err
		}
	}
	x := e.out
	x.IDs = e.names.sorted()
	x.Known = len(x.Requests)+len(x.Outbox)+len(x.Dead)+len(x.Scheduled)+len(x.Records)+len(x.Claims)+len(x.Parked)+len(x.Actions)+len(x.Passed) > 0
	return x, nil
}

type explainer struct {
	Question
	db      operator.Querier
	kafka   *Kafka
	names   *names
	place   *topicscan.Place // asked for
	read    map[uuid.UUID]bool
	scopes  []string            // topics of consumers
	aliases map[string][]string // what consumers call a topic in IDs
	rules   []dedup.IDRule
	out     *Explanation
}

// lookAtPlace finds the ID of the record at the place that was asked for.
func (e *explainer) lookAtPlace(ctx context.Context) (err error) {
	if err = e.readRules(ctx); err != nil {
		return err
	}
	place, is := topicscan.ParsePlace(e.Text)
	if !is {
		for _, topic := range slices.Concat(e.scopes, e.Topics) {
			e.addScope(topic)
		}
		return nil
	}
	e.place = &place
	e.names = newNames("")
	clear(e.names.texts)
	var record *kgo.Record
	var topicID uuid.UUID
	err = e.askKafka(ctx, func(ctx context.Context) (err error) {
		if e.out.At, record, err = e.kafka.at(ctx, place); err != nil || record == nil {
			return err
		}
		topicID, err = e.kafka.topicID(ctx, place.Topic)
		return err
	})
	if err != nil || record == nil {
		return err
	}
	if len(e.addRecord(record)) == 0 {
		e.names.ids[coordinatesID(place, topicID)] = true
	}
	return nil
}

// askKafka calls ask with at most half of the time that remains, because the database has to be
// asked too. After a failure it does not ask Kafka again.
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

// addScope also adds what consumers call a topic.
func (e *explainer) addScope(scope string) {
	for _, name := range append(e.aliases[scope], scope) {
		e.names.addScope(name)
	}
}

// readRows reads rows of the outbox by the IDs that were not read yet.
func (e *explainer) readRows(ctx context.Context) error {
	var fresh []uuid.UUID
	for _, id := range e.names.rowIDs() {
		if !e.read[id] {
			fresh, e.read[id] = append(fresh, id), true
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	rows, err := e.rows(ctx, fresh, 0)
	e.out.Outbox = append(e.out.Outbox, rows...)
	dead, deadErr := held.Dead.List(ctx, e.db, e.Schema, held.Filter{IDs: fresh, Behind: true}, rowsMax)
	e.out.Dead = append(e.out.Dead, dead...)
	scheduled, scheduledErr := query(ctx, e, "messages for later", scheduledSQL, pgx.RowToStructByPos[Scheduled], fresh)
	e.out.Scheduled = append(e.out.Scheduled, scheduled...)
	for _, row := range rows {
		e.addScope(row.Topic)
		e.names.addText(row.ID.String())
	}
	for _, row := range dead {
		e.addScope(row.Topic)
		e.names.addText(row.ID.String())
	}
	for _, row := range scheduled {
		e.addScope(row.Topic)
	}
	return errors.Join(err, deadErr, scheduledErr)
}

// sorted returns the IDs in a fixed order.
func (n *names) sorted() []uuid.UUID {
	return append([]uuid.UUID{}, slices.SortedFunc(maps.Keys(n.ids), func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })...)
}

// limited waits for a lock of another session for a second only, in each query: a locked table does not hide
// what the others have.
type limited struct{ operator.DB }

// Query implements operator.Querier. In the transaction the limit holds while the driver describes the
// statement, too.
func (l limited) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	tx, err := l.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, err
	}
	end := func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }
	var rows pgx.Rows
	if _, err = tx.Exec(ctx, lockLimitSQL); err == nil {
		rows, err = tx.Query(ctx, sql, args...)
	}
	if err != nil {
		end()
		return nil, err
	}
	return limitedRows{rows, end}, nil
}

type limitedRows struct {
	pgx.Rows
	end func()
}

func (r limitedRows) Close() {
	r.Rows.Close()
	r.end()
}

// Question is the question that Explain answers.
type Question struct {
	Schema string
	// Text is the message's ID as it carries it, its ID as logs show it, or topic/partition/offset.
	Text string
	// Topics to search instead of those that the outbox row or the consumers name.
	Topics []string
	// Since is how far back topics are searched if neither the row nor the ID has a time.
	Since time.Duration
	// ScanMax bounds how many records are read.
	ScanMax int
}

// names are what identifies a message: the texts that it may carry, and the IDs under which it may
// be claimed. An ID is derived from a text and its scope, so one text may have several IDs.
type names struct {
	texts  map[string]bool
	ids    map[uuid.UUID]bool
	scopes map[string]bool
}

func newNames(text string) *names {
	n := &names{texts: map[string]bool{}, ids: map[uuid.UUID]bool{}, scopes: map[string]bool{}}
	if id, err := uuid.Parse(text); err == nil {
		n.ids[id] = true // as logs show it
	}
	n.addText(text)
	return n
}

func (n *names) addText(text string) {
	n.texts[text] = true
	if id := dedup.MessageID("", []byte(text)); id[0]&0x80 == 0 {
		n.ids[id] = true // it does not depend on the scope
	}
	for scope := range n.scopes {
		n.ids[dedup.MessageID(scope, []byte(text))] = true
	}
}

func (n *names) addScope(scope string) {
	if n.scopes[scope] {
		return
	}
	n.scopes[scope] = true
	for text := range n.texts {
		n.ids[dedup.MessageID(scope, []byte(text))] = true
	}
}

// rowIDs are the IDs that a row of the outbox may have.
func (n *names) rowIDs() (all []uuid.UUID) {
	for text := range n.texts {
		if id := held.IDOf(text); id != nil {
			all = append(all, *id)
		}
	}
	return all
}

// time returns the time that an ID carries. A random ID has none. A time in the future, or from
// long before such IDs existed, has another meaning.
func (n *names) time(now time.Time) (time.Time, bool) {
	firstULID := time.Date(2016, 1, 1, 0, 0, 0, 0, time.UTC)
	for id := range n.ids {
		random := id.Version() == 4 && id.Variant() == uuid.RFC4122
		at, ok := dedup.Time(id)
		if ok && !random && at.Before(now.Add(24*time.Hour)) && at.After(firstULID) {
			return at, true
		}
	}
	return time.Time{}, false
}

// Carried finds the ID that a record carries, and its scope, as a consumer with the rule does.
func Carried(record *kgo.Record, rule dedup.IDRule) (text, scope string) {
	id, err := dedup.ReadID(rule, record.Headers, func(h kgo.RecordHeader) (string, []byte) { return h.Key, h.Value })
	if err != nil { // it is parked, under its coordinates
		id = nil
	}
	source := slices.IndexFunc(record.Headers, func(h kgo.RecordHeader) bool { return h.Key == "ce_source" })
	if source >= 0 && len(record.Headers[source].Value) > 0 {
		return string(id), string(record.Headers[source].Value)
	}
	return string(id), record.Topic
}

// carried finds the IDs that a record carries by the rules of the consumers.
func (e *explainer) carried(record *kgo.Record) (texts []string, scope string) {
	for _, rule := range e.rules {
		var text string
		if text, scope = Carried(record, rule); text != "" && !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return texts, scope
}

// match reports whether a record is the message.
func (e *explainer) match(record *kgo.Record) bool {
	texts, scope := e.carried(record)
	return slices.ContainsFunc(texts, func(text string) bool {
		return e.names.texts[text] || e.names.ids[dedup.MessageID(scope, []byte(text))]
	})
}
