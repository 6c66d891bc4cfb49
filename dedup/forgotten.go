package dedup

import (
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// QueueForgotten adds to a batch what says how far back the consumer's claims are complete: claims of messages
// up to that time may have been forgotten, so a claim of such a message proves nothing by being fresh. A
// message is as old as its ID says, or its record, whichever is older. Zero where nothing was forgotten.
// Maintain writes that mark in the transaction that forgets, and never moves it back; windows have no part in
// it. dest is filled when the batch's results have been read; errors go through WrapClaimError.
//
// It must be queued behind the claim. A claim that is made first finds either the earlier claim or the mark.
//
// lock is for REPEATABLE READ and SERIALIZABLE: there the transaction's snapshot would show the mark of its
// beginning, while a claim sees at once that an earlier one is gone (TRUNCATE and the unique constraint know no
// snapshots). With lock a mark that moved meanwhile is the serialization failure that it is (ErrRetry). The
// batch must run inside a transaction block then.
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
		batch.Queue(c.sql.forgotten, consumer.id).QueryRow(read)
		return
	}
	batch.Queue(forgottenBeforeSQL)
	batch.Queue(c.sql.forgottenLocked, consumer.id).QueryRow(read)
	batch.Queue(forgottenAfterSQL)
	batch.Queue(forgottenBehindSQL)
}

// ForgottenSteps is QueueForgotten for BeginFresh, whose steps it follows. *dest is nil where nothing was forgotten.
func (c *Claims) ForgottenSteps(consumer Consumer, dest **time.Time, lock bool) []Step {
	read := Step{SQL: c.sql.forgotten, Args: []string{strconv.Itoa(int(consumer.id))}, Into: []any{dest}}
	if !lock {
		return []Step{read}
	}
	read.SQL = c.sql.forgottenLocked
	return []Step{{SQL: forgottenBeforeSQL}, read, {SQL: forgottenAfterSQL}, {SQL: forgottenBehindSQL}}
}
