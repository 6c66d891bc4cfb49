package held

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// ChunkMax bounds how many rows one transaction takes: it holds them locked.
const ChunkMax = 100

// Decision is what an operator wants done with rows.
type Decision struct {
	operator.By
	Discard   bool          // else retry
	WholeKeys bool          // discard also the rows behind them
	Rate      int           // rows per second; 0: no limit
	WaitMax   time.Duration // how long to follow rows that were handed back; 0: not at all
}

// what is the decision's name in operator_actions.
func (o *Decision) what(k Kind) string {
	if o.Discard {
		return string(k) + ".discard"
	}
	return string(k) + ".retry"
}

// Verb is what is done to a row.
func (o *Decision) Verb() string {
	if o.Discard {
		return "discarded"
	}
	return "handed back"
}

// Result is what one transaction did. A row that existed at the call and is in none of the lists was
// gone, or no longer a head, when it was locked.
type Result struct {
	Done   []Row
	Behind []uuid.UUID // not the first of their key
	// Retrying were already handed back: the program may be working on them. A Wait can follow them,
	// without the rows behind them.
	Retrying []Row
	// NoPayload cannot be retried: the messages were too large to be stored. No dead row is.
	NoPayload []uuid.UUID
	// Released counts the keys that continue after a discard.
	Released int64
}

// Act retries or discards rows in one transaction, at most ChunkMax, and records who did so. An
// error means that nothing was changed, unless the connection broke during COMMIT; it is safe to
// repeat the call.
//
// A retry takes heads only: it leaves out rows behind another one, rows that were already handed
// back, and messages without a payload. Discarded messages are deleted, and discarded rows marked for
// the relay: they are never handled or published. The key continues with its next row; a message that
// has a reason of its own waits for an operator. A discard leaves out dead rows that were already
// handed back.
func (k Kind) Act(ctx context.Context, db operator.Beginner, schema string, o Decision, refs []Ref) (result *Result, err error) {
	if len(refs) > ChunkMax {
		return nil, fmt.Errorf("%d %s %s: want at most %d at once", len(refs), k, k.Words().Rows(), ChunkMax)
	}
	err = operator.Change(ctx, db, func(tx pgx.Tx, began time.Time) (err error) {
		result, err = k.act(ctx, tx, schema, o, refs, began)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("change %s %s: %w", k, k.Words().Rows(), err)
	}
	return result, nil
}

// act locks the rows, decides with a snapshot that is newer than the locks, and records the action.
func (k Kind) act(ctx context.Context, tx pgx.Tx, schema string, o Decision, refs []Ref, began time.Time) (*Result, error) {
	lock := k.sql().lock
	if o.WholeKeys {
		lock = k.sql().lockQueues
	}
	rows, err := read[Row](ctx, tx, k, schema, lock, refArgs(refs)...)
	if err != nil {
		return nil, err
	}
	locked, subjects := make([]Ref, len(rows)), make([]string, len(rows))
	for i, r := range rows {
		text, err := json.Marshal(r.subject())
		if err != nil {
			return nil, err
		}
		locked[i], subjects[i] = r.Ref, string(text)
	}
	sql, args := k.sql().retry, append(refArgs(locked), subjects, o.Who, o.what(k), o.Why)
	if o.Discard {
		sql, args = k.sql().discard, append(args, o.WholeKeys)
	}
	changed, err := read[struct {
		Ref
		Last int64 // seq of the last row behind it
	}](ctx, tx, k, schema, sql, args...)
	if err != nil {
		return nil, err
	}
	lasts := map[Ref]int64{}
	for _, c := range changed {
		lasts[c.Ref] = c.Last
	}
	result := &Result{}
	if o.Discard {
		done := slices.DeleteFunc(slices.Clone(rows), func(r Row) bool { _, done := lasts[r.Ref]; return !done })
		tag, err := tx.Exec(ctx, migrations.InSchema(k.sql().promoted, schema), queueArgs(done)...)
		if err != nil {
			return nil, err
		}
		result.Released = tag.RowsAffected()
	}
	for _, r := range rows {
		last, done := lasts[r.Ref]
		r.last, r.acted = max(last, r.Seq), began
		switch {
		case done:
			result.Done = append(result.Done, r)
		case r.State == "behind":
			result.Behind = append(result.Behind, r.ID)
		case k == Parked && r.Reason == ReasonTooLarge:
			result.NoPayload = append(result.NoPayload, r.ID)
		case r.State == "retry":
			result.Retrying = append(result.Retrying, r)
		}
	}
	return result, nil
}

// subject is what operator_actions records about a row: its state, and never its payload or headers.
func (r *Row) subject() map[string]any {
	subject := map[string]any{
		"seq": r.Seq, "message_id": r.ID, "topic": r.Topic, "key": r.Key, "reason": r.Reason, "error": r.Error, "attempts": r.Attempts, "state": r.State,
	}
	if r.Partition == nil {
		subject["relay"], subject["created_at"] = r.Relay, r.CreatedAt
	} else {
		subject["consumer"], subject["partition"], subject["offset"] = r.Consumer, r.Partition, r.Offset
	}
	return subject
}

func refArgs(refs []Ref) []any {
	relays, seqs := make([]string, len(refs)), make([]int64, len(refs))
	for i, r := range refs {
		relays[i], seqs[i] = r.Relay, r.Seq
	}
	return []any{relays, seqs}
}

// queueArgs identify the queues of locked rows.
func queueArgs(rows []Row) []any {
	relays, consumers, topics := make([]string, len(rows)), make([]int32, len(rows)), make([]string, len(rows))
	partitions, hashes := make([]*int32, len(rows)), make([][]byte, len(rows))
	for i, r := range rows {
		relays[i], consumers[i], topics[i], partitions[i], hashes[i] = r.Relay, r.ConsumerID, r.Topic, r.Partition, r.Hash
	}
	return []any{relays, consumers, topics, partitions, hashes}
}
