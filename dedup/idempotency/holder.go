package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/pause"
)

// holder has the lock of a key, until the lock expires by the database's clock or another worker
// takes it with a new token. Every write carries the token, so a holder that lost the lock cannot
// store anything.
type holder struct {
	o   *Operation
	key Key
	at  *stored
	// working ends when the lock is lost, not with the caller: work that must not be interrupted
	// uses it.
	working context.Context           //nolint:containedctx // lives from keep to its stop
	renewed atomic.Pointer[time.Time] // when the current lock was requested
	ending  atomic.Bool               // the outcome is about to be stored, which releases the lock

	// About the current phase:
	since    time.Time // an earlier holder may have made its call then; zero: none did
	noted    string    // its name, once its call is recorded
	called   bool      // its call was made and succeeded
	doubtful bool      // such a call may have been made, and its result is not stored
	away     bool      // the connection of its transaction broke
	// expiredPhase is set when rows of an execution before the window were found; finish then fails
	// if another holder has finished it.
	expiredPhase *string
}

// newHolder returns the holder of a key whose lock was requested at the given time.
func newHolder(o *Operation, key Key, at *stored, asked time.Time) *holder {
	h := &holder{o: o, key: key, at: at}
	h.renewed.Store(&asked)
	return h
}

// keep renews the lock until stop is called, and sets h.working.
func (h *holder) keep(ctx context.Context) (stop func()) {
	ctx, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	h.working = ctx
	var group sync.WaitGroup
	group.Go(func() {
		asked := *h.renewed.Load()
		for pause.For(ctx, h.o.cfg.Lock/3-time.Since(asked)) { // from start to start: a renewal that hangs leaves time for another
			asked = time.Now()
			held, err := h.renew(ctx)
			switch {
			case err == nil && held:
			case err == nil || time.Since(*h.renewed.Load()) > h.o.cfg.Lock:
				if ctx.Err() == nil && !h.ending.Load() {
					h.o.cfg.Logger.WarnContext(ctx, "lost the lock of a key, or could not renew it in time: another worker may continue", "key", h.key, "error", err)
				}
				lose(ErrLockLost)
				return
			}
		}
	})
	return func() {
		lose(nil)
		group.Wait()
	}
}

// stolen reports, until stop is called, whether the lock was lost.
func (h *holder) stolen() bool { return errors.Is(context.Cause(h.working), ErrLockLost) }

func (h *holder) renew(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, h.o.cfg.Lock/3)
	defer cancel()
	asked := time.Now()
	held, err := h.update(ctx, h.o.sql[renewSQL], h.o.cfg.Lock, h.o.window())
	if held && err == nil {
		h.renewed.Store(&asked)
	}
	return held, err
}

// statement returns one that writes under the token.
func (h *holder) statement(sql string, args ...any) statement {
	return statement{sql, append([]any{h.key.Scope, h.key.Operation, h.key.Value, h.at.token}, args...)}
}

// finishing returns the statement that stores the outcome, with the phase that made it; nil: none did.
func (h *holder) finishing(phase *string, response Response) (statement, error) {
	out, err := h.o.outcome(h.key, response, h.at.sealed)
	return h.statement(h.o.sql[finishSQL], phase, out.status, out.headers, out.body, out.dropped, h.o.window()), err
}

// update writes under the token, and reports whether the token is still valid. It waits for a phase
// that is being committed, which is a conflict if the role's default isolation is not read
// committed.
func (h *holder) update(ctx context.Context, sql string, args ...any) (bool, error) {
	s, tag := h.statement(sql, args...), pgconn.CommandTag{}
	err := repeat(ctx, func() (err error) {
		tag, err = h.o.pool.Exec(ctx, s.sql, s.args...)
		return err
	})
	return tag.RowsAffected() == 1, err
}

// calling records that a call is about to be made. It takes none of the call's time.
func (h *holder) calling(phase string, kind call) error {
	ctx, cancel := context.WithTimeout(h.working, h.o.cfg.StatementTimeout)
	defer cancel()
	asked := time.Now()
	rows, err := h.o.durably(ctx, h.statement(h.o.sql[callingSQL], phase, kind, h.o.cfg.Lock))
	if err != nil {
		return fmt.Errorf("record the call of phase %q: %w", phase, err)
	}
	if rows == 0 {
		return ErrLockLost
	}
	h.renewed.Store(&asked)
	h.noted, h.doubtful = phase, kind == justOnce
	return nil
}

// unlock releases the lock, so that another worker can continue. It also runs after the caller's
// context ended. If it fails, the lock expires.
func (h *holder) unlock(ctx context.Context, cause error, retryAfter time.Duration, notCalled bool) error {
	ctx, cancel := h.lastWords(ctx)
	defer cancel()
	var withdrawn *string
	if notCalled && h.noted != "" && h.since.IsZero() {
		withdrawn = &h.noted
	}
	if _, err := h.update(ctx, h.o.sql[unlockSQL], text(cause), retryAfter, withdrawn, h.o.window()); err != nil {
		return fmt.Errorf("release the lock of %v, which expires by itself: %w", h.key, err)
	}
	return nil
}

// undecided marks the key for a person, and after wait for the reconciler: by that time a call that
// was on its way has arrived. It reports whether the holder still had the key.
func (h *holder) undecided(ctx context.Context, to state, cause error, wait time.Duration) (bool, error) {
	ctx, cancel := h.lastWords(ctx)
	defer cancel()
	rows, err := h.o.durably(ctx, h.statement(h.o.sql[undecidedSQL], to, text(cause), wait))
	if err != nil {
		return false, fmt.Errorf("mark %v as %s: %w", h.key, to, err)
	}
	if rows > 0 {
		h.o.cfg.Logger.ErrorContext(ctx, "a key needs a person: see outbox-relay keys", "key", h.key, "state", to, "error", cause)
	}
	return rows > 0, nil
}

// doubt marks the key for a person because of a call whose outcome is unknown to this program.
func (h *holder) doubt(ctx context.Context, cause error, wait time.Duration) error {
	_, err := h.undecided(ctx, indeterminate, cause, wait)
	return errors.Join(ErrIndeterminate, cause, err)
}

// finish stores an outcome without effects.
func (h *holder) finish(ctx context.Context, response Response) error {
	ctx, cancel := h.lastWords(ctx)
	defer cancel()
	finishing, err := h.finishing(h.expiredPhase, response)
	if err != nil {
		return err
	}
	_, err = h.o.durably(ctx, finishing)
	if lost(err) {
		return fmt.Errorf("%w: %w", ErrLockLost, err)
	}
	if err != nil {
		return fmt.Errorf("store the outcome of %v: %w", h.key, err)
	}
	return nil
}

// lastWords returns a context that outlives the caller's by up to StatementTimeout.
func (h *holder) lastWords(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), h.o.cfg.StatementTimeout)
}
