package parked

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
)

// ChunkMax bounds how many messages one transaction of Retry or Discard names: it holds their rows locked.
const ChunkMax = 100

// deadlocksMax bounds how often a transaction is run again that met a deadlock.
const deadlocksMax = 5

// Operator is who acts, and why. Both are stored for ever, as they are: Who has 1 to 255 bytes, Why 1 to 2048.
type Operator struct{ Who, Why string }

// Beginner is a connection or a pool.
type Beginner interface {
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}

// ErrBusy means that a consumer, or another operator, works on one of the messages for longer than 30 s. Nothing was
// changed by the call that returns it; it can be repeated.
var ErrBusy = errors.New("somebody works on these messages: try again")

// Result is what a call did. What was there when it was called and is in none of the lists was gone, or no
// head any more, when its row was locked.
type Result struct {
	Done []Done
	// NoPayload cannot be retried: messages that were too large to be stored.
	NoPayload []Refused
	// Behind are not the first of their key.
	Behind []Refused
	// Retrying were handed back already.
	Retrying int
	// Released is how many keys go on after a discard.
	Released int64
}

// Done is a message that was acted on, and with it what waits behind it.
type Done struct {
	Seq  int64
	last int64 // of the rows behind it
	row  *lockedRow
	at   time.Time // when its transaction began, by the database's clock
}

// Refused is a message that was left alone.
type Refused struct {
	Seq int64
	ID  uuid.UUID
}

// Retry hands messages back to the consumers, in one transaction, and writes down who did so. At most
// ChunkMax of them. Heads only: what waits behind another message, or was handed back already, is left
// alone. An error means that nothing was changed, unless the connection broke during COMMIT; to repeat the
// call is safe.
func Retry(ctx context.Context, db Beginner, schema string, by Operator, seqs []int64) (*Result, error) {
	return act(ctx, db, schema, seqs, func(ctx context.Context, tx pgx.Tx, rows []*lockedRow, result *Result) ([]Done, error) {
		rows = result.retryable(rows)
		ids, subjects := subjectsOf(rows)
		return done(ctx, tx, inSchema(retrySQL, schema), ids, subjects, by.Who, by.Why)
	}, lockSQL)
}

// Discard deletes messages in one transaction, at most ChunkMax, and writes down who did so: they are never
// handled. The next message of each key is handed back, so that the key goes on. With wholeKeys all
// messages of their keys are deleted. Errors as in Retry.
func Discard(ctx context.Context, db Beginner, schema string, by Operator, seqs []int64, wholeKeys bool) (*Result, error) {
	lock := lockSQL
	if wholeKeys {
		lock = lockQueuesSQL
	}
	return act(ctx, db, schema, seqs, func(ctx context.Context, tx pgx.Tx, rows []*lockedRow, result *Result) ([]Done, error) {
		ids, subjects := subjectsOf(rows)
		gone, err := done(ctx, tx, inSchema(discardSQL, schema), ids, subjects, by.Who, by.Why, wholeKeys)
		if err != nil {
			return nil, err
		}
		tag, err := tx.Exec(ctx, inSchema(promoteSQL, schema), queuesOf(rows)...)
		result.Released = tag.RowsAffected()
		return gone, err
	}, lock)
}

type decide func(ctx context.Context, tx pgx.Tx, rows []*lockedRow, result *Result) ([]Done, error)

// act runs one transaction: lock, decide with a snapshot that is newer than the locks, write it down.
func act(ctx context.Context, db Beginner, schema string, seqs []int64, work decide, lock string) (*Result, error) {
	if len(seqs) > ChunkMax {
		return nil, fmt.Errorf("%d messages: want at most %d at once", len(seqs), ChunkMax)
	}
	for deadlocks := 0; ; deadlocks++ {
		result := &Result{}
		// Read committed, whatever the role's default is: each statement has to see what the locks waited for.
		err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			var at time.Time
			if err := tx.QueryRow(ctx, settingsSQL).Scan(&at, nil, nil, nil, nil); err != nil {
				return err
			}
			rows, err := lockRows(ctx, tx, inSchema(lock, schema), seqs)
			if err != nil {
				return err
			}
			if result.Done, err = work(ctx, tx, rows, result); err != nil {
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
			return nil, fmt.Errorf("change parked messages: %w", err)
		}
		return result, nil
	}
}

// lockedRow is a row that nobody else changes before the transaction ends.
type lockedRow struct {
	seq       int64
	consumer  int32
	name      string
	id        uuid.UUID
	topic     string
	partition int32
	offset    int64
	key       Key
	reason    string
	err       string
	attempts  int32
	state     string
}

func lockRows(ctx context.Context, tx pgx.Tx, sql string, seqs []int64) ([]*lockedRow, error) {
	rows, err := tx.Query(ctx, sql, seqs)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*lockedRow, error) {
		r := &lockedRow{}
		return r, row.Scan(&r.seq, &r.consumer, &r.name, (*[16]byte)(&r.id), &r.topic, &r.partition, &r.offset, (*[]byte)(&r.key), &r.reason, &r.err, &r.attempts, &r.state)
	})
}

// subject is what operator_actions holds of a message.
func (r *lockedRow) subject() string {
	text, _ := json.Marshal(map[string]any{ // always can be marshalled
		"seq": r.seq, "consumer": r.name, "message_id": r.id, "topic": r.topic, "partition": r.partition, "offset": r.offset,
		"key": r.key, "reason": r.reason, "error": r.err, "attempts": r.attempts, "state": r.state,
	})
	return string(text)
}

// hash stands for the key in the index; nil: none.
func (r *lockedRow) hash() []byte {
	if r.key == nil {
		return nil
	}
	hash := sha256.Sum256(r.key)
	return hash[:]
}

func subjectsOf(rows []*lockedRow) (seqs []int64, subjects []string) {
	seqs, subjects = make([]int64, len(rows)), make([]string, len(rows))
	for i, r := range rows {
		seqs[i], subjects[i] = r.seq, r.subject()
	}
	return seqs, subjects
}

// queuesOf are the arguments of promoteSQL.
func queuesOf(rows []*lockedRow) []any {
	consumers, topics := make([]int32, len(rows)), make([]string, len(rows))
	partitions, hashes := make([]int32, len(rows)), make([][]byte, len(rows))
	for i, r := range rows {
		consumers[i], topics[i], partitions[i], hashes[i] = r.consumer, r.topic, r.partition, r.hash()
	}
	return []any{consumers, topics, partitions, hashes}
}

// retryable sorts out what cannot be retried.
func (result *Result) retryable(rows []*lockedRow) []*lockedRow {
	var left []*lockedRow
	for _, r := range rows {
		switch {
		case r.reason == ReasonTooLarge:
			result.NoPayload = append(result.NoPayload, Refused{r.seq, r.id})
		case r.state == "retry":
			result.Retrying++
		default:
			left = append(left, r)
		}
	}
	return left
}

func done(ctx context.Context, tx pgx.Tx, sql string, args ...any) ([]Done, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d Done, err error) {
		return d, row.Scan(&d.Seq, &d.last)
	})
}

// finish adds what is known of the rows, and names those that were left alone because of their place.
func (result *Result) finish(rows []*lockedRow, at time.Time) {
	done := map[int64]*Done{}
	for i := range result.Done {
		done[result.Done[i].Seq] = &result.Done[i]
	}
	for _, r := range rows {
		if d := done[r.seq]; d != nil {
			d.row, d.at = r, at
		} else if r.state == "behind" {
			result.Behind = append(result.Behind, Refused{r.seq, r.id})
		}
	}
}
