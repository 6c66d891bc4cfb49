package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
)

// newAsks makes the first batch ask: after a restart, the first messages may be the last committed
// ones. (An atomic number, because an abandoned handler may still hold the transaction of a batch
// while its lane runs the next attempt.)
func newAsks() *atomic.Int32 {
	asks := &atomic.Int32{}
	asks.Store(1)
	return asks
}

// asksMax is how many batches ask after one was taken as fresh and had a duplicate: duplicates come in
// runs, and a failed try costs about as much as a successful one saves.
const asksMax = 20

// begin starts the transaction and claims, in one round trip: either it takes every message as
// fresh, or it asks for each. If the first form meets a duplicate, nothing has happened yet, and
// the second one follows. The same constraint decides both; the choice affects only cost.
func (e *engine) begin(ctx context.Context, t *tx, w *work) (claimed, error) {
	ids := e.claimsIDs(w)
	if ids && e.trusts(w) {
		c, err := e.beginFresh(ctx, t, w)
		if err == nil {
			return c, nil
		}
		w.asks.Store(asksMax) // after any other error, too: next is the form without COPY
		if !errors.Is(err, dedup.ErrTaken) {
			return c, err
		}
		limited, cancel := e.bounded(ctx)
		_, err = t.conn.Exec(limited, "ROLLBACK") // it claimed nothing
		if cancel(); err != nil {
			return claimed{}, err
		}
		return e.beginAsking(ctx, t, w)
	}
	c, err := e.beginAsking(ctx, t, w)
	if err == nil && ids && w.asks != nil && w.asks.Load() > 0 {
		w.asks.Add(-1)
	}
	return c, err
}

// claimsIDs reports whether the messages are claimed by ID.
func (e *engine) claimsIDs(w *work) bool {
	return !w.released() && !e.unclaimed && e.cfg.Dedup != DedupByPosition
}

// freshMin is the smallest batch for which the form with COPY is worthwhile.
const freshMin = 20

// trusts reports whether to take messages as fresh. Messages that this consumer has handled before
// are likely duplicates, and messages with held keys must be asked for.
func (e *engine) trusts(w *work) bool {
	if w.asks == nil || len(w.msgs) < freshMin || w.asks.Load() > 0 {
		return false
	}
	if w.msgs[0].Offset < w.pos.next.Load() {
		return false
	}
	return !e.holdsKeys() || len(w.held.of(w.msgs)) == 0
}

// beginFresh begins and claims every message as fresh.
func (e *engine) beginFresh(ctx context.Context, t *tx, w *work) (c claimed, err error) {
	ctx, cancel := e.bounded(ctx)
	defer cancel()
	w.hints = nil
	var server time.Time
	var forgotten *time.Time
	before := []dedup.Step{
		{SQL: e.beginSQL()},
		{SQL: e.sql[guardSQL]},
		{SQL: e.sql[settingsSQL], Args: e.timeout[:], Into: []any{nil, nil, nil, nil, &server, &t.role}},
	}
	var after []dedup.Step
	if e.expires() {
		after = e.claims.ForgottenSteps(w.consumer, &forgotten, e.cfg.Isolation != pgx.ReadCommitted)
	}
	result, err := e.claims.BeginFresh(ctx, t.conn, before, w.consumer, claims(w.msgs), after...)
	if err != nil {
		return c, err
	}
	if !server.Equal(w.pos.server) {
		return c, fmt.Errorf("%w: %w", errFenced, errServerChanged)
	}
	if forgotten != nil {
		c.forgotten = *forgotten
	}
	c.result, c.fresh = result, result.Fresh()
	return c, nil
}

func (e *engine) beginSQL() string { return "BEGIN ISOLATION LEVEL " + string(e.cfg.Isolation) }
