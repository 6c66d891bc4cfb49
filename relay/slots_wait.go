package relay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// A relay logs that a slot cannot be truncated at the second attempt in a row (a short lock is not
// worth a log line), then after truncateSaid, and then at growing intervals.
const (
	truncateSaid     = 30 * time.Second
	truncateSaidMax  = 10 * time.Minute
	truncateHolders  = 5
	truncateHoldWait = time.Second // for the query for the holders of the lock
)

// slotWait is a slot whose published rows cannot be removed because of a lock.
type slotWait struct {
	since, next time.Time     // when it is logged next
	pause       time.Duration // until it is logged again
}

// truncateWaits records an attempt that met a lock, and logs which sessions hold it.
func (r *Relay) truncateWaits(ctx context.Context, slot int16) {
	now := time.Now()
	w := r.slotWaits[slot]
	if w == nil {
		if r.slotWaits == nil {
			r.slotWaits = map[int16]*slotWait{}
		}
		w = &slotWait{since: now, next: now, pause: truncateSaid}
		r.slotWaits[slot] = w
		return
	}
	waiting := now.Sub(w.since)
	if r.cfg.Hooks.TruncateWaits != nil {
		r.cfg.Hooks.TruncateWaits(slot, waiting)
	}
	if now.Before(w.next) {
		return
	}
	w.next, w.pause = now.Add(w.pause), min(2*w.pause, truncateSaidMax)
	r.cfg.Logger.WarnContext(ctx, "published rows cannot be removed: a transaction holds a lock on their slot; the outbox grows until that transaction ends; nothing else waits",
		"relay", r.cfg.Name, "slot", slot, "waiting", waiting.Round(time.Millisecond), "held_by", r.slotHolders(ctx, slot))
}

// truncateUnblocked records that a slot does not wait, or that this replica no longer handles it.
func (r *Relay) truncateUnblocked(ctx context.Context, slot int16, why string) {
	w := r.slotWaits[slot]
	if w == nil {
		return
	}
	delete(r.slotWaits, slot)
	if r.cfg.Hooks.TruncateWaits != nil {
		r.cfg.Hooks.TruncateWaits(slot, 0)
	}
	if w.next.After(w.since) { // it was logged
		r.cfg.Logger.InfoContext(ctx, "published rows no longer wait for a lock", "relay", r.cfg.Name, "slot", slot,
			"because", why, "waited", time.Since(w.since).Round(time.Millisecond))
	}
}

// slotHolders names the sessions that hold a lock on a slot, for the log. If the query fails, it
// returns the error text.
func (r *Relay) slotHolders(ctx context.Context, slot int16) string {
	ctx, cancel := context.WithTimeout(ctx, truncateHoldWait)
	defer cancel()
	rows, err := r.pool.Query(ctx, fmt.Sprintf(r.sql.slotHolders, slot), truncateHolders)
	if err != nil {
		return err.Error()
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	switch {
	case err != nil:
		return err.Error()
	case len(names) == 0:
		return "no session any longer"
	}
	return strings.Join(names, ", ")
}
