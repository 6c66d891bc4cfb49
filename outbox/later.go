package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// deliverAtYearsMax is how far ahead DeliverAt may be. It detects mistakes of unit (milliseconds
// taken for seconds), so the program's clock is accurate enough. The database decides when a message
// is due.
const deliverAtYearsMax = 10

// Cancel removes messages for later from the default schema; see Outbox.Cancel.
func Cancel(ctx context.Context, tx pgx.Tx, id uuid.UUID) (bool, error) {
	return standard.Cancel(ctx, tx, id)
}

// Cancel removes the message that waits under the ID, and reports whether there was one. True: once tx
// commits, it is never published. False: a relay moved it to the outbox, so it is published or will be; or
// it was cancelled before, or never scheduled; or another role scheduled it: it stays, and will be
// published. There is no other case. Cancel waits for a relay that is moving the message, for a few
// milliseconds, and a relay skips a message that a still open transaction has cancelled. Under one ID for
// several topics, which is not advised, each is a message of its own: some may be published already.
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
	for i, m := range msgs {
		switch {
		case !m.DeliverAt.IsZero():
			if later == nil {
				now = msgs[:i:i] // share msgs: a call without DeliverAt copies nothing
			}
			later = append(later, m)
		case later != nil:
			now = append(now, m)
		}
	}
	if later == nil {
		now = msgs
	}
	var all []statement
	if len(now) > 0 {
		args, err := arrays(now)
		if err != nil {
			return nil, err
		}
		all = append(all, statement{o.insert, args})
	}
	if len(later) > 0 {
		args, err := arrays(later)
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
