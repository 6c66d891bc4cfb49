package dead

import (
	"context"
	"crypto/sha256"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
)

// Result is what a call did. A row that existed at the call and is in none of the lists was gone
// when its row was locked.
type Result struct {
	Done []Done
	// Behind are not the first of their key.
	Behind []uuid.UUID
	// Retrying were already handed back: the relay may be publishing them.
	Retrying []uuid.UUID
	// Released counts the keys that continue after a discard.
	Released int64
}

// Done is a row that was acted on, with the rows behind it.
type Done = operator.Done[Place, *lockedRow]

// Retry hands rows back to the relay; see [operator.Table.Retry]. It takes heads only: it leaves
// out rows behind another one, and rows that were already handed back.
func Retry(ctx context.Context, db operator.Beginner, schema string, by operator.By, places []Place) (*Result, error) {
	return sorted(table(schema).Retry(ctx, db, by, places))
}

// Discard deletes held rows: they are never published; see [operator.Table.Discard]. It hands back
// the next row of each key. It leaves out rows that were already handed back.
func Discard(ctx context.Context, db operator.Beginner, schema string, by operator.By, places []Place, wholeKeys bool) (*Result, error) {
	return sorted(table(schema).Discard(ctx, db, by, places, wholeKeys))
}

// sorted sorts the rows that were left as they are by the cause.
func sorted(from *operator.Result[Place, *lockedRow], err error) (*Result, error) {
	if err != nil {
		return nil, err
	}
	result := &Result{Done: from.Done, Released: from.Released}
	for _, r := range from.Left {
		switch r.state {
		case "retry":
			result.Retrying = append(result.Retrying, r.id)
		case "behind":
			result.Behind = append(result.Behind, r.id)
		}
	}
	return result, nil
}

// table is outbox_dead, as operators act on it.
func table(schema string) *operator.Table[Place, *lockedRow] {
	return &operator.Table[Place, *lockedRow]{
		Name: "dead rows", Held: "held", Schema: schema,
		SQL: operator.Statements{
			Lock: lockSQL, LockQueues: lockQueuesSQL, Retry: retrySQL, Discard: discardSQL, Promote: promoteSQL,
			Outcomes: outcomesSQL, Discarded: discardedSQL,
		},
		Scan: scanLocked, Into: func(p *Place) []any { return []any{&p.Relay, &p.Seq} }, Places: placeArgs, Queues: queueArgs,
	}
}

// lockedRow is a row that is locked until the transaction ends.
type lockedRow struct {
	place    Place
	id       uuid.UUID
	topic    string
	key      parked.Key
	reason   string
	err      string
	attempts int32
	state    string
	created  time.Time
}

func (r *lockedRow) Place() Place { return r.place }

func (r *lockedRow) Subject() map[string]any {
	return map[string]any{
		"relay": r.place.Relay, "seq": r.place.Seq, "message_id": r.id, "topic": r.topic, "key": r.key,
		"reason": r.reason, "error": r.err, "attempts": r.attempts, "state": r.state, "created_at": r.created,
	}
}

func scanLocked(row pgx.CollectableRow) (*lockedRow, error) {
	r := &lockedRow{}
	return r, row.Scan(&r.place.Relay, &r.place.Seq, (*[16]byte)(&r.id), &r.topic, (*[]byte)(&r.key), &r.reason, &r.err, &r.attempts, &r.state, &r.created)
}

func placeArgs(places []Place) []any {
	relays, seqs := make([]string, len(places)), make([]int64, len(places))
	for i, p := range places {
		relays[i], seqs[i] = p.Relay, p.Seq
	}
	return []any{relays, seqs}
}

// queueArgs identify queues by the hash that stands for the key in the index; nil: no key.
func queueArgs(rows []*lockedRow) []any {
	relays, topics, hashes := make([]string, len(rows)), make([]string, len(rows)), make([][]byte, len(rows))
	for i, r := range rows {
		relays[i], topics[i] = r.place.Relay, r.topic
		if r.key != nil {
			hash := sha256.Sum256(r.key)
			hashes[i] = hash[:]
		}
	}
	return []any{relays, topics, hashes}
}
