package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	// AlsoToMax bounds Message.AlsoTo.
	AlsoToMax = 100
	// deliverAtYearsMax is how far ahead DeliverAt may be. It detects mistakes of unit
	// (milliseconds taken for seconds), so the program's clock is accurate enough. The database
	// decides when a message is due.
	deliverAtYearsMax = 10
)

// Cancel removes messages for later from the default schema; see Outbox.Cancel.
func Cancel(ctx context.Context, tx pgx.Tx, id uuid.UUID) (bool, error) {
	return standard.Cancel(ctx, tx, id)
}

// Cancel removes the messages that wait under the ID, for all their topics, and reports whether
// there were any. True: once tx commits, they are never published. False: a relay moved them to the
// outbox, so they are published or will be; or they were cancelled before, or never scheduled; or
// another role scheduled them, or they are from before schema version 8, whose publisher is not
// known: they stay, and will be published. There is no other case. Cancel waits for a relay that is moving the message, for a few
// milliseconds, and a relay skips a message that a still open transaction has cancelled.
//
// Inside a handler of package consumer, Cancel does not find what the same batch of messages
// published.
//
// After an error tx is aborted. With isolation levels above read committed the error may be a
// serialization failure; then the transaction can be run again.
func (o *Outbox) Cancel(ctx context.Context, tx pgx.Tx, id uuid.UUID) (bool, error) {
	tag, err := tx.Exec(ctx, o.cancel, [16]byte(id))
	if err != nil {
		return false, fmt.Errorf("cancel message %s: %w", id, err)
	}
	return tag.RowsAffected() > 0, nil
}

// checkLater returns the problems of DeliverAt and AlsoTo.
func (m *Message) checkLater() (problems []error) {
	if latest := time.Now().AddDate(deliverAtYearsMax, 0, 0); m.DeliverAt.After(latest) {
		problems = append(problems, fmt.Errorf("DeliverAt is in the year %d: want at most %d years ahead", m.DeliverAt.Year(), deliverAtYearsMax))
	}
	if len(m.AlsoTo) > AlsoToMax {
		return append(problems, fmt.Errorf("AlsoTo has %d topics: want at most %d", len(m.AlsoTo), AlsoToMax))
	}
	seen := map[string]bool{m.Topic: true}
	for _, topic := range m.AlsoTo {
		if !validTopic(topic) {
			problems = append(problems, fmt.Errorf("AlsoTo: topic %.260q: %w", topic, errTopic))
		} else if seen[topic] {
			problems = append(problems, fmt.Errorf("AlsoTo: topic %q is listed twice: each topic gets the message once", topic))
		}
		seen[topic] = true
	}
	return problems
}

var errTopic = errors.New("Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens") //nolint:staticcheck // a name

// dueAt returns DeliverAt as it is stored: in microseconds, rounded up so that it is never before
// the requested time. Times before 1970 become 1970.
func (m *Message) dueAt() time.Time {
	at := m.DeliverAt.Add(time.Microsecond - 1).Truncate(time.Microsecond)
	if epoch := time.Unix(0, 0); at.Before(epoch) {
		return epoch
	}
	return at
}

// statement is an insert of messages.
type statement struct {
	sql  string
	args []any
}

// statements returns the inserts of the messages: one statement for those without DeliverAt, in the
// order of the call, and one for those with it.
func (o *Outbox) statements(msgs []Message) ([]statement, error) {
	var now, later []Message
	fan := false
	for i, m := range msgs {
		switch {
		case !m.DeliverAt.IsZero():
			if later == nil {
				now = msgs[:i:i] // share msgs: a call without DeliverAt copies nothing
			}
			later = append(later, m)
			continue
		case later != nil:
			now = append(now, m)
		}
		fan = fan || len(m.AlsoTo) > 0
	}
	if later == nil {
		now = msgs
	}
	var all []statement
	if len(now) > 0 {
		sql, columns := o.insert, arrays
		switch {
		case fan:
			sql, columns = o.fanOut, fanArrays
		case len(now) == 1:
			sql, columns = o.insertOne, single
		}
		args, err := columns(now)
		if err != nil {
			return nil, err
		}
		all = append(all, statement{sql, args})
	}
	if len(later) > 0 {
		args, err := fanArrays(later)
		if err != nil {
			return nil, err
		}
		due := make([]time.Time, len(later))
		for i := range later {
			due[i] = later[i].dueAt()
		}
		all = append(all, statement{o.schedule, append(args, due)})
	}
	return all, nil
}

// fanArrays returns the columns of the messages as the parameters of fanOutSQL, which are also
// those of scheduleSQL without the times.
func fanArrays(msgs []Message) ([]any, error) {
	args, err := arrays(msgs)
	if err != nil {
		return nil, err
	}
	var message []int32
	var topics []string
	for i, m := range msgs {
		for _, topic := range append([]string{m.Topic}, m.AlsoTo...) {
			message, topics = append(message, int32(i+1)), append(topics, topic)
		}
	}
	return []any{args[0], args[2], args[3], args[4], message, topics}, nil
}
