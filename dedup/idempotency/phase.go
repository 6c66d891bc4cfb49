package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

// phase makes the foreign call, then the writes with the recovery point.
func (f *Flow[S]) phase(ctx context.Context, h *holder, step *Step[S], phase Phase[S]) error {
	if h.stolen() {
		return ErrLockLost
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	step.phase, h.noted, h.called, h.doubtful = phase.Name, "", false, false
	if phase.Call != nil {
		if err := f.call(ctx, h, step, phase); err != nil {
			return err
		}
	}
	writing, cancel := context.WithTimeout(h.working, f.cfg.CallMax)
	defer cancel()
	learnt, err := json.Marshal(step.State) // a transaction that is run again begins with what the call left
	if err != nil {
		return fmt.Errorf("write the state of %v: %w", h.key, err)
	}
	response := step.response // of the call
	for attempt := 1; ; attempt++ {
		err := f.write(writing, h, step, phase) //nolint:contextcheck // it does not end with the caller
		if err == nil || attempt > h.o.cfg.Retries || !conflict(err) {
			return err
		}
		if !pause(writing, rand.N(time.Duration(attempt)*10*time.Millisecond)) { //nolint:contextcheck,gosec // as above; jitter needs no secret
			return errors.Join(writing.Err(), err)
		}
		var again S
		if err := json.Unmarshal(learnt, &again); err != nil {
			return fmt.Errorf("read the state of %v: %w", h.key, err)
		}
		step.State, step.response = again, response
	}
}

// call makes the foreign call, which ctx cuts short. One that must not be made twice is written down before, and not cut
// short: nobody could say what became of it.
func (f *Flow[S]) call(ctx context.Context, h *holder, step *Step[S], phase Phase[S]) error { //nolint:contextcheck // not all of it ends with the caller
	if age := time.Since(h.since); !h.uncalled && !phase.AtMostOnce && age > phase.CallAgainMax {
		return Indeterminate(fmt.Errorf("call of phase %q: it may have been made %v ago, and is made again within %v (Phase.CallAgainMax): the foreign system may have forgotten its key",
			phase.Name, age.Round(time.Second), phase.CallAgainMax))
	}
	if !phase.AtMostOnce { // the note of the others looks at the token
		if err := h.sure(h.working); err != nil {
			return err
		}
	} else {
		if err := h.calling(phase.Name); err != nil {
			return err
		}
		ctx = h.working
	}
	ctx = watched(ctx, phase.AtMostOnce)
	ctx, cancel := context.WithTimeout(ctx, f.cfg.CallMax)
	defer cancel()
	defer context.AfterFunc(h.working, cancel)()
	uncalled := h.uncalled
	h.uncalled = false
	crashpoint.At(ctx, crashpoint.KeyCalling)
	err := f.expired(ctx, h, h.key, phase.Call(ctx, step), nil, phase.Name, false)
	crashpoint.At(ctx, crashpoint.KeyCalled)
	var final *FinalError
	if err == nil {
		h.called = true
		return nil
	}
	if certainlyNotDone(ctx, err) {
		h.doubtful, h.uncalled, err = false, uncalled, NotDone(err) // settle takes the note of the call back
	}
	err = fmt.Errorf("call of phase %q: %w", phase.Name, err)
	if h.doubtful && !errors.As(err, &final) {
		err = Indeterminate(err)
	}
	return ofWork(err)
}

// expired is what becomes of a phase that finds what an earlier execution left: the outcome that says so, where no foreign
// system was asked before. Where one was, it may have acted twice by now, and a person looks.
func (f *Flow[S]) expired(ctx context.Context, h *holder, key Key, cause error, after func() rows, phase string, asked bool) error {
	var final *FinalError
	given := errors.As(cause, &final)
	err := h.o.expired(ctx, key, cause, after)
	if given || !errors.As(err, &final) {
		return err
	}
	h.expired = &phase
	for i := 0; !asked && f.phases[i].Name != phase; i++ {
		asked = f.phases[i].Call != nil
	}
	if asked {
		return Indeterminate(final.Err)
	}
	return err
}

// errNoResponse is a mistake of the flow.
var errNoResponse = errors.New("the last phase did not call Finish: nothing was committed")

// write is the transaction of a phase.
func (f *Flow[S]) write(ctx context.Context, h *holder, step *Step[S], phase Phase[S]) error {
	t, err := h.o.unclaimed(ctx, h.o.sql.flow.guard)
	if err != nil {
		return fmt.Errorf("begin phase %q: %w", phase.Name, err)
	}
	defer t.end(ctx)
	if phase.Write != nil {
		err := t.run(ctx, func(ctx context.Context, tx pgx.Tx) error { return phase.Write(ctx, tx, step) })
		h.away = t.away
		if err != nil {
			t.end(ctx)
			own := h.key.Watch() // only that: what else was derived may be of a phase that is done
			own.ChildID(phase.Name)
			err = f.expired(ctx, h, own, err, func() rows { return h.o.pool }, phase.Name, phase.Call != nil)
			return ofWork(fmt.Errorf("phase %q: %w", phase.Name, err))
		}
	}
	crashpoint.At(ctx, crashpoint.KeyWorked)
	if step.response == nil && phase.Name == f.names[len(f.names)-1] {
		return fmt.Errorf("phase %q: %w", phase.Name, errNoResponse)
	}
	next, err := step.stored.with(step.State)
	if err != nil {
		return fmt.Errorf("%v: %w", h.key, err)
	}
	last, err := f.last(h, step, phase, next.text)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	crashpoint.At(ctx, crashpoint.KeyCommitting)
	h.ending.Store(step.response != nil)
	err = t.commit(ctx, func(batch *pgx.Batch) {
		batch.Queue(closeGuardSQL)
		last(batch)
	})
	if err != nil {
		return fmt.Errorf("commit phase %q: %w", phase.Name, err)
	}
	h.at.attempts, h.doubtful, h.uncalled, step.stored = 1, false, true, next
	return nil
}

// last is the statement before COMMIT: the recovery point, or the outcome.
func (f *Flow[S]) last(h *holder, step *Step[S], phase Phase[S], data []byte) (func(*pgx.Batch), error) {
	o, key := h.o, h.key
	if step.response != nil {
		out, err := o.outcome(key, *step.response, h.at.sealed)
		return func(batch *pgx.Batch) {
			batch.Queue(o.sql.flow.finish, key.Scope, key.Operation, key.Value, h.at.token, phase.Name, out.status, out.headers, out.body, out.dropped, o.window())
		}, err
	}
	data, err := o.seal(key, "data", data, h.at.sealed)
	if err != nil {
		return nil, err
	}
	return func(batch *pgx.Batch) {
		batch.Queue(o.sql.flow.advance, key.Scope, key.Operation, key.Value, h.at.token, phase.Name, data)
	}, nil
}

func (c *FlowConfig[S]) checkDurations() []error {
	return bounds.Durations(
		bounds.Duration{Field: "CallMax", Value: &c.CallMax, Default: 20 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "RetryAfter", Value: &c.RetryAfter, Default: 5 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "AgeMax", Value: &c.AgeMax, Default: 24 * time.Hour, Min: time.Minute, Max: 10 * 365 * 24 * time.Hour},
		bounds.Duration{Field: "Every", Value: &c.Every, Default: 10 * time.Second, Min: 10 * time.Millisecond, Max: time.Hour},
	)
}
