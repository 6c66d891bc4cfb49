package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pause"
)

// phase makes the foreign call, then the writes together with the recovery point.
func (f *Flow[S]) phase(ctx context.Context, h *holder, step *Step[S], phase Phase[S]) error { //nolint:contextcheck // its writes do not end with the caller
	if h.stolen() {
		return ErrLockLost
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	step.phase, h.noted, h.doubtful = phase.Name, "", false
	if h.called = h.at.call == happened; h.called && phase.Write == nil && phase.Name == f.names[len(f.names)-1] {
		return Indeterminate(fmt.Errorf("the call of phase %q happened, and it has no Write that could finish the flow: give its outcome with \"outbox-relay keys finish\"", phase.Name))
	}
	if phase.Call != nil && !h.called {
		if err := f.call(ctx, h, step, phase); err != nil {
			return err
		}
	}
	writing, cancel := context.WithTimeout(h.working, f.cfg.CallMax)
	defer cancel()
	learnt, err := json.Marshal(step.State)
	if err != nil {
		return fmt.Errorf("write the state of %v: %w", h.key, err)
	}
	response := step.response             // as the call left it
	return repeat(writing, func() error { //nolint:contextcheck // its writes do not end with the caller
		var again S // each run starts with the state after the call
		if err := json.Unmarshal(learnt, &again); err != nil {
			return fmt.Errorf("read the state of %v: %w", h.key, err)
		}
		step.State, step.response = again, response
		return f.write(writing, h, step, phase)
	})
}

// call makes the foreign call, which ctx interrupts. An AtMostOnce call is recorded first, and not
// interrupted: its outcome would be unknown.
func (f *Flow[S]) call(ctx context.Context, h *holder, step *Step[S], phase Phase[S]) error {
	if age := time.Since(h.since); !h.since.IsZero() && (phase.AtMostOnce || age > f.cfg.GiveUpAfter) {
		return Indeterminate(fmt.Errorf("call of phase %q: it may have been made %v ago, and is not repeated (the phase is AtMostOnce, or that is more than FlowConfig.GiveUpAfter, %v): the foreign system may have forgotten its key",
			phase.Name, age.Round(time.Second), f.cfg.GiveUpAfter))
	}
	kind := repeatable
	if phase.AtMostOnce {
		kind = justOnce
	}
	if err := h.calling(phase.Name, kind); err != nil { // under the token, which checks the lock
		return err
	}
	if phase.AtMostOnce {
		ctx = h.working //nolint:contextcheck // it does not end with the caller
	}
	ctx = watched(ctx, phase.AtMostOnce)
	ctx, cancel := context.WithTimeout(ctx, f.cfg.CallMax)
	defer cancel()
	defer context.AfterFunc(h.working, cancel)()
	crashpoint.At(ctx, crashpoint.KeyCalling)
	own := *step
	err := f.within(ctx, h.key, func() error { return phase.Call(ctx, &own) })
	if !errors.Is(err, errLeftBehind) {
		*step = own
	}
	err = f.expired(ctx, h, err, phase.Name, false)
	crashpoint.At(ctx, crashpoint.KeyCalled)
	var final *FinalError
	if err == nil {
		h.called = true
		return nil
	}
	if certainlyNotDone(ctx, err) {
		h.doubtful, err = false, NotDone(err) // settle removes the record of the call
	}
	err = fmt.Errorf("call of phase %q: %w", phase.Name, err)
	if h.doubtful && !errors.As(err, &final) {
		err = Indeterminate(err)
	}
	return ofWork(err)
}

// callGrace is how long a call may take to return after its context ended.
const callGrace = time.Second

var errLeftBehind = errors.New("it did not return when its context ended, and was left behind: what it does now is lost")

// within runs a function of the program, and leaves it behind if it does not return soon after ctx ended:
// what it does then must not be used. A panic, or the end of its goroutine, is errUnwound.
func (f *Flow[S]) within(ctx context.Context, key Key, call func() error) error {
	ended := make(chan error, 1)
	f.op.gate.count(key, 1)
	go func() {
		err := errUnwound // unless it returns
		defer func() {
			if p := recover(); p != nil {
				f.op.cfg.Logger.ErrorContext(ctx, "work on a key panicked", "key", key, "panic", p, "stack", string(debug.Stack()))
				err = fmt.Errorf("%w: panic: %v", errUnwound, p)
			}
			ended <- err
			f.op.gate.count(key, -1)
		}()
		err = call()
	}()
	overdue := make(chan struct{})
	defer context.AfterFunc(ctx, func() {
		if pause.For(context.WithoutCancel(ctx), callGrace) {
			close(overdue)
		}
	})()
	select {
	case err := <-ended:
		return err
	case <-overdue:
		return errLeftBehind
	}
}

var errUnwound = errors.New("it panicked, or ended its goroutine")

// expired handles a phase that finds effects of an earlier execution. If no foreign system was
// called before, ErrExpired becomes the outcome. If one was, it may have acted twice, and a person
// decides.
func (f *Flow[S]) expired(ctx context.Context, h *holder, cause error, phase string, asked bool) error {
	var final *FinalError
	given := errors.As(cause, &final)
	err := h.o.expired(ctx, h.key, cause)
	if given || !errors.As(err, &final) {
		return err
	}
	h.expiredPhase = &phase
	for i := 0; !asked && f.phases[i].Name != phase; i++ {
		asked = f.phases[i].Call != nil
	}
	if asked {
		return Indeterminate(final.Err)
	}
	return err
}

// errNoResponse is a programming error in the flow.
var errNoResponse = errors.New("the last phase did not call Finish: nothing was committed")

// write executes the transaction of a phase.
func (f *Flow[S]) write(ctx context.Context, h *holder, step *Step[S], phase Phase[S]) error {
	t, err := h.o.begin(ctx, h.o.cfg.LockTimeout, true, func(*pgx.Batch) {})
	if err != nil {
		return fmt.Errorf("begin phase %q: %w", phase.Name, err)
	}
	defer t.end(ctx)
	if phase.Write != nil {
		own := *step
		err := t.runWork(ctx, func(ctx context.Context, tx pgx.Tx) error {
			return f.within(ctx, h.key, func() error { return phase.Write(ctx, tx, &own) })
		})
		if errors.Is(err, errLeftBehind) {
			_ = t.conn.PgConn().Conn().Close() // what was left behind may have the connection itself
		} else {
			*step = own
		}
		h.away = t.away
		if err != nil {
			t.end(ctx)
			err = f.expired(ctx, h, err, phase.Name, phase.Call != nil)
			return ofWork(fmt.Errorf("phase %q: %w", phase.Name, err))
		}
	}
	crashpoint.At(ctx, crashpoint.KeyWorked)
	if step.response == nil && phase.Name == f.names[len(f.names)-1] {
		return fmt.Errorf("phase %q: %w", phase.Name, errNoResponse)
	}
	state, err := json.Marshal(step.State)
	if err != nil {
		return fmt.Errorf("write the state of %v: %w", h.key, err)
	}
	last, err := f.last(h, step, phase, state)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	crashpoint.At(ctx, crashpoint.KeyCommitting)
	h.ending.Store(step.response != nil)
	if err := t.commit(ctx, func(batch *pgx.Batch) { batch.Queue(last.sql, last.args...) }); err != nil {
		return fmt.Errorf("commit phase %q: %w", phase.Name, err)
	}
	h.at.attempts, h.at.calling, h.at.call, h.doubtful, h.since = 1, nil, "", false, time.Time{}
	return nil
}

// last returns the statement before COMMIT: the recovery point, or the outcome.
func (f *Flow[S]) last(h *holder, step *Step[S], phase Phase[S], data []byte) (statement, error) {
	if step.response != nil {
		return h.finishing(&phase.Name, *step.response)
	}
	data, err := h.o.seal(h.key, "data", data, h.at.sealed)
	return h.statement(h.o.sql[advanceSQL], phase.Name, data), err
}

func (c *FlowConfig[S]) checkDurations() []error {
	return bounds.Durations(
		bounds.Duration{Field: "CallMax", Value: &c.CallMax, Default: 20 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "GiveUpAfter", Value: &c.GiveUpAfter, Default: 22 * time.Hour, Min: max(time.Minute, c.CallMax), Max: 10 * 365 * 24 * time.Hour},
		bounds.Duration{Field: "RetryAfter", Value: &c.RetryAfter, Default: 5 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "CompareEvery", Value: &c.CompareEvery, Default: time.Hour, Min: time.Second, Max: 24 * time.Hour},
		bounds.Duration{Field: "Every", Value: &c.Every, Default: 10 * time.Second, Min: 10 * time.Millisecond, Max: time.Hour},
	)
}
