package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

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
	if err := r.ask(ctx, []any{&millis}, r.sql.nextDue); err != nil {
		return 0, fmt.Errorf("find messages that are due: %w", err)
	}
	if millis > 0 {
		return time.Duration(millis) * time.Millisecond, nil
	}
	after, all := beforeAll, 0
	for {
		page, err := r.promotePage(ctx, after, promoteRowsMax)
		if pgerr.Is(err, pgerr.SerializationFailure) {
			return promotePause, nil // if the role's isolation is stricter, a session that cancels one row undoes the move
		}
		if err != nil {
			return 0, fmt.Errorf("move messages that are due: %w", err)
		}
		all += page.moved
		switch {
		case page.found < promoteRowsMax && all == 0:
			return promoteEvery, nil // another session is cancelling or moving them
		case page.found < promoteRowsMax:
			return promotePause, nil
		case page.moved < promoteRowsMax/2:
			// Other sessions have locked most of these rows, or rows of the same IDs. They must not
			// delay what is behind them; the next turn begins with them.
			after = page.last
		}
	}
}

// duePlace is that of a message for later, in the order in which they are moved.
type duePlace struct {
	due   pgtype.Timestamptz
	place *int64
}

// promoted is the result of a move: how many rows it looked at, in order, how many it moved, and
// the last place that it looked at.
type promoted struct {
	found, moved int
	last         duePlace
}

//nolint:gochecknoglobals // immutable
var beforeAll = duePlace{pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}, new(int64)}

// promotePage moves about rows messages that are due and behind a place.
func (r *Relay) promotePage(ctx context.Context, after duePlace, rows int) (p promoted, err error) {
	return p, r.ask(ctx, []any{&p.found, &p.moved, &p.last.due, &p.last.place}, r.sql.promote, rows, after.due, after.place)
}

// ask reads one row within the limit of a statement.
func (r *Relay) ask(ctx context.Context, into []any, sql string, args ...any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	return silence(ctx, r.pool.QueryRow(ctx, sql, args...).Scan(into...))
}
