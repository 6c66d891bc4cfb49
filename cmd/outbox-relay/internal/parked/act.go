package parked

import (
	"context"
	"crypto/sha256"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Result is what a call did. A message that existed at the call and is in none of the lists was
// gone, or no longer a head, when its row was locked.
type Result struct {
	Done []Done
	// NoPayload cannot be retried: the messages were too large to be stored.
	NoPayload []Refused
	// Behind are not the first of their key.
	Behind []Refused
	// Retrying counts messages that were already handed back.
	Retrying int
	// Released counts the keys that continue after a discard.
	Released int64
}

// Done is a message that was acted on, with the messages behind it.
type Done = operator.Done[int64, *lockedRow]

// Refused is a message that was left as it is.
type Refused struct {
	Seq int64
	ID  uuid.UUID
}

// Retry hands messages back to the consumers; see [operator.Table.Retry]. It takes heads only: it
// leaves out messages behind another one, and messages that were already handed back.
func Retry(ctx context.Context, db operator.Beginner, schema string, by operator.By, seqs []int64) (*Result, error) {
	return sorted(table(schema).Retry(ctx, db, by, seqs))
}

// Discard deletes messages: they are never handled; see [operator.Table.Discard]. It hands back the
// next message of each key, unless that one has a reason of its own.
func Discard(ctx context.Context, db operator.Beginner, schema string, by operator.By, seqs []int64, wholeKeys bool) (*Result, error) {
	return sorted(table(schema).Discard(ctx, db, by, seqs, wholeKeys))
}

// sorted sorts the messages that were left as they are by the cause.
func sorted(from *operator.Result[int64, *lockedRow], err error) (*Result, error) {
	if err != nil {
		return nil, err
	}
	result := &Result{Done: from.Done, Released: from.Released}
	for _, r := range from.Left {
		switch {
		case r.state == "behind":
			result.Behind = append(result.Behind, Refused{r.seq, r.id})
		case r.reason == ReasonTooLarge:
			result.NoPayload = append(result.NoPayload, Refused{r.seq, r.id})
		case r.state == "retry":
			result.Retrying++
		}
	}
	return result, nil
}

// table is parked_messages, as operators act on it.
func table(schema string) *operator.Table[int64, *lockedRow] {
	return &operator.Table[int64, *lockedRow]{
		Name: "parked messages", Held: "parked", Schema: schema,
		SQL: operator.Statements{
			Lock: lockSQL, LockQueues: lockQueuesSQL, Retry: retrySQL, Discard: discardSQL, Promote: promotedSQL,
			Outcomes: outcomesSQL, Discarded: discardedSQL,
		},
		Scan: scanLocked, Into: func(seq *int64) []any { return []any{seq} }, Places: func(seqs []int64) []any { return []any{seqs} }, Queues: queueArgs,
	}
}

// lockedRow is a row that is locked until the transaction ends.
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

func (r *lockedRow) Place() int64 { return r.seq }

func (r *lockedRow) Subject() map[string]any {
	return map[string]any{
		"seq": r.seq, "consumer": r.name, "message_id": r.id, "topic": r.topic, "partition": r.partition, "offset": r.offset,
		"key": r.key, "reason": r.reason, "error": r.err, "attempts": r.attempts, "state": r.state,
	}
}

func scanLocked(row pgx.CollectableRow) (*lockedRow, error) {
	r := &lockedRow{}
	return r, row.Scan(&r.seq, &r.consumer, &r.name, (*[16]byte)(&r.id), &r.topic, &r.partition, &r.offset, (*[]byte)(&r.key), &r.reason, &r.err, &r.attempts, &r.state)
}

// queueArgs identify queues by the hash that stands for the key in the index; nil: no key.
func queueArgs(rows []*lockedRow) []any {
	consumers, topics := make([]int32, len(rows)), make([]string, len(rows))
	partitions, hashes := make([]int32, len(rows)), make([][]byte, len(rows))
	for i, r := range rows {
		consumers[i], topics[i], partitions[i] = r.consumer, r.topic, r.partition
		if r.key != nil {
			hash := sha256.Sum256(r.key)
			hashes[i] = hash[:]
		}
	}
	return []any{consumers, topics, partitions, hashes}
}
