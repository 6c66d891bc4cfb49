package consumer

import (
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
)

// storedPosition is a row of consumer_positions before an acquisition.
type storedPosition struct {
	topicID     uuid.UUID // zero: unknown
	next        *int64    // nil: nothing handled yet
	epoch       int64
	handledFrom *int64
	handledTo   *int64 // end of the handled range, if it is beyond next because of a rewind
	rewoundFrom *int64 // where a rewind began, before handledFrom
	handledBy   *int32
	handledRule *string
	resumeAt    *int64 // an operator's order
	released    bool   // by the last holder, in good order
	heldOffset  *int64 // where the last holder began
	stuck       int
	paused      bool      // an operator paused the topic
	server      time.Time // start time of the server that the row was read from
}

// topicLog is what Kafka knows about a partition.
type topicLog struct {
	cluster   string    // empty: the brokers have none
	topicID   uuid.UUID // zero: the brokers have none
	first     int64     // offset of the earliest record
	end       int64     // offset after the last record
	committed *committedOffset
}

// known is everything that decides where a partition begins.
type known struct {
	topicPartition
	row  storedPosition
	log  *topicLog // nil: the records do not come from Kafka
	halt error     // it must not begin, unless an operator orders where

	group    string
	dedup    Dedup
	consumer int32 // ID of the consumer's name
	rule     string
}

// Resume orders that are not offsets.
const (
	resumeAtStart int64 = -2
	resumeAtEnd   int64 = -1
)

// decision is where a partition begins, and what is stored about it.
type decision struct {
	at      int64  // fetching begins here
	next    *int64 // the new stored position; nil: none
	moved   bool   // next is not where handling ended
	handled handledRange
	ordered bool  // an operator's order was carried out, or was void
	halt    error // the partition waits for an operator; nil: it begins
	why     string
}

// handledRange is the offsets that this consumer has handled: from from on up to the position, and
// up to to if that is set. A fresh claim there means that the earlier one was forgotten.
type handledRange struct {
	from int64
	to   *int64
	// rewound is where a rewind began, before from: the range begins there once the position has
	// reached from.
	rewound *int64
}

func (r handledRange) contains(offset int64, position *int64) bool {
	if r.to != nil && r.from <= offset && offset < *r.to {
		return true
	}
	return position != nil && r.from <= offset && offset < *position
}

// decideStart decides where a partition begins. docs/design.md has it as a table. It resumes at the
// smaller of the stored position and Kafka's offset. Kafka's offset is ahead if a failover of the
// database lost the last commits. If it is behind, another program moved it, which counts as an
// operator's order. The consumer's own commits may lag, and count only if no position is stored.
func decideStart(k known) decision {
	var d decision
	switch stored := k.stored(); {
	case k.log == nil:
		d = decision{next: k.stored(), why: "continues at the stored position"}
	case k.row.resumeAt != nil && (*k.row.resumeAt < 0 || !k.recreated()):
		d = k.order()
	case k.halt != nil:
		d = decision{next: stored, halt: k.halt, why: "halts"}
	case stored == nil:
		d = k.begin()
	default:
		d = k.resume(*stored)
	}
	if k.row.resumeAt != nil && k.log != nil && !d.ordered {
		d.ordered = true
		d.why += fmt.Sprintf("; the order to resume at %d was for an earlier topic of this name", *k.row.resumeAt)
	}
	if d.handled = k.handled(d); k.log == nil {
		// Records passed to Deliver may leave offsets out, so the position does not show what was
		// handled. Kafka leaves out only offsets that do not exist.
		d.handled = handledRange{from: math.MaxInt64}
	}
	return d
}

// recreated reports whether the row belongs to an earlier topic of the same name.
func (k known) recreated() bool {
	return k.log != nil && k.row.topicID != uuid.Nil && k.log.topicID != uuid.Nil && k.row.topicID != k.log.topicID
}

// stored is the position of this topic.
func (k known) stored() *int64 {
	if k.recreated() {
		return nil
	}
	return k.row.next
}

// order carries out an operator's order.
func (k known) order() decision {
	at := *k.row.resumeAt
	switch at {
	case resumeAtStart:
		at = k.log.first
	case resumeAtEnd:
		at = k.log.end
	default:
		at = min(max(at, k.log.first), k.log.end)
	}
	return decision{at: at, next: &at, moved: true, ordered: true, why: "an operator ordered where it resumes"}
}

// begin decides for a partition without a position.
func (k known) begin() decision {
	d := decision{at: k.log.first, why: "no position is stored: begins at the start of the topic"}
	if k.recreated() {
		d.why = "the topic was deleted and recreated: begins at its start"
	}
	origin := k.log.committed.origin(k.log)
	switch {
	case origin == commitNone, origin == commitStale:
	case k.log.committed.offset > k.log.end && k.dedup == DedupByPosition:
		d = k.outOf(fmt.Errorf("%s/%d ends at offset %d, but the group committed %d, and no position is stored: what was handled is not known",
			k.topic, k.partition, k.log.end, k.log.committed.offset))
	case k.log.committed.offset > k.log.end:
	default:
		at := k.log.committed.offset
		d.next, d.why = &at, "no position is stored: Kafka's offset counts"
		// Our offset was committed after a transaction that stored a position.
		switch began := k.row.handledFrom; {
		case origin == commitOurs && (began == nil || *began > at || k.recreated()):
			return k.outOf(fmt.Errorf("this group committed offset %d of %s/%d behind its transactions, but this database has no position: it is another one, or a failover lost the first commits",
				at, k.topic, k.partition))
		case origin == commitOurs && *began < at:
			at, d.next, d.why = *began, nil, "the database lost its first commits: resumes where the partition began"
		}
		if d.at = at; at < k.log.first {
			d = k.deleted(at)
		}
	}
	return d
}

// resume decides for a partition with a position.
func (k known) resume(stored int64) decision {
	d := decision{at: stored, next: &stored, why: "resumes at the stored position"}
	if stored > k.log.end { // new records get offsets that were already handled
		return k.outOf(fmt.Errorf("%s/%d ends at offset %d, but was consumed up to %d: Kafka lost its end (an unclean election?)",
			k.topic, k.partition, k.log.end, stored))
	}
	if stored < k.log.first {
		return k.deleted(stored)
	}
	committed := k.log.committed
	switch origin := committed.origin(k.log); {
	case origin == commitNone, origin == commitStale, origin == commitOurs, committed.offset >= stored:
	case k.dedup == DedupByPosition:
		d.why = "resumes at the stored position: Kafka's offset was moved back, but without claims only the position stops redeliveries (use outbox-relay consumer resume-at)"
	default:
		// The topic may now begin after that offset, but not after the position.
		at := max(committed.offset, k.log.first)
		d = decision{at: at, next: &at, moved: true, why: "resumes at Kafka's offset, which was moved back"}
	}
	return d
}

// deleted decides for records that were deleted from the topic before they were handled.
func (k known) deleted(from int64) decision {
	return k.outOf(fmt.Errorf("records %d to %d of %s/%d were deleted before they were consumed", from, k.log.first-1, k.topic, k.partition))
}

// outOf halts a partition whose position is not in the topic: only an operator can decide which records
// are skipped or repeated. Nothing is fetched at the offset.
func (k known) outOf(problem error) decision {
	return decision{at: k.log.first, next: k.stored(), why: "halts", halt: fmt.Errorf(
		"%w. To continue, set where to resume: outbox-relay consumer resume-at --group %s --topic %s --partition %d --at earliest --why '...' (or latest, or an offset)",
		problem, k.group, k.topic, k.partition)}
}

// handled returns what this consumer has handled. Another name, or another rule for IDs, has handled
// nothing. A rewind keeps the range; a skip begins a new one, and so does a topic that lost its end: new
// records have the offsets of lost ones.
func (k known) handled(d decision) handledRange {
	stored := k.stored()
	switch {
	case d.next == nil && d.halt == nil:
		return handledRange{from: d.at}
	case d.next == nil && !k.recreated() && k.row.handledFrom != nil: // it halts the next time, too
		return handledRange{from: *k.row.handledFrom}
	case d.next == nil:
		return handledRange{from: math.MaxInt64}
	case stored == nil, k.log != nil && (d.moved && *stored > k.log.end || k.row.handledTo != nil && *k.row.handledTo > k.log.end), k.row.handledFrom == nil, k.row.handledBy == nil, k.row.handledRule == nil,
		*k.row.handledBy != k.consumer, *k.row.handledRule != k.rule:
		return handledRange{from: *d.next}
	}
	r := handledRange{from: *k.row.handledFrom, to: k.row.handledTo, rewound: k.row.rewoundFrom}
	if r.rewound != nil && *stored >= r.from { // the rewind has reached the range
		r.from, r.rewound = min(r.from, *r.rewound), nil
	}
	end := *stored
	if r.to != nil {
		end = max(end, *r.to)
	}
	if r.to = nil; end > *d.next {
		r.to = &end
	}
	if *d.next > *stored { // a skip: what lies between is not handled
		r.from, r.rewound = max(r.from, *d.next), nil
	}
	if r.from > *d.next {
		if r.to == nil || r.from >= *r.to {
			return handledRange{from: *d.next} // there is nothing to keep
		}
		at := *d.next
		if r.rewound != nil {
			at = min(at, *r.rewound)
		}
		r.rewound = &at
	}
	return r
}
