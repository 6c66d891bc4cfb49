package queue

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// deadlocksMax bounds how often a transaction is repeated after a deadlock.
const deadlocksMax = 5

// Result is what a call did. A row that existed at the call and is in none of the lists was gone,
// or no longer a head, when it was locked.
type Result[P comparable] struct {
	Done []Done[P]
	// Behind are not the first of their key.
	Behind []uuid.UUID
	// Retrying were already handed back: the program may be working on them. A Wait can follow them,
	// without the rows behind them.
	Retrying []Done[P]
	// NoPayload cannot be retried: the messages were too large to be stored. No dead row is.
	NoPayload []uuid.UUID
	// Released counts the keys that continue after a discard.
	Released int64
}

// Done is a row that was acted on, with the rows behind it.
type Done[P comparable] struct {
	row  locked[P]
	last int64     // seq of the last row behind it
	at   time.Time // when its transaction began, by the database's clock
}

// ID returns the row's ID.
func (d Done[P]) ID() uuid.UUID { return d.row.id }

// step is what one transaction does to rows.
type step struct {
	lock, change string
	after        string // with the queues of the rows; empty: nothing
	args         []any  // of change, after places and subjects
}

// Retry hands rows back in one transaction, at most ChunkMax, and records who did so. It takes
// heads only: it leaves out rows behind another one, rows that were already handed back, and
// messages without a payload. An error means that nothing was changed, unless the connection broke
// during COMMIT; it is safe to repeat the call.
func (t *Table[P, R, F]) Retry(ctx context.Context, db operator.Beginner, by operator.By, places []P) (*Result[P], error) {
	return t.act(ctx, db, places, step{lock: t.sql.lock, change: t.sql.retry, args: []any{by.Who, by.Why}})
}

// Discard deletes rows in one transaction, at most ChunkMax, and records who did so: they are never
// published or handled. The same transaction promotes the next row of each key, so that the key
// continues; a message that has a reason of its own waits for an operator. With wholeKeys Discard
// deletes all rows of their keys. It leaves out dead rows that were already handed back. Errors are
// as in Retry.
func (t *Table[P, R, F]) Discard(ctx context.Context, db operator.Beginner, by operator.By, places []P, wholeKeys bool) (*Result[P], error) {
	s := step{lock: t.sql.lock, change: t.sql.discard, after: t.sql.promote, args: []any{by.Who, by.Why, wholeKeys}}
	if wholeKeys {
		s.lock = t.sql.lockQueues
	}
	return t.act(ctx, db, places, s)
}

// act runs one transaction, and repeats it after a deadlock.
func (t *Table[P, R, F]) act(ctx context.Context, db operator.Beginner, places []P, s step) (result *Result[P], err error) {
	if len(places) > ChunkMax {
		return nil, fmt.Errorf("%d %s: want at most %d at once", len(places), t.name, ChunkMax)
	}
	for deadlocks := 0; ; deadlocks++ {
		// Read committed, whatever the role's default: each statement has to see what the locks
		// waited for.
		err = pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) (err error) {
			result, err = t.run(ctx, tx, places, s)
			return err
		})
		switch {
		case pgerr.Is(err, pgerr.Deadlock) && deadlocks < deadlocksMax:
			continue
		case pgerr.LockConflict(err):
			err = fmt.Errorf("%w (%s)", operator.ErrBusy, pgerr.State(err))
		}
		if err != nil {
			return nil, fmt.Errorf("change %s: %w", t.name, err)
		}
		return result, nil
	}
}

// run locks the rows, decides with a snapshot that is newer than the locks, and records the action.
func (t *Table[P, R, F]) run(ctx context.Context, tx pgx.Tx, places []P, s step) (*Result[P], error) {
	at, err := operator.Limit(ctx, tx)
	if err != nil {
		return nil, err
	}
	found, err := tx.Query(ctx, t.inSchema(s.lock), t.places(places)...)
	if err != nil {
		return nil, err
	}
	rows, err := pgx.CollectRows(found, t.locked)
	if err != nil {
		return nil, err
	}
	lasts, err := t.change(ctx, tx, s, rows)
	if err != nil {
		return nil, err
	}
	result := &Result[P]{}
	if s.after != "" {
		tag, err := tx.Exec(ctx, t.inSchema(s.after), t.queues(rows)...)
		if err != nil {
			return nil, err
		}
		result.Released = tag.RowsAffected()
	}
	for _, r := range rows {
		last, done := lasts[r.place]
		switch {
		case done:
			result.Done = append(result.Done, Done[P]{r, last, at})
		case r.state == "behind":
			result.Behind = append(result.Behind, r.id)
		case r.reason == t.unstored:
			result.NoPayload = append(result.NoPayload, r.id)
		case r.state == "retry":
			result.Retrying = append(result.Retrying, Done[P]{r, r.seq, at})
		}
	}
	return result, nil
}

// change hands back or deletes locked rows. It returns those that it changed, with the last seq
// behind each.
func (t *Table[P, R, F]) change(ctx context.Context, tx pgx.Tx, s step, rows []locked[P]) (map[P]int64, error) {
	places, subjects := make([]P, len(rows)), make([]string, len(rows))
	for i, r := range rows {
		text, err := json.Marshal(r.subject)
		if err != nil {
			return nil, err
		}
		places[i], subjects[i] = r.place, string(text)
	}
	changed, err := tx.Query(ctx, t.inSchema(s.change), append(append(t.places(places), subjects), s.args...)...)
	if err != nil {
		return nil, err
	}
	var place P
	var last int64
	lasts := map[P]int64{}
	_, err = pgx.ForEachRow(changed, append(t.into(&place), &last), func() error {
		lasts[place] = last
		return nil
	})
	return lasts, err
}
