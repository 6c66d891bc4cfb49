package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// How messages for later are looked after: an idle relay looks every two seconds (one descent of an index, also when
// there never were any), and at the moment at which the next one is due where that is sooner. promotePause keeps
// many small moves from becoming a load.
const (
	promoteEvery   = 2 * time.Second
	promotePause   = 100 * time.Millisecond
	promoteRowsMax = 1000
)

// promote moves messages for later into the outbox as they come due, for as long as this replica works on shard 0. It
// has a goroutine of its own: a large move must not hold up the renewal of leases. Two that both believe to have
// shard 0, and relays of other names, take turns in the statement itself.
func (r *Relay) promote(ctx context.Context) {
	for wait := time.Duration(0); pause(ctx, wait); {
		next, err := r.promoteDue(ctx)
		wait = min(max(next, promotePause), promoteEvery)
		if err != nil {
			wait = promoteEvery
			if ctx.Err() == nil {
				r.say.warn(ctx, "messages for later could not be moved to the outbox; it is tried again", "relay", r.cfg.Name, "error", err)
			}
		}
	}
}

// promoteDue moves what is due, and says in how long to look again.
func (r *Relay) promoteDue(ctx context.Context) (time.Duration, error) {
	var millis int64
	if err := r.ask(ctx, []any{&millis}, r.sql.nextDue); err != nil {
		return 0, fmt.Errorf("look for messages that are due: %w", err)
	}
	if millis > 0 {
		return time.Duration(millis) * time.Millisecond, nil
	}
	for {
		var found, moved int
		err := r.ask(ctx, []any{&found, &moved}, r.sql.promote, promoteRowsMax)
		var refusal *pgconn.PgError
		if errors.As(err, &refusal) && refusal.Code == "40001" {
			return promotePause, nil // where the role's isolation is stricter, whoever cancels one row undoes the move
		}
		if err != nil {
			return 0, fmt.Errorf("move messages that are due: %w", err)
		}
		switch {
		case moved == 0:
			return promoteEvery, nil // somebody is cancelling it, or moves it
		case found < promoteRowsMax:
			return promotePause, nil
		}
	}
}

// ask reads one row, in time.
func (r *Relay) ask(ctx context.Context, into []any, sql string, args ...any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	return silence(ctx, r.pool.QueryRow(ctx, sql, args...).Scan(into...))
}
