package consumer

import (
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// refusals makes a fenced holder wait longer after each refusal: two holders that take a partition
// from each other without a pause would both make no progress. Kafka's assignment decides which one
// keeps it, and needs seconds.
type refusals struct {
	inRow int
	last  time.Time
}

const (
	refusalMin   = time.Second
	refusalMax   = time.Minute
	refusalReset = 5 * time.Minute // without a refusal
)

func (r *refusals) next() time.Duration {
	if time.Since(r.last) > refusalReset {
		r.inRow = 0
	}
	r.last = time.Now()
	r.inRow++
	return min(refusalMin<<min(r.inRow-1, 10), refusalMax)
}

// takeBack takes the position over again after it was refused, or if the outcome of a COMMIT is
// unknown. It returns false if the lane must stop.
func (l *lane) takeBack(f *failure) bool {
	for attempt := 1; ; attempt++ {
		if l.stopped() {
			return false
		}
		if l.work.apart && errors.Is(f.err, errServerChanged) {
			// Only memory knows what the workers have done, and the server may have lost it.
			l.restart(f.err)
			return false
		}
		other, err := l.otherHolder()
		if err == nil {
			if other != "" {
				wait := l.refused.next()
				l.become(StateFenced, f.err)
				l.said.blocks(l, slog.LevelWarn, "another consumer holds the partition; this one waits for the group to decide", f.err, "holder", other, "retry_in", wait)
				l.pause(wait)
				if l.stopped() {
					return false
				}
			}
			ctx, cancel := l.engine.bounded(l.ctx)
			err = l.regain(ctx)
			cancel()
			if err == nil {
				err = l.loadHeld(l.ctx) // the holder in between may have parked messages
			}
			if err == nil {
				l.become(StateRunning, nil)
				return !l.stopped()
			}
			if errors.Is(err, errWentBack) {
				l.restart(err)
				return false
			}
		}
		wait := l.engine.backoff(attempt)
		l.become(StateWaitingForDatabase, err)
		l.said.blocks(l, slog.LevelWarn, "partition waits for the database; nothing is lost", err, "origin", originEngine.String(), "attempt", attempt, "retry_in", wait)
		l.pause(wait)
	}
}

// otherHolder returns the owner of a later epoch; empty: there is none.
func (l *lane) otherHolder() (string, error) {
	ctx, cancel := l.engine.bounded(l.ctx)
	defer cancel()
	pos := l.work.pos
	var epoch int64
	var owner *string
	err := l.engine.pool.QueryRow(ctx, l.engine.sql.holder, l.engine.cfg.Group, pos.topic, pos.partition).Scan(&epoch, &owner)
	if err != nil {
		return "", fmt.Errorf("read who holds the partition: %w", err)
	}
	if epoch <= pos.epoch {
		return "", nil
	}
	if owner == nil || *owner == "" {
		return "unknown", nil
	}
	return *owner, nil
}
