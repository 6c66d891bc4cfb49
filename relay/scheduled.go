package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// How messages for later are polled. An idle relay polls every two seconds (one descent of an
// index, also if there never were any), and when the next message is due, if that is sooner.
// promotePause keeps many small moves from becoming a load.
const (
	promoteEvery   = 2 * time.Second
	promotePause   = 100 * time.Millisecond
	promoteRowsMax = 1000
)

// promote moves messages for later into the outbox when they are due, as long as this replica works
// on shard 0. It has a goroutine of its own: a large move must not delay the renewal of leases. Two
// replicas that both believe to have shard 0, and relays of other names, are serialized by the
// statement itself.
func (r *Relay) promote(ctx context.Context) {
	for wait := time.Duration(0); pause.For(ctx, wait); {
		next, err := r.promoteDue(ctx)
		wait = min(max(next, promotePause), promoteEvery)
		if err != nil {
			wait = promoteEvery
			if ctx.Err() == nil {
				r.say.warn(ctx, "messages for later could not be moved to the outbox; the relay retries", "relay", r.cfg.Name, "error", err)
			}
		}
	}
}

// promoteDue moves messages that are due, and returns the time until the next poll.
func (r *Relay) promoteDue(ctx context.Context) (time.Duration, error) {
	var millis int64
	if err := r.ask(ctx, []any{&millis}, r.sql.of(nextDueSQL)); err != nil {
		return 0, fmt.Errorf("find messages that are due: %w", err)
	}
	if millis > 0 {
		return time.Duration(millis) * time.Millisecond, nil
	}
	for rows := promoteRowsMax; ; rows = min(2*rows, promoteRowsMax) {
		moved, err := r.promotePage(ctx, rows)
		for ; ofRows(err) && rows > 1; moved, err = r.promotePage(ctx, rows) {
			rows /= 2 // to find the row that the outbox refuses
		}
		if ofRows(err) {
			moved, err = r.promoteOne(ctx)
		}
		if pgerr.Is(err, pgerr.SerializationFailure) {
			return promotePause, nil // if the role's isolation is stricter, a session that cancels one row undoes the move
		}
		if err != nil {
			return 0, fmt.Errorf("move messages that are due: %w", err)
		}
		if moved < rows {
			return promotePause, nil
		}
	}
}

// ofRows reports errors of what is in the rows that the outbox gets: a CHECK, a value, a trigger.
func ofRows(err error) bool { return pgerr.InClass(err, "22", "23", "P0") }

// promotePage moves at most rows messages that are due.
func (r *Relay) promotePage(ctx context.Context, rows int) (moved int, err error) {
	return moved, r.ask(ctx, []any{&moved}, r.sql.of(promoteSQL), rows, nil)
}

// promoteOne moves the first message that is due. If the outbox refuses it, it stays where it is, with the
// reason, until an operator clears the column or deletes it.
func (r *Relay) promoteOne(ctx context.Context) (done int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	return done, silence(ctx, r.transact(ctx, func(tx pgx.Tx) error {
		var place int64
		var id uuid.UUID
		var topic, publisher string
		err := tx.QueryRow(ctx, r.sql.of(firstDueSQL)).Scan(&place, &id, &topic, &publisher)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		refusal := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, r.sql.of(promoteSQL), 1, place).Scan(&done) })
		if !ofRows(refusal) {
			return refusal
		}
		done = 1
		r.say.about(ctx, topic, "the outbox refuses a message for later; it stays in outbox_scheduled, see its column refused", "relay", r.cfg.Name, "id", id, "topic", topic, "error", refusal)
		_, err = tx.Exec(ctx, r.sql.of(setAsideSQL), id, topic, publisher, bounds.ErrorText(refusal))
		return err
	}))
}

// ask reads one row within the limit of a statement.
func (r *Relay) ask(ctx context.Context, into []any, sql string, args ...any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	return silence(ctx, r.pool.QueryRow(ctx, sql, args...).Scan(into...))
}
