package inspect

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/dedup"
)

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

// Place is where Kafka has a record.
type Place struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
}

func (p Place) String() string { return fmt.Sprintf("%s/%d/%d", p.Topic, p.Partition, p.Offset) }

// parsePlace reads topic/partition/offset.
func parsePlace(text string) (p Place, ok bool) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 || parts[0] == "" {
		return p, false
	}
	partition, err := strconv.ParseInt(parts[1], 10, 32)
	offset, offsetErr := strconv.ParseInt(parts[2], 10, 64)
	if err = errors.Join(err, offsetErr); err != nil || partition < 0 || offset < 0 {
		return p, false
	}
	return Place{parts[0], int32(partition), offset}, true
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
		if id, err := uuid.Parse(text); err == nil {
			all = append(all, id)
		} else if id := dedup.MessageID("", []byte(text)); id[0]&0x80 == 0 {
			all = append(all, id) // a ULID
		}
	}
	return all
}

// time returns the time that an ID carries. A random ID has none. A time in the future, or from
// long before such IDs existed, has another meaning.
func (n *names) time(now time.Time) (time.Time, bool) {
	for id := range n.ids {
		random := id.Version() == 4 && id.Variant() == uuid.RFC4122
		at, ok := dedup.Time(id)
		if ok && !random && at.Before(now.Add(24*time.Hour)) && at.After(firstID()) {
			return at, true
		}
	}
	return time.Time{}, false
}

// firstID is a time before the first ULID.
func firstID() time.Time { return time.Date(2016, 1, 1, 0, 0, 0, 0, time.UTC) }

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
