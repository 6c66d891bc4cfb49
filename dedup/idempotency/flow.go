package idempotency

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// Flow executes a request in atomic phases: each commits its writes together with its recovery point, and no
// transaction is open while a foreign system is asked. A flow that was cut off goes on at the first phase that is not
// done, when the request comes again or the completer finds it, on any replica. S is what phases hand on to later
// ones; it is stored as JSON.
//
// The idea is Brandur Leach's, after Stripe: https://brandur.org/idempotency-keys.
type Flow[S any] struct {
	op     *Operation
	cfg    FlowConfig[S]
	phases []Phase[S]
	names  []string
}

// FlowConfig of a Flow. The zero value works.
type FlowConfig[S any] struct {
	// StoreRequest keeps what was asked for until the outcome is there, so that the completer (Flow.Run) can finish what a
	// client gave up. Default: such a flow waits for its client.
	StoreRequest bool
	// CallMax is how long a foreign call may take, and how long the transaction of a phase. 1 ms to 1 h; default 1 min.
	CallMax time.Duration
	// RetryAfter is how long the completer leaves a flow alone that failed, or whose phases it does not know, doubled with each
	// attempt up to a hundred times. 1 ms to 1 h; default 5 s.
	RetryAfter time.Duration
	// Every is how often Run looks for what is abandoned, undecided or old. 10 ms to 1 h; default 10 s.
	Every time.Duration
	// Reconcile asks the foreign system, or its records, what became of a call whose outcome is unknown. It is not asked about
	// keys of Operation.Once. Default: a person decides.
	Reconcile func(ctx context.Context, undecided UndecidedKey[S]) (Decision, error)
}

// Phase is a step of a flow, between two recovery points.
type Phase[S any] struct {
	// Name of the recovery point behind it. It is stored: phases of flows that are under way must keep their names and
	// their order; new ones may be added at the end. 1 to 255 bytes.
	Name string
	// Call asks a foreign system, under step.ChildID() as its idempotency key. No transaction is open. It may be
	// made again, after a crash: with the same key. What it learns goes into step.State. Default: none.
	Call func(ctx context.Context, step *Step[S]) error
	// AtMostOnce says that the foreign system does not deduplicate: a call whose outcome is unknown is never made again
	// by itself, and makes the key indeterminate. An error of Call is taken for that, unless it is one of NotDone, NotSent or Final.
	//
	// Call must send its request once. A Transport of net/http sends one with an Idempotency-Key again by itself where a connection that
	// was used before is closed, after the server acted as well: two payments. Over HTTP use keyclient.Single, or a
	// keyclient.Transport, with the ctx of the Call, and no Timeout of the http.Client, which hides what the error shows: a bank
	// that refuses connections then leaves no key in doubt. Make one request that acts for each phase.
	AtMostOnce bool
	// Write changes the database, in one transaction with the recovery point. Like the work of Once it may run more than
	// once. Default: only the recovery point.
	Write func(ctx context.Context, tx pgx.Tx, step *Step[S]) error
}

// Step is what a phase has to do with.
type Step[S any] struct {
	// Key of the request.
	Key Key
	// State is what was stored with the last recovery point. What Call and Write change is stored with the next.
	State S
	// Request that was given to Do, or was stored.
	Request []byte
	// Attempt counts from 1, since the last recovery point.
	Attempt int

	phase    string
	response *Response
}

// ChildID is Key.ChildID of the phase.
func (s *Step[S]) ChildID() uuid.UUID { return s.Key.ChildID(s.phase) }

// Finish ends the flow with this phase, and says what the client gets. The last phase must call it.
func (s *Step[S]) Finish(response Response) { s.response = &response }

// NewFlow returns a flow, or all problems at once. An operation has one flow: completer and reconciler look after all keys of
// the operation, and leave those alone of which they cannot tell whose they are, where this process made flows with other
// phases of it. Nobody can tell where it is two Operations with one name, or two programs, nor where the phases of one flow
// are the first ones of the other, which is taken for its next release: give each flow an operation with a name of its own.
func NewFlow[S any](op *Operation, cfg FlowConfig[S], phases ...Phase[S]) (*Flow[S], error) {
	f := &Flow[S]{op: op, cfg: cfg, phases: phases}
	var problems []error
	if op == nil {
		problems = append(problems, errors.New("operation is nil"))
	} else if op.cfg.Isolation != pgx.ReadCommitted {
		problems = append(problems, fmt.Errorf("Config.Isolation of the operation is %q: want read committed, since the lock of a key is renewed while a phase writes", op.cfg.Isolation))
	}
	if len(phases) == 0 || len(phases) > phasesMax {
		problems = append(problems, fmt.Errorf("%d phases: want 1 to %d", len(phases), phasesMax))
	}
	for i, phase := range phases {
		switch {
		case phase.Name == "" || len(phase.Name) > keyBytesMax || !readable(phase.Name):
			problems = append(problems, fmt.Errorf("name of phase %d: want 1 to %d bytes of UTF-8 without control characters", i, keyBytesMax))
		case slices.Contains(f.names, phase.Name):
			problems = append(problems, fmt.Errorf("phase %q is there twice", phase.Name))
		case phase.Call == nil && phase.Write == nil:
			problems = append(problems, fmt.Errorf("phase %q does nothing: want Call or Write", phase.Name))
		case phase.AtMostOnce && phase.Call == nil:
			problems = append(problems, fmt.Errorf("phase %q is AtMostOnce and has no Call", phase.Name))
		}
		f.names = append(f.names, phase.Name)
	}
	problems = append(problems, checkDurations(&f.cfg.CallMax, &f.cfg.RetryAfter, &f.cfg.Every)...)
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	op.flows.Lock()
	defer op.flows.Unlock()
	if !slices.ContainsFunc(op.flows.phases, func(known []string) bool { return slices.Equal(known, f.names) }) {
		op.flows.phases = append(op.flows.phases, f.names)
	}
	return f, nil
}

// phasesMax bounds the array in the row.
const phasesMax = 100

// Do executes the flow under a key, from its recovery point on, and returns its outcome. request is what was asked for,
// for the phases; it is stored only with StoreRequest.
//
// A phase that fails ends the flow for now: its writes are rolled back, the recovery points before it stay, and the lock is
// given up, so that the next request with the key goes on there at once; without Config.AttemptsMax, a phase that failed
// ten times waits for what RetryAfter has become (ErrInProgress). Final makes the failure the outcome.
// Errors are those of Once, and ErrIndeterminate, ErrUnknownRecoveryPoint, ErrLockLost. When ctx ends the flow stops
// between two phases, and can be resumed: a call that may be made again is cut short, and one that is AtMostOnce, and what a
// phase writes, comes to its end first, within CallMax.
func (f *Flow[S]) Do(ctx context.Context, key Key, request []byte) (Response, error) {
	key, err := f.op.complete(key)
	if err != nil {
		return f.op.answered(Response{}, err)
	}
	deadline := time.Now().Add(f.op.cfg.WaitMax)
	for {
		response, err := f.do(ctx, key, request)
		if !errors.Is(err, ErrInProgress) || time.Now().After(deadline) || !pause(ctx, askEvery) {
			return f.op.answered(response, err)
		}
	}
}

// askEvery is how often a request that waits for another one looks.
const askEvery = 50 * time.Millisecond

func (f *Flow[S]) do(ctx context.Context, key Key, request []byte) (Response, error) {
	h, response, err := f.claim(ctx, key, request)
	if h == nil {
		return response, err
	}
	crashpoint.At(ctx, crashpoint.KeyClaimed)
	return f.drive(ctx, h, request)
}

// claim takes the key's lock. Without it, it returns what the key says.
func (f *Flow[S]) claim(ctx context.Context, key Key, request []byte) (*holder, Response, error) {
	o := f.op
	sealed := o.cfg.Seal != nil
	var kept []byte
	if f.cfg.StoreRequest {
		var err error
		if kept, err = o.seal(key, "request", append([]byte{}, request...), sealed); err != nil {
			return nil, Response{}, err
		}
	}
	for range claimsMax {
		s, err := read(o.pool.QueryRow(ctx, o.sql.flow.claim, key.Scope, key.Operation, key.Value, key.Fingerprint[:], sealed, o.cfg.Lock, o.cfg.Owner, kept))
		switch {
		case conflict(err), err == nil && s == nil:
			continue // it was committed while the insert waited: an error where the role's default is not read committed
		case err != nil:
			return nil, Response{}, fmt.Errorf("claim %v: %w", key, err)
		case s.made:
			s.sealed = sealed
			return newHolder(o, key, s), Response{}, nil
		}
		h, response, err := f.take(ctx, key, s)
		if h != nil || err != nil || response.Replayed {
			return h, response, err
		}
	}
	return nil, Response{}, &InProgressError{RetryAfter: time.Second} // it changes hands all the time
}

// several tells of phases that are done, on behalf of nobody who knows the flow, that they begin another flow of the operation,
// too: one that is no earlier or later release of this one.
func (f *Flow[S]) several(done []string) error {
	f.op.flows.Lock()
	defer f.op.flows.Unlock()
	for _, other := range f.op.flows.phases {
		if begins(done, f.names) && begins(done, other) && !begins(other, f.names) && !begins(f.names, other) {
			return fmt.Errorf("%w: done are %q, and flows of %q and of %q begin so: give each an operation with a name of its own", ErrUnknownRecoveryPoint, done, f.names, other)
		}
	}
	return nil
}

// take takes over a key that nobody holds. It returns nothing if somebody was faster.
func (f *Flow[S]) take(ctx context.Context, key Key, s *stored) (*holder, Response, error) {
	o := f.op
	if response, ok, err := o.answer(key, s); ok {
		return nil, response, err
	}
	if !begins(s.phases, f.names) || len(s.phases) == len(f.names) {
		o.cfg.Logger.ErrorContext(ctx, "a key has phases done that this program does not know; nothing is run again until a program with them, or a person, finishes it",
			"key", key, "done", s.phases, "known", f.names)
		return nil, Response{}, fmt.Errorf("%w: done are %q, known %q", ErrUnknownRecoveryPoint, s.phases, f.names)
	}
	// Where a call may be under way that must not be made twice, the key is in doubt, however many attempts there were.
	if s.calling == nil && s.attempts >= cmp.Or(o.cfg.AttemptsMax, attemptsOfAll) {
		mine, err := newHolder(o, key, s).undecided(ctx, abandoned, errors.New("its attempts are used up"), 0)
		if mine || err != nil {
			err = errors.Join(ErrAbandoned, err)
		}
		return nil, Response{}, err
	}
	// A client that tries again and again must not use the attempts up within seconds.
	if s.putOff > 0 && o.cfg.AttemptsMax == 0 && s.attempts >= attemptsOfAll/2 {
		return nil, Response{}, &InProgressError{RetryAfter: max(s.putOff, time.Second).Round(time.Second)}
	}
	err := o.pool.QueryRow(ctx, o.sql.flow.take, key.Scope, key.Operation, key.Value, s.token, o.cfg.Lock, o.cfg.Owner, key.Fingerprint[:], s.phases, s.calling).
		Scan(&s.data, &s.request, &s.sealed, &s.attempts)
	if errors.Is(err, pgx.ErrNoRows) || conflict(err) {
		return nil, Response{}, nil
	}
	if err != nil {
		return nil, Response{}, fmt.Errorf("take over %v: %w", key, err)
	}
	s.token++
	h := newHolder(o, key, s)
	if s.calling == nil {
		return h, Response{}, nil
	}
	// Whoever had it died in a call that must not be made twice.
	mine, err := h.undecided(ctx, indeterminate, fmt.Errorf("worker ended during the call of phase %q", *s.calling), f.cfg.CallMax)
	if mine || err != nil {
		err = errors.Join(ErrIndeterminate, err)
	}
	return nil, Response{}, err
}

// drive goes through the phases that are not done, under the lock.
func (f *Flow[S]) drive(ctx context.Context, h *holder, request []byte) (Response, error) {
	stop := h.keep(ctx)
	defer stop()
	step, err := f.step(h, request)
	if err != nil {
		return Response{}, errors.Join(err, h.unlock(ctx, err, f.retryAfter(h), false))
	}
	for _, phase := range f.phases[len(h.at.phases):] {
		if err := f.phase(ctx, h, step, phase); err != nil {
			stolen := h.stolen()
			stop() // or it would renew what is given up
			return f.settle(ctx, h, err, stolen)
		}
		if step.response != nil {
			crashpoint.At(ctx, crashpoint.KeyCommitted)
			return *step.response, nil
		}
		step.Attempt = 1
		crashpoint.At(ctx, crashpoint.KeyAdvanced)
	}
	panic("unreachable: the last phase finishes, or fails")
}

func (f *Flow[S]) step(h *holder, request []byte) (*Step[S], error) {
	step := &Step[S]{Key: h.key, Request: request, Attempt: h.at.attempts}
	if h.at.data == nil {
		return step, nil
	}
	data, err := h.o.open(h.key, "data", h.at.data, h.at.sealed)
	if err == nil {
		err = json.Unmarshal(data, &step.State)
	}
	if err != nil {
		return nil, fmt.Errorf("read what the phases of %v stored: %w", h.key, err)
	}
	return step, nil
}

// retryAfter is when the completer comes back to a flow that failed.
func (f *Flow[S]) retryAfter(h *holder) time.Duration {
	return f.cfg.RetryAfter * time.Duration(min(1<<min(h.at.attempts-1, 10), 100))
}

// settle is what becomes of a phase that failed.
func (f *Flow[S]) settle(ctx context.Context, h *holder, cause error, stolen bool) (Response, error) {
	var final *FinalError
	var unknown *indeterminateError
	var not *notDoneError
	var work *workError
	switch {
	case errors.As(cause, &final):
		err := h.finish(ctx, final.Response)
		if err != nil && !errors.Is(err, ErrLockLost) && !errors.Is(err, ErrUnanswered) {
			err = errors.Join(err, h.unlock(ctx, err, f.retryAfter(h), false))
		}
		return final.Response, err
	case errors.As(cause, &unknown):
		return Response{}, h.doubt(ctx, cause, f.cfg.CallMax)
	case lost(cause), stolen:
		return Response{}, fmt.Errorf("%w: %w", ErrLockLost, cause)
	case errors.Is(cause, ErrUnanswered):
		return Response{}, cause // it may be done: the lock runs out, and the next one sees
	case h.doubtful: // the call was made, and what it found out could not be stored
		return Response{}, h.doubt(ctx, cause, f.cfg.CallMax)
	case h.o.cfg.Strict && errors.As(cause, &work) && !h.away && !outage(cause) && !conflict(cause) && ctx.Err() == nil:
		response := h.o.cfg.Failed(cause)
		return response, h.finish(ctx, response)
	}
	return Response{}, errors.Join(cause, h.unlock(ctx, cause, f.retryAfter(h), !h.called && errors.As(cause, &not)))
}
