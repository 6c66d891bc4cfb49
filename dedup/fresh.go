package dedup

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrTaken marks a BeginFresh that found a claim: at least one of the IDs is a duplicate. The
// transaction is aborted and nothing is claimed. Roll back, begin again and claim with Queue, which
// separates the duplicates.
var ErrTaken = errors.New("at least one of the messages was claimed before: roll back and claim with Queue")

// Step is a statement that shares the round trip of BeginFresh.
type Step struct {
	SQL string
	// Args are its parameters, in PostgreSQL's text form.
	Args []string
	// Into are the destinations for the columns of its only row, nil for one that is not read. If
	// there is no row, they do not change.
	Into []any
}

func (s Step) queue(batch *pgx.Batch) {
	args := make([]any, len(s.Args))
	for i, arg := range s.Args {
		args[i] = arg
	}
	queued := batch.Queue(s.SQL, args...)
	if s.Into == nil {
		return
	}
	queued.QueryRow(func(row pgx.Row) error {
		if err := row.Scan(s.Into...); !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		return nil
	})
}

// BeginFresh begins a transaction and claims every ID as if none was claimed before, in one round
// trip. Without ON CONFLICT its statement takes half of the time of Queue's and writes a fifth less
// write-ahead log. The unique constraint decides, as it does for Queue. BeginFresh waits for a
// concurrent claim of the same ID. One duplicate fails the whole claim with ErrTaken. Each such
// failure leaves up to len(msgs) dead rows and a line in the server's log. Use it where duplicates
// are rare.
//
// If an ID occurs several times in msgs, only its first occurrence is fresh; call Compare then.
//
// The steps in before run first, beginning with BEGIN; those in after follow the claim. They must
// not return more than one row.
//
// After an error nothing is claimed. If the transaction was begun, it is aborted and must be rolled
// back, unless the connection is closed. ErrRetry has the same meaning as for the other claims.
// Under REPEATABLE READ and SERIALIZABLE a duplicate is ErrTaken, too, whether the snapshot shows
// it or not.
func (c *Claims) BeginFresh(ctx context.Context, conn *pgx.Conn, before []Step, consumer Consumer, msgs []Message, after ...Step) (*Result, error) {
	result, batch := newResult(msgs), &pgx.Batch{}
	for _, at := range result.order {
		result.fresh[at] = true
	}
	for _, step := range before {
		step.queue(batch)
	}
	ids, fingerprints := result.columns(result.order)
	batch.Queue(c.sql[consumer.forever].fresh, ids, consumer.id, fingerprints).Query(func(rows pgx.Rows) error {
		rows.Close()
		return c.taken(rows.Err())
	})
	for _, step := range after {
		step.queue(batch)
	}
	err := conn.SendBatch(ctx, batch).Close()
	switch {
	case err == nil:
		return result, nil
	case errors.Is(err, ErrTaken):
		return nil, err
	}
	return nil, WrapClaimError(err)
}

// taken distinguishes a refused claim from other errors of its statement: a trigger of the database's
// owner may violate another constraint. PostgreSQL names the partition.
func (c *Claims) taken(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "23505" && pgErr.SchemaName == c.schema &&
		(pgErr.TableName == "processed_forever" || strings.HasPrefix(pgErr.TableName, "processed_messages_")) {
		return fmt.Errorf("%w: %w", ErrTaken, err)
	}
	return err
}
