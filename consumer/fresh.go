package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/handlertx"
)

// asksMax is how many batches ask after one was taken as fresh and had a duplicate, or failed:
// duplicates come in runs, and a failed try costs about as much as a successful one saves. The first
// batch asks, too: after a restart, its messages may be the last committed ones.
const asksMax = 20

func asksAfter(asks int, out outcome, f *failure) int {
	if f != nil || out.taken {
		return asksMax
	}
	return max(asks-1, 0)
}

// begin starts the transaction and claims, in one round trip: either it takes every message as
// fresh, or it asks for each. If the first form meets a duplicate, nothing has happened yet, and
// the second one follows. The same constraint decides both; the choice affects only cost.
func (c *Consumer) begin(ctx context.Context, t *tx, w *work) (got claimed, err error) {
	asks := !c.trusts(w)
	if !asks {
		if got, err = c.beginFresh(ctx, t, w); errors.Is(err, dedup.ErrTaken) {
			limited, cancel := c.bounded(ctx)
			defer cancel()
			if _, err := t.conn.Exec(limited, "ROLLBACK"); err != nil { // it claimed nothing
				return got, err
			}
			asks, got.taken = true, true
		}
	}
	if asks {
		err = c.beginAsking(ctx, t, w, &got)
	}
	if err == nil && !t.server.Equal(w.pos.server) {
		err = fmt.Errorf("%w: %w", errFenced, errServerChanged)
	}
	return got, err
}

// freshMin is the smallest batch for which the form that takes all messages as fresh is worthwhile.
const freshMin = 20

// trusts reports whether to take messages as fresh. Messages that this consumer has handled before
// are likely duplicates, and messages with held keys must be asked for.
func (c *Consumer) trusts(w *work) bool {
	return !w.asks && len(w.msgs) >= freshMin && !w.released() && !c.unclaimed && c.cfg.Dedup == DedupByID && w.msgs[0].Offset >= w.pos.next.Load() &&
		(!c.holdsKeys() || len(w.held.of(w.msgs)) == 0)
}

// beginFresh begins and claims every message as fresh.
func (c *Consumer) beginFresh(ctx context.Context, t *tx, w *work) (got claimed, err error) {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	w.hints = nil
	var forgotten *time.Time
	before := []dedup.Step{
		{SQL: c.beginSQL()},
		{SQL: c.sql[handlertx.GuardSQL]},
		{SQL: c.sql[settingsSQL], Args: c.timeout[:], Into: []any{nil, nil, nil, nil, &t.server, &t.role}},
	}
	var after []dedup.Step
	if c.expires() {
		after = c.claims.ForgottenSteps(w.consumer, &forgotten, c.cfg.Isolation != pgx.ReadCommitted)
	}
	result, err := c.claims.BeginFresh(ctx, t.conn, before, w.consumer, claims(w.msgs), after...)
	if err != nil {
		return got, err
	}
	if forgotten != nil {
		got.forgotten = *forgotten
	}
	got.result, got.fresh = result, result.Fresh()
	return got, nil
}

func (c *Consumer) beginSQL() string { return "BEGIN ISOLATION LEVEL " + string(c.cfg.Isolation) }
