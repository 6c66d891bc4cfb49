package dedup

import (
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// QueueForgotten adds a query to a batch that reads how far back the consumer's claims are
// complete. Claims of messages up to that time (the mark) may have been forgotten, so a fresh claim
// of such a message proves nothing. The age of a message is that of its ID or of its record,
// whichever is older. The result is zero if nothing was forgotten. Maintain writes the mark in the
// transaction that forgets, and never moves it back; windows do not affect it. dest is filled when
// the batch's results have been read. Pass errors through WrapClaimError.
//
// Queue it after the claim. A claim that is made first finds either the earlier claim or the mark.
//
// Set lock under REPEATABLE READ and SERIALIZABLE. There, the transaction's snapshot would show the
// mark as it was at the transaction's beginning, while a claim sees at once that an earlier claim
// is gone (TRUNCATE and the unique constraint ignore snapshots). With lock, a mark that is newer
// than the snapshot is reported as a serialization failure (ErrRetry). The batch must then run
// inside a transaction block.
func (c *Claims) QueueForgotten(batch *pgx.Batch, consumer Consumer, dest *time.Time, lock bool) {
	read := func(row pgx.Row) error {
		var mark *time.Time
		if err := row.Scan(&mark); err != nil {
			return err
		}
		*dest = time.Time{}
		if mark != nil {
			*dest = *mark
		}
		return nil
	}
	if !lock {
		batch.Queue(c.sql[consumer.forever].forgotten, consumer.id).QueryRow(read)
		return
	}
	batch.Queue(forgottenBeforeSQL)
	batch.Queue(c.sql[consumer.forever].forgottenLocked, consumer.id).QueryRow(read)
	batch.Queue(forgottenAfterSQL)
	batch.Queue(forgottenBehindSQL)
}

// ForgottenSteps is QueueForgotten for BeginFresh: pass the steps as after. *dest is nil if nothing
// was forgotten.
func (c *Claims) ForgottenSteps(consumer Consumer, dest **time.Time, lock bool) []Step {
	read := Step{SQL: c.sql[consumer.forever].forgotten, Args: []string{strconv.Itoa(int(consumer.id))}, Into: []any{dest}}
	if !lock {
		return []Step{read}
	}
	read.SQL = c.sql[consumer.forever].forgottenLocked
	return []Step{{SQL: forgottenBeforeSQL}, read, {SQL: forgottenAfterSQL}, {SQL: forgottenBehindSQL}}
}
