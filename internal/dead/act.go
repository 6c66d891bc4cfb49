package dead

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/parked"
)

// ChunkMax bounds how many rows one transaction of Retry or Discard names: it holds them locked.
const ChunkMax = 100

// deadlocksMax bounds how often a transaction is run again that met a deadlock.
const deadlocksMax = 5

// ErrBusy means that the relay, or another operator, works on one of the rows for longer than 30 s. Nothing
// was changed by the call that returns it; it can be repeated.
var ErrBusy = errors.New("somebody works on these rows: try again")

// Result is what a call did. What was there when it was called and is in none of the lists was gone when
// its row was locked.
type Result struct {
	Done []Done
	// Behind are not the first of their key.
	Behind []uuid.UUID
	// Retrying were handed back already: the relay may be publishing them.
	Retrying []uuid.UUID
	// Released is how many keys go on after a discard.
	Released int64
}

// Done is a row that was acted on, and with it what waits behind it.
type Done struct {
	Place
	last int64 // of the rows behind it
	row  *lockedRow
	at   time.Time // when its transaction began, by the database's clock
}

// Retry hands rows back to the relay, in one transaction, and writes down who did so. At most ChunkMax of
// them. Heads only: what waits behind another row, or was handed back already, is left alone. An error means
// that nothing was changed, unless the connection broke during COMMIT; to repeat the call is safe.
func Retry(ctx context.Context, db parked.Beginner, schema string, by parked.Operator, places []Place) (*Result, error) {
	return act(ctx, db, inSchema(lockSQL, schema), places, func(ctx context.Context, tx pgx.Tx, rows []*lockedRow, result *Result) (err error) {
		relays, seqs, subjects := subjectsOf(rows)
		result.Done, err = done(ctx, tx, inSchema(retrySQL, schema), relays, seqs, subjects, by.Who, by.Why)
		return err
	})
}

// Discard deletes held rows in one transaction, at most ChunkMax, and writes down who did so: they are never
// published. The next row of each key is handed back in the same transaction, so that the key goes on. With
// wholeKeys all rows of their keys are deleted. What was handed back already is left alone. Errors as in Retry.
func Discard(ctx context.Context, db parked.Beginner, schema string, by parked.Operator, places []Place, wholeKeys bool) (*Result, error) {
	lock := lockSQL
	if wholeKeys {
		lock = lockQueuesSQL
	}
	return act(ctx, db, inSchema(lock, schema), places, func(ctx context.Context, tx pgx.Tx, rows []*lockedRow, result *Result) (err error) {
		relays, seqs, subjects := subjectsOf(rows)
		result.Done, err = done(ctx, tx, inSchema(discardSQL, schema), relays, seqs, subjects, by.Who, by.Why, wholeKeys)
		if err != nil {
			return err
		}
		topics, hashes := queuesOf(rows)
		tag, err := tx.Exec(ctx, inSchema(promoteSQL, schema), relays, topics, hashes)
		result.Released = tag.RowsAffected()
		return err
	})
}

type decide func(ctx context.Context, tx pgx.Tx, rows []*lockedRow, result *Result) error

// act runs one transaction: lock, decide with a snapshot that is newer than the locks, write it down.
func act(ctx context.Context, db parked.Beginner, lock string, places []Place, work decide) (*Result, error) {
	if len(places) > ChunkMax {
		return nil, fmt.Errorf("%d rows: want at most %d at once", len(places), ChunkMax)
	}
	for deadlocks := 0; ; deadlocks++ {
		result := &Result{}
		// Read committed, whatever the role's default is: each statement has to see what the locks waited for.
		err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			var at time.Time
			if err := tx.QueryRow(ctx, settingsSQL).Scan(&at, nil, nil, nil, nil); err != nil {
				return err
			}
			rows, err := lockRows(ctx, tx, lock, places)
			if err != nil {
				return err
			}
			if err := work(ctx, tx, rows, result); err != nil {
				return err
			}
			result.finish(rows, at)
			return nil
		})
		var pgErr *pgconn.PgError
		switch isServer := errors.As(err, &pgErr); {
		case isServer && pgErr.Code == "40P01" && deadlocks < deadlocksMax:
			continue
		case isServer && (pgErr.Code == "55P03" || pgErr.Code == "40P01"):
			return nil, fmt.Errorf("%w (%s)", ErrBusy, pgErr.Code)
		case err != nil:
			return nil, fmt.Errorf("change dead rows: %w", err)
		}
		return result, nil
	}
}

// lockedRow is a row that nobody else changes before the transaction ends.
type lockedRow struct {
	Place
	id       uuid.UUID
	topic    string
	key      parked.Key
	reason   string
	err      string
	attempts int32
	state    string
	created  time.Time
}

func lockRows(ctx context.Context, tx pgx.Tx, sql string, places []Place) ([]*lockedRow, error) {
	relays, seqs := make([]string, len(places)), make([]int64, len(places))
	for i, p := range places {
		relays[i], seqs[i] = p.Relay, p.Seq
	}
	rows, err := tx.Query(ctx, sql, relays, seqs)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*lockedRow, error) {
		r := &lockedRow{}
		return r, row.Scan(&r.Relay, &r.Seq, (*[16]byte)(&r.id), &r.topic, (*[]byte)(&r.key), &r.reason, &r.err, &r.attempts, &r.state, &r.created)
	})
}

// subject is what operator_actions holds of a row: what it was, and never its payload or headers.
func (r *lockedRow) subject() string {
	text, _ := json.Marshal(map[string]any{ // always can be marshalled
		"relay": r.Relay, "seq": r.Seq, "message_id": r.id, "topic": r.topic, "key": r.key,
		"reason": r.reason, "error": r.err, "attempts": r.attempts, "state": r.state, "created_at": r.created,
	})
	return string(text)
}

func subjectsOf(rows []*lockedRow) (relays []string, seqs []int64, subjects []string) {
	relays, seqs, subjects = make([]string, len(rows)), make([]int64, len(rows)), make([]string, len(rows))
	for i, r := range rows {
		relays[i], seqs[i], subjects[i] = r.Relay, r.Seq, r.subject()
	}
	return relays, seqs, subjects
}

// queuesOf names the queues of rows by what stands for the key in the index; nil: none.
func queuesOf(rows []*lockedRow) (topics []string, hashes [][]byte) {
	topics, hashes = make([]string, len(rows)), make([][]byte, len(rows))
	for i, r := range rows {
		topics[i] = r.topic
		if r.key != nil {
			hash := sha256.Sum256(r.key)
			hashes[i] = hash[:]
		}
	}
	return topics, hashes
}

func done(ctx context.Context, tx pgx.Tx, sql string, args ...any) ([]Done, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d Done, err error) {
		return d, row.Scan(&d.Relay, &d.Seq, &d.last)
	})
}

// finish adds what is known of the rows, and names those that were left alone.
func (result *Result) finish(rows []*lockedRow, at time.Time) {
	done := map[Place]*Done{}
	for i := range result.Done {
		done[result.Done[i].Place] = &result.Done[i]
	}
	for _, r := range rows {
		d := done[r.Place]
		switch {
		case d != nil:
			d.row, d.at = r, at
		case r.state == "retry":
			result.Retrying = append(result.Retrying, r.id)
		case r.state == "behind":
			result.Behind = append(result.Behind, r.id)
		}
	}
}
