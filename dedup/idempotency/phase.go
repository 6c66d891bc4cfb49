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
	"github.com/effectonce/effectonce/internal/pause"
)

// phase makes the foreign call, then the writes together with the recovery point.
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
	learnt, err := json.Marshal(step.State) // a retried transaction starts with the state after the call
	if err != nil {
		return fmt.Errorf("write the state of %v: %w", h.key, err)
	}
	response := step.response // as the call left it
	for attempt := 1; ; attempt++ {
		err := f.write(writing, h, step, phase) //nolint:contextcheck // it does not end with the caller
		if err == nil || attempt > h.o.cfg.Retries || !conflict(err) {
			return err
		}
		if !pause.For(writing, rand.N(time.Duration(attempt)*10*time.Millisecond)) { //nolint:contextcheck,gosec // as above; jitter needs no secret
			return errors.Join(writing.Err(), err)
		}
		var again S
		if err := json.Unmarshal(learnt, &again); err != nil {
			return fmt.Errorf("read the state of %v: %w", h.key, err)
		}
		step.State, step.response = again, response
	}
}

// call makes the foreign call, which ctx interrupts. An AtMostOnce call is recorded first, and not
// interrupted: its outcome would be unknown.
func (f *Flow[S]) call(ctx context.Context, h *holder, step *Step[S], phase Phase[S]) error { //nolint:contextcheck // not all of it ends with the caller
	if age := time.Since(h.since); !h.uncalled && !phase.AtMostOnce && age > phase.CallAgainMax {
		return Indeterminate(fmt.Errorf("call of phase %q: it may have been made %v ago, more than Phase.CallAgainMax, %v: the foreign system may have forgotten its key",
			phase.Name, age.Round(time.Second), phase.CallAgainMax))
	}
	if !phase.AtMostOnce { // an AtMostOnce call is recorded under the token, which checks the lock
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
		h.doubtful, h.uncalled, err = false, uncalled, NotDone(err) // settle removes the record of the call
	}
	err = fmt.Errorf("call of phase %q: %w", phase.Name, err)
	if h.doubtful && !errors.As(err, &final) {
		err = Indeterminate(err)
	}
	return ofWork(err)
}

// expired handles a phase that finds effects of an earlier execution. If no foreign system was
// called before, ErrExpired becomes the outcome. If one was, it may have acted twice, and a person
// decides.
func (f *Flow[S]) expired(ctx context.Context, h *holder, key Key, cause error, after func() rows, phase string, asked bool) error {
	var final *FinalError
	given := errors.As(cause, &final)
	err := h.o.expired(ctx, key, cause, after)
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
	t, err := h.o.unclaimed(ctx, h.o.sql.flow.guard)
	if err != nil {
		return fmt.Errorf("begin phase %q: %w", phase.Name, err)
	}
	defer t.end(ctx)
	if phase.Write != nil {
		err := t.runWork(ctx, func(ctx context.Context, tx pgx.Tx) error { return phase.Write(ctx, tx, step) })
		h.away = t.away
		if err != nil {
			t.end(ctx)
			own := h.key.Watch() // only this phase's ID: others may belong to phases that are done
			own.ChildID(phase.Name)
			err = f.expired(ctx, h, own, err, func() rows { return h.o.pool }, phase.Name, phase.Call != nil)
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
	err = t.commit(ctx, func(batch *pgx.Batch) {
		batch.Queue(closeGuardSQL)
		last(batch)
	})
	if err != nil {
		return fmt.Errorf("commit phase %q: %w", phase.Name, err)
	}
	h.at.attempts, h.doubtful, h.uncalled = 1, false, true
	return nil
}

// last returns the statement before COMMIT: the recovery point, or the outcome.
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
		bounds.Duration{Field: "Every", Value: &c.Every, Default: 10 * time.Second, Min: 10 * time.Millisecond, Max: time.Hour},
	)
}
