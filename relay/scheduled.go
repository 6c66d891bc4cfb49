package relay

import (
	"context"
	"fmt"
	"time"

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
	for {
		var found, moved int
		err := r.ask(ctx, []any{&found, &moved}, r.sql.promote, promoteRowsMax)
		if pgerr.Is(err, pgerr.SerializationFailure) {
			return promotePause, nil // if the role's isolation is stricter, a session that cancels one row undoes the move
		}
		if err != nil {
			return 0, fmt.Errorf("move messages that are due: %w", err)
		}
		switch {
		case moved == 0:
			return promoteEvery, nil // another session is cancelling or moving them
		case found < promoteRowsMax:
			return promotePause, nil
		}
	}
}

// ask reads one row within the limit of a statement.
func (r *Relay) ask(ctx context.Context, into []any, sql string, args ...any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	return silence(ctx, r.pool.QueryRow(ctx, sql, args...).Scan(into...))
}
