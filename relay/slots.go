package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// Limits of tidying up. Every statement that reads the outbox queues behind a waiting lock request,
// so that wait is short. A process that freezes with the lock loses it.
const (
	tidyMax      = 10 * time.Second
	slotBytesMax = 256 << 20
	slotLockMax  = 20 * time.Millisecond
	slotIdleMax  = 3 * time.Second
	// pruneTicksMax and pruneDiscardedMax bound how many ticks and discarded rows are forgotten at a time.
	pruneTicksMax     = 20_000
	pruneDiscardedMax = 5000
)

// slot is a partition of the outbox.
type slot struct {
	number  int16
	current bool // new rows go there
	bytes   int64
	rotate  bool // it is old or large enough to turn to the next slot
	kept    bool // its rows have been kept for as long as Keep requires
}

// tidy forgets ticks that no progress refers to, turns to the next slot, and truncates slots whose rows are
// published by all relays. The
// replica with shard 0 does it. Two replicas that both believe to have shard 0 do no harm: each
// step decides by its own locks.
func (m *member) tidy(ctx context.Context) {
	if m.workers[0] == nil {
		for slot := range m.slotWaits {
			m.truncateWaits(ctx, slot, false)
		}
	}
	if m.workers[0] == nil || time.Since(m.tidied) < min(m.cfg.Keep/4, tidyMax) {
		return
	}
	m.tidied = time.Now()
	err := m.tidyUp(ctx, m.workers[0].lease.cluster)
	if pgerr.Is(err, pgerr.InsufficientPrivilege) {
		m.tidied = m.tidied.Add(time.Hour) // until the right is granted, an hourly warning is enough
	}
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		m.say.warn(ctx, "published rows could not be removed; the relay retries", "relay", m.cfg.Name, "error", err)
	}
}

func (r *Relay) tidyUp(ctx context.Context, here cluster) error {
	if _, err := r.pool.Exec(ctx, r.sql.of(pruneSQL), pruneTicksMax); err != nil {
		return fmt.Errorf("forget old ticks: %w", err)
	}
	rows, err := r.pool.Query(ctx, r.sql.of(slotsSQL), r.cfg.Keep, slotBytesMax)
	if err != nil {
		return fmt.Errorf("read the slots: %w", err)
	}
	slots, err := pgx.CollectRows(rows, func(c pgx.CollectableRow) (s slot, err error) {
		return s, c.Scan(&s.number, &s.current, &s.bytes, &s.rotate, &s.kept)
	})
	if err != nil {
		return fmt.Errorf("read the slots: %w", err)
	}
	for i, s := range slots {
		locked := false
		switch {
		case s.current && s.rotate:
			// A slot that a long transaction keeps is left out.
			around := append(slots[i+1:len(slots):len(slots)], slots[:i]...)
			next := slices.IndexFunc(around, func(s slot) bool { return s.bytes == 0 })
			if next < 0 {
				continue
			}
			if _, err := r.pool.Exec(ctx, r.sql.of(rotateSQL), s.number, around[next].number); err != nil {
				return fmt.Errorf("turn to slot %d: %w", around[next].number, err)
			}
		case !s.current && s.kept && s.bytes > 0:
			if locked, err = r.truncate(ctx, s.number, here); err != nil {
				return fmt.Errorf("truncate slot %d: %w", s.number, err)
			}
		}
		r.truncateWaits(ctx, s.number, locked)
	}
	if _, err := r.pool.Exec(ctx, r.sql.of(pruneDiscardedSQL), pruneDiscardedMax); err != nil {
		return fmt.Errorf("forget discarded rows: %w", err)
	}
	return nil
}

// truncateWaits records whether a lock keeps the published rows of a slot. It logs a lock from the
// second attempt in a row on: a short one is not worth a line.
func (r *Relay) truncateWaits(ctx context.Context, slot int16, locked bool) {
	since, waits := r.slotWaits[slot]
	if !waits && locked {
		r.slotWaits[slot] = time.Now()
	}
	if !waits {
		return
	}
	text := fmt.Sprintf("published rows of slot %d cannot be removed: a transaction holds a lock on it; the outbox grows until that transaction ends; nothing else waits; outbox-relay doctor names its session", slot)
	var waited time.Duration
	if locked {
		waited = time.Since(since)
		r.say.warn(ctx, text, "relay", r.cfg.Name)
	} else {
		delete(r.slotWaits, slot)
		r.say.over(ctx, text, "published rows no longer wait for a lock", "relay", r.cfg.Name, "slot", slot)
	}
	if r.cfg.Hooks.TruncateWaits != nil {
		r.cfg.Hooks.TruncateWaits(slot, waited)
	}
}

// truncate empties a slot, unless it has rows that some relay has not published, or another session
// has locked it. The lock ensures that there are no uncommitted rows: their transaction would also
// hold a lock.
func (r *Relay) truncate(ctx context.Context, slot int16, here cluster) (locked bool, err error) {
	unpublished := func(q execer) (found bool, err error) {
		err = q.QueryRow(ctx, fmt.Sprintf(r.sql.of(unpublishedSQL), slot), here.system).Scan(&found)
		return found, err
	}
	if found, err := unpublished(r.pool); err != nil || found {
		return false, err
	}
	// Read committed, whatever the role's default is: the second check must see what came before
	// the lock.
	err = pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockSettingsSQL, milliseconds(slotLockMax), milliseconds(slotIdleMax)); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, fmt.Sprintf(r.sql.of(lockSlotSQL), slot)); err != nil {
			return err
		}
		found, err := unpublished(tx)
		if err != nil || found {
			return err
		}
		if _, err := tx.Exec(ctx, fmt.Sprintf(r.sql.of(truncateSQL), slot)); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, r.sql.of(truncatedSQL), slot)
		return err
	})
	if pgerr.Is(err, pgerr.LockNotAvailable) {
		return true, nil
	}
	return false, err
}

func milliseconds(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }
