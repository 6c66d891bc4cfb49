package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

// Flow executes a request in atomic phases: each phase commits its writes together with its
// recovery point, and no transaction is open during a foreign call. An interrupted flow continues
// at the first phase that is not done, when the request is retried or the completer finds it, on
// any replica. S is the state that phases pass on to later ones; it is stored as JSON. A phase that an
// older release executes drops members that its S does not have: a new member needs a phase of a new
// name that sets it, since a release leaves keys alone whose phases it does not know.
//
// The idea is Brandur Leach's, after Stripe: https://brandur.org/idempotency-keys.
type Flow[S any] struct {
	op     *Operation
	cfg    FlowConfig[S]
	phases []Phase[S]
	names  []string
	// Slots that bound how many keys are completed, and reconciled, at a time.
	completing, reconciling chan struct{}
}

// FlowConfig of a Flow. The zero value works.
type FlowConfig[S any] struct {
	// StoreRequest stores the request until the outcome is stored, so that the completer (Flow.Run)
	// can finish a flow whose client gave up. Default: such a flow waits for its client.
	StoreRequest bool
	// CallMax bounds the duration of a foreign call, and of the transaction of a phase. 1 ms to 1
	// h; default 20 s. A call that does not return when its context ends is left behind: the key is
	// free again, for another worker, or in doubt (AtMostOnce), and what the call returns later is lost.
	// An AtMostOnce call must respect its context: otherwise it may act after the key was decided.
	CallMax time.Duration
	// GiveUpAfter is how long a flow is tried, by the database's clock, counted from its request, or from
	// its last phase or decision. Then it is abandoned (ErrAbandoned): a person decides. Once a call may
	// have been made, its age counts instead: an older one is not repeated, and the key becomes
	// indeterminate. After NotDone, a context that ended before the call, or a decision that it did not
	// happen, a call has no age. 1 min, or CallMax if that is more, to 10 years; default 22 h: many systems
	// forget idempotency keys after 24 h.
	GiveUpAfter time.Duration
	// RetryAfter is how long the completer waits at least after a flow failed, or after it met phases
	// that it does not know: as long as the flow was tried so far, so that the pause doubles each time, up
	// to a hundred times this value. 1 ms to 1 h; default 5 s.
	RetryAfter time.Duration
	// AtOnceMax is how many flows Run and Complete execute at a time, and how many keys are
	// reconciled at a time. None of them holds a connection while it waits for a foreign system. 1
	// to 1,000; default 8.
	AtOnceMax int
	// Every is how often Run checks for abandoned, indeterminate and old keys. 10 ms to 1 h;
	// default 10 s.
	Every time.Duration
	// Ledgers are what foreign systems say that they did, by the name of the phase that calls them. Run compares
	// them with the keys: see Flow.Compare. Default: none.
	Ledgers map[string]Ledger
	// CompareEvery is how often. 1 s to 24 h; default 1 h.
	CompareEvery time.Duration
	// Reconcile asks the foreign system, or its records, for the result of a call whose outcome is
	// unknown. It is not called for keys of Operation.Once. It is called concurrently for several
	// keys. Default: a person decides.
	Reconcile func(ctx context.Context, undecided UndecidedKey[S]) (Decision, error)
}

// Phase is a step of a flow, between two recovery points.
type Phase[S any] struct {
	// Name of the recovery point after the phase. It is stored: phases of unfinished flows must
	// keep their names and their order; new phases may be added at the end. 1 to 255 bytes.
	Name string
	// Call calls a foreign system, with step.ChildID() as its idempotency key. No transaction is
	// open. After a crash it may be repeated, with the same key. Its results go into step.State.
	// Default: none.
	Call func(ctx context.Context, step *Step[S]) error
	// AtMostOnce means that the foreign system does not deduplicate: a call whose outcome is
	// unknown is never repeated automatically, and makes the key indeterminate. Any error of Call
	// counts as unknown, unless it is NotDone or Final, or an error of keyclient.Single before there
	// was a connection.
	//
	// Call must send its request once, and only one with an effect: over HTTP with keyclient.Single, or a
	// keyclient.Transport, whose package tells why, and with the ctx of the Call. Then a bank that refuses
	// connections leaves no key in doubt. Set no http.Client.Timeout, which hides the cause of an error.
	AtMostOnce bool
	// Write changes the database, in one transaction with the recovery point. Like the work of Once
	// it may run more than once. Default: it only stores the recovery point.
	Write func(ctx context.Context, tx pgx.Tx, step *Step[S]) error
}

// Step is the input and output of a phase.
type Step[S any] struct {
	// Key of the request, without its Fingerprint, which a completer does not know.
	Key Key
	// State is what was stored with the last recovery point. Changes by Call and Write are stored
	// with the next one.
	State S
	// Request is what Do was given, or what was stored.
	Request []byte
	// Attempt counts the attempts since the last recovery point, from 1.
	Attempt int

	phase    string
	response *Response
}

// ChildID returns Key.ChildID of the phase.
func (s *Step[S]) ChildID() uuid.UUID { return s.Key.ChildID(s.phase) }

// Finish ends the flow with this phase, and sets the response for the client. The last phase must
// call it.
func (s *Step[S]) Finish(response Response) { s.response = &response }

// NewFlow returns the flow of an operation, or all problems at once. An operation has one flow.
func NewFlow[S any](op *Operation, cfg FlowConfig[S], phases ...Phase[S]) (*Flow[S], error) {
	f := &Flow[S]{op: op, cfg: cfg, phases: slices.Clone(phases)}
	var problems []error
	if op == nil {
		problems = append(problems, errors.New("operation is nil"))
	} else if op.cfg.Isolation != pgx.ReadCommitted {
		problems = append(problems, fmt.Errorf("Config.Isolation of the operation is %q: want read committed, since the lock of a key is renewed while a phase writes", op.cfg.Isolation))
	}
	problems = append(problems, f.cfg.checkDurations()...)
	problems = append(problems, bounds.Ints(bounds.Int{Field: "AtOnceMax", Value: &f.cfg.AtOnceMax, Default: 8, Min: 1, Max: 1000})...)
	if len(phases) == 0 || len(phases) > phasesMax {
		problems = append(problems, fmt.Errorf("%d phases: want 1 to %d", len(phases), phasesMax))
	}
	for i, phase := range f.phases {
		switch {
		case phase.Name == "" || len(phase.Name) > keyBytesMax || !readable(phase.Name):
			problems = append(problems, fmt.Errorf("name of phase %d: want 1 to %d bytes of UTF-8 without control characters", i, keyBytesMax))
		case slices.Contains(f.names, phase.Name):
			problems = append(problems, fmt.Errorf("phase %q is listed twice", phase.Name))
		case phase.Call == nil && phase.Write == nil:
			problems = append(problems, fmt.Errorf("phase %q does nothing: want Call or Write", phase.Name))
		case phase.AtMostOnce && phase.Call == nil:
			problems = append(problems, fmt.Errorf("phase %q is AtMostOnce and has no Call", phase.Name))
		}
		f.names = append(f.names, phase.Name)
	}
	for phase, ledger := range f.cfg.Ledgers {
		if ledger == nil || !f.makesCall(phase) {
			problems = append(problems, bounds.Problem("Ledgers", fmt.Sprintf("%q", phase), "the name of a phase with a Call, and a ledger that is not nil"))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	f.completing, f.reconciling = make(chan struct{}, f.cfg.AtOnceMax), make(chan struct{}, f.cfg.AtOnceMax)
	if !op.flow.CompareAndSwap(false, true) {
		return nil, fmt.Errorf("operation %q has a flow already: give each flow an operation with a name of its own", op.cfg.Operation)
	}
	return f, nil
}

// Operation returns the operation whose keys the flow executes.
func (f *Flow[S]) Operation() *Operation { return f.op }

// Config returns the settings of the flow, with defaults in place of zeros.
func (f *Flow[S]) Config() FlowConfig[S] { return f.cfg }

// phasesMax bounds the array in the row.
const phasesMax = 100

// Do executes the flow under a key, starting at its recovery point, and returns its outcome.
// request is passed to the phases; it is stored only with StoreRequest.
//
// A phase that fails ends the attempt: its writes are rolled back, earlier recovery points stay,
// and the lock is released, so that the next request with the key continues at that phase at once.
// Final makes the failure the outcome. A phase that panics, or ends its goroutine,
// fails in the same way; the panic is logged with its stack.
//
// Errors are those of Once, and ErrIndeterminate, ErrUnknownRecoveryPoint and ErrLockLost. When ctx
// ends, the flow stops between two phases and can be resumed: a call that may be repeated is
// cancelled; an AtMostOnce call, and the writes of a phase, finish first, within CallMax.
func (f *Flow[S]) Do(ctx context.Context, key Key, request []byte) (Response, error) {
	key, err := f.op.complete(key)
	if err != nil {
		return f.op.answered(Response{}, err)
	}
	return f.op.answered(f.op.inTurn(ctx, key, func() (Response, error) {
		h, response, err := f.claim(ctx, key, request)
		if h == nil {
			return response, err
		}
		crashpoint.At(ctx, crashpoint.KeyClaimed)
		return f.drive(ctx, h, request)
	}))
}

// claim takes the key's lock. If it cannot, it returns what is stored under the key.
func (f *Flow[S]) claim(ctx context.Context, key Key, request []byte) (*holder, Response, error) {
	o := f.op
	sealed := o.cfg.Seal != nil
	kept, err := f.kept(key, request, sealed)
	if err != nil {
		return nil, Response{}, err
	}
	fingerprint, err := o.fingerprint(key)
	if err != nil {
		return nil, Response{}, err
	}
	for range retriesMax {
		asked, made := time.Now(), false
		var s *stored
		err := o.claim(ctx, key, func(batch *pgx.Batch) {
			batch.Queue(o.sql[claimFlowSQL], key.Scope, key.Operation, key.Value, fingerprint, sealed, o.cfg.Lock, o.owner, kept, o.cfg.Operation, o.window()).QueryRow(one(&made, nil))
			batch.Queue(o.sql[lookSQL], key.Scope, key.Operation, key.Value).QueryRow(func(row pgx.Row) (err error) { s, err = read(row); return err })
		})
		switch {
		case conflict(err), err == nil && s == nil:
			continue // another request committed the key while the insert waited, above read committed; or it was forgotten
		case err != nil:
			return nil, Response{}, err
		case made:
			return newHolder(o, key, s, asked), Response{}, nil
		}
		if response, ok, err := o.answer(key, s); ok {
			return nil, response, err
		}
		if h, err := f.takeOver(ctx, key, s, request); h != nil || err != nil {
			return h, Response{}, err
		}
	}
	return nil, Response{}, &InProgressError{RetryAfter: time.Second} // the key keeps changing
}

// kept returns what is stored of the request.
func (f *Flow[S]) kept(key Key, request []byte, sealed bool) ([]byte, error) {
	if !f.cfg.StoreRequest {
		return nil, nil
	}
	return f.op.seal(key, "request", append([]byte{}, request...), sealed)
}

// takeOver takes over a key that no worker holds. It returns nothing if another worker was faster.
func (f *Flow[S]) takeOver(ctx context.Context, key Key, s *stored, request []byte) (*holder, error) {
	o := f.op
	if err := f.knows(s); err != nil {
		o.cfg.Logger.ErrorContext(ctx, "no phase of a key runs until a program that knows its phases, or a person, finishes it", "key", key, "error", err)
		return nil, err
	}
	// If a call may have been made, the key is in doubt some time, however old it is.
	if (s.calling == nil || s.call == happened) && s.idle > f.cfg.GiveUpAfter {
		mine, err := newHolder(o, key, s, time.Now()).undecided(ctx, abandoned, fmt.Errorf("phase %q was not done within FlowConfig.GiveUpAfter, %v", f.names[len(s.phases)], f.cfg.GiveUpAfter), 0)
		if mine || err != nil {
			err = errors.Join(ErrAbandoned, err)
		}
		return nil, err
	}
	kept, err := f.kept(key, request, s.sealed)
	if err != nil {
		return nil, err
	}
	h, taken, age := newHolder(o, key, s, time.Now()), false, (*float64)(nil)
	err = o.claim(ctx, key, func(batch *pgx.Batch) {
		taking := h.statement(o.sql[takeFlowSQL], o.cfg.Lock, o.owner, s.fingerprint, s.phases, s.calling, o.cfg.Operation, kept, o.window(), s.call)
		batch.Queue(taking.sql, taking.args...).QueryRow(one(&taken, &s.data, &s.request, &s.sealed, &s.attempts, &age))
	})
	if err == nil && !taken || conflict(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s.token++
	if age != nil {
		h.since = time.Now().Add(-time.Duration(*age * float64(time.Second)))
	}
	if s.call != justOnce {
		return h, nil
	}
	// The previous holder died during a call that must not be repeated.
	mine, err := h.undecided(ctx, indeterminate, fmt.Errorf("worker ended during the call of phase %q", *s.calling), f.cfg.CallMax)
	if mine || err != nil {
		err = errors.Join(ErrIndeterminate, err)
	}
	return nil, err
}

// knows returns ErrUnknownRecoveryPoint unless the key is of this flow, the phases that are done are the
// first ones of this program's list, and the one whose call may have been made is the next.
func (f *Flow[S]) knows(s *stored) error {
	begun := s.phases
	if s.calling != nil {
		begun = append(slices.Clone(begun), *s.calling)
	}
	if s.flow == f.op.cfg.Operation && len(s.phases) < len(f.names) && len(begun) <= len(f.names) && slices.Equal(begun, f.names[:len(begun)]) {
		return nil
	}
	return fmt.Errorf("%w: done and called are %q of flow %q, known %q of flow %q", ErrUnknownRecoveryPoint, begun, s.flow, f.names, f.op.cfg.Operation)
}

// drive executes the phases that are not done, under the lock.
func (f *Flow[S]) drive(ctx context.Context, h *holder, request []byte) (Response, error) {
	stop := h.keep(ctx)
	defer stop()
	step, err := f.step(h, request)
	if err != nil {
		return Response{}, errors.Join(err, h.unlock(ctx, err, f.cfg.RetryAfter, false))
	}
	for _, phase := range f.phases[len(h.at.phases):] {
		if err := f.phase(ctx, h, step, phase); err != nil {
			stolen := h.stolen()
			stop() // or it would renew the lock that is released below
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

func (f *Flow[S]) step(h *holder, request []byte) (step *Step[S], err error) {
	step = &Step[S]{Key: h.key, Request: request, Attempt: h.at.attempts}
	step.Key.Fingerprint = Fingerprint{}
	step.State, err = f.state(h.key, h.at)
	return step, err
}

// state returns what the phases that are done stored.
func (f *Flow[S]) state(key Key, s *stored) (state S, err error) {
	data, err := f.op.open(key, "data", s.data, s.sealed)
	if err == nil && data != nil {
		err = json.Unmarshal(data, &state)
	}
	if err != nil {
		err = fmt.Errorf("read what the phases of %v stored: %w", key, err)
	}
	return state, err
}

// settle decides what a failed phase means for the key.
func (f *Flow[S]) settle(ctx context.Context, h *holder, cause error, stolen bool) (Response, error) {
	var final *FinalError
	var unknown *indeterminateError
	var not *notDoneError
	var work *workError
	switch {
	case errors.As(cause, &final):
		err := h.finish(ctx, final.Response)
		if err != nil && !errors.Is(err, ErrLockLost) && !errors.Is(err, ErrUnanswered) {
			err = errors.Join(err, h.unlock(ctx, err, f.cfg.RetryAfter, false))
		}
		return final.Response, err
	case errors.As(cause, &unknown):
		return Response{}, h.doubt(ctx, cause, f.cfg.CallMax)
	case lost(cause), stolen:
		return Response{}, fmt.Errorf("%w: %w", ErrLockLost, cause)
	case errors.Is(cause, ErrUnanswered):
		return Response{}, cause // the phase may be done: after the lock expires, the next worker sees
	case h.doubtful: // the call was made, and its result could not be stored
		return Response{}, h.doubt(ctx, cause, f.cfg.CallMax)
	case h.o.cfg.Strict && h.at.call != happened && errors.As(cause, &work) && !errors.Is(cause, errUnwound) && !h.away && !outage(cause) && !conflict(cause) && ctx.Err() == nil:
		return f.settle(ctx, h, &FinalError{Response: h.o.failed(ctx, h.key, cause)}, stolen) // what happened is continued instead
	}
	return Response{}, errors.Join(cause, h.unlock(ctx, cause, f.cfg.RetryAfter, !h.called && errors.As(cause, &not)))
}
