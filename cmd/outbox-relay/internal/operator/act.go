package operator

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// deadlocksMax bounds how often a transaction is repeated after a deadlock.
const deadlocksMax = 5

// Result is what a call did. A row that existed at the call and is in neither list was gone when it
// was locked.
type Result[P comparable, R Row[P]] struct {
	Done     []Done[P, R]
	Left     []R   // rows that were not changed
	Released int64 // keys that continue after a discard
}

// Done is a row that was acted on, with the rows behind it.
type Done[P comparable, R Row[P]] struct {
	place P
	last  int64 // of the rows behind it
	row   R
	at    time.Time // when its transaction began, by the database's clock
}

// Retry hands rows back in one transaction, at most ChunkMax, and records who did so. An error
// means that nothing was changed, unless the connection broke during COMMIT; it is safe to repeat
// the call.
func (t *Table[P, R]) Retry(ctx context.Context, db Beginner, by By, places []P) (*Result[P, R], error) {
	return t.act(ctx, db, t.SQL.Lock, places, func(ctx context.Context, tx pgx.Tx, rows []R, result *Result[P, R]) (err error) {
		result.Done, err = t.change(ctx, tx, t.SQL.Retry, rows, by.Who, by.Why)
		return err
	})
}

// Discard deletes rows in one transaction, at most ChunkMax, and records who did so. The same
// transaction promotes the next row of each key, so that the key continues. With wholeKeys it
// deletes all rows of their keys. Errors are as in Retry.
func (t *Table[P, R]) Discard(ctx context.Context, db Beginner, by By, places []P, wholeKeys bool) (*Result[P, R], error) {
	lock := t.SQL.Lock
	if wholeKeys {
		lock = t.SQL.LockQueues
	}
	return t.act(ctx, db, lock, places, func(ctx context.Context, tx pgx.Tx, rows []R, result *Result[P, R]) (err error) {
		result.Done, err = t.change(ctx, tx, t.SQL.Discard, rows, by.Who, by.Why, wholeKeys)
		if err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, t.inSchema(t.SQL.Promote), t.Queues(rows)...)
		result.Released = tag.RowsAffected()
		return err
	})
}

type decide[P comparable, R Row[P]] func(ctx context.Context, tx pgx.Tx, rows []R, result *Result[P, R]) error

// act runs one transaction: it locks the rows, decides with a snapshot that is newer than the
// locks, and records the action.
func (t *Table[P, R]) act(ctx context.Context, db Beginner, lock string, places []P, work decide[P, R]) (*Result[P, R], error) {
	if len(places) > ChunkMax {
		return nil, fmt.Errorf("%d %s: want at most %d at once", len(places), t.Name, ChunkMax)
	}
	for deadlocks := 0; ; deadlocks++ {
		result := &Result[P, R]{}
		// Read committed, whatever the role's default: each statement has to see what the locks
		// waited for.
		err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			var at time.Time
			if err := tx.QueryRow(ctx, settingsSQL).Scan(&at, nil, nil, nil, nil); err != nil {
				return err
			}
			rows, err := t.lockRows(ctx, tx, lock, places)
			if err != nil {
				return err
			}
			if err := work(ctx, tx, rows, result); err != nil {
				return err
			}
			result.finish(rows, at)
			return nil
		})
		switch {
		case pgerr.Is(err, pgerr.Deadlock) && deadlocks < deadlocksMax:
			continue
		case pgerr.LockConflict(err):
			err = fmt.Errorf("%w (%s)", ErrBusy, pgerr.State(err))
		}
		if err != nil {
			return nil, fmt.Errorf("change %s: %w", t.Name, err)
		}
		return result, nil
	}
}

// finish completes what is known of the rows, and finds those that were not changed.
func (result *Result[P, R]) finish(rows []R, at time.Time) {
	done := map[P]*Done[P, R]{}
	for i := range result.Done {
		done[result.Done[i].place] = &result.Done[i]
	}
	for _, r := range rows {
		if d := done[r.Place()]; d != nil {
			d.row, d.at = r, at
		} else {
			result.Left = append(result.Left, r)
		}
	}
}

// Limit bounds how long a transaction may block others, with the limits of a Table's transactions.
func Limit(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, settingsSQL)
	return err
}
