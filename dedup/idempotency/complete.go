package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/migrations"
)

// Run completes flows that clients gave up, calls the reconciler for indeterminate keys, compares
// ledgers, and forgets old keys, until ctx ends and its current work has ended: a flow stops between two phases.
// These loops do not wait for each other, nor, while there are free slots (FlowConfig.AtOnceMax), for
// a slow flow. Any number of replicas may run it: locks and tokens coordinate them. It logs errors
// and continues.
func (f *Flow[S]) Run(ctx context.Context) {
	var loops, flows sync.WaitGroup
	loop := func(period time.Duration, work func(ctx context.Context) error) {
		loops.Go(func() { every(ctx, f.op, period, work) })
	}
	loop(f.cfg.Every, func(ctx context.Context) error {
		return f.complete(ctx, &flows, func(_ bool, err error) { f.op.logFailure(ctx, err) })
	})
	if f.cfg.Reconcile != nil {
		loop(f.cfg.Every, func(ctx context.Context) error {
			_, err := f.Reconcile(ctx)
			return err
		})
	}
	loop(f.cfg.Every, f.op.reap)
	if len(f.cfg.Ledgers) > 0 {
		loop(f.cfg.CompareEvery, f.compareAll)
	}
	loops.Wait()
	flows.Wait()
}

// Run forgets old keys of all operations until ctx ends. Any number of replicas may run it.
func (o *Operation) Run(ctx context.Context) {
	every(ctx, o, reapEvery, o.reap)
}

func (o *Operation) reap(ctx context.Context) error {
	all, err := Reap(ctx, o.pool, o.cfg.Schema)
	if all.Doubted > 0 {
		o.cfg.Logger.ErrorContext(ctx, "keys need a person: see outbox-relay keys", "keys", all.Doubted)
	}
	return err
}

const reapEvery = 30 * time.Second

// every calls work repeatedly, at randomized intervals so that replicas do not run in step.
func every(ctx context.Context, o *Operation, d time.Duration, work func(ctx context.Context) error) {
	for pause.For(ctx, d/2+rand.N(d)) { //nolint:gosec // jitter needs no secret
		o.logFailure(ctx, work(ctx))
	}
}

func (o *Operation) logFailure(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		o.cfg.Logger.WarnContext(ctx, "maintenance of idempotency keys failed; it will be retried", "operation", o.cfg.Operation, "error", err)
	}
}

// Reaped is what Reap did: how many keys it forgot, and how many need a person's decision now.
type Reaped struct{ Forgotten, Doubted int64 }

// Reap forgets keys of all operations whose window is over, by the database's clock, in small
// transactions: finished ones, and unfinished ones that nothing can finish and of which nothing
// happened. If something may have happened, they are abandoned. Flows whose request is stored stay.
// db is not in a transaction; an empty schema is the default. Operation.Run and Flow.Run call it.
func Reap(ctx context.Context, db dedup.Querier, schema string) (all Reaped, err error) {
	if schema, err = (migrations.Options{Schema: schema}).Resolve(); err != nil {
		return all, err
	}
	for {
		var now Reaped
		if err := db.QueryRow(ctx, migrations.InSchema(reapSQL, schema), pageMax).Scan(&now.Forgotten, &now.Doubted); err != nil {
			return all, fmt.Errorf("forget keys whose window is over: %w", err)
		}
		all = Reaped{all.Forgotten + now.Forgotten, all.Doubted + now.Doubted}
		if now.Forgotten+now.Doubted < pageMax { // keys left to a person fill a page, too
			return all, nil
		}
	}
}

// pageMax bounds how many keys a transaction forgets, and a work list.
const pageMax = 1000

// Complete resumes unfinished flows whose client does not come back and that no worker holds, at
// most FlowConfig.AtOnceMax at a time, each from its recovery point, and returns how many it
// finished. It needs FlowConfig.StoreRequest. A flow that is too old is abandoned
// (FlowConfig.GiveUpAfter): a person decides. A flow whose phases this program does not know is postponed for longer and
// longer, and reported each time. An error of one flow does not stop the others; all errors are returned.
func (f *Flow[S]) Complete(ctx context.Context) (finished int, err error) {
	return total(func(group *sync.WaitGroup, report func(bool, error)) error { return f.complete(ctx, group, report) })
}

func (f *Flow[S]) complete(ctx context.Context, group *sync.WaitGroup, report func(finished bool, err error)) error {
	return f.each(ctx, abandonedSQL, running, f.completing, group, report, f.resume)
}

// total waits for what begin began, and adds up what happened to keys.
func total(begin func(group *sync.WaitGroup, report func(done bool, err error)) error) (n int, failed error) {
	var group sync.WaitGroup
	var mu sync.Mutex
	report := func(done bool, err error) {
		mu.Lock()
		defer mu.Unlock()
		if done {
			n++
		}
		failed = errors.Join(failed, err)
	}
	report(false, begin(&group, report))
	group.Wait()
	return n, failed
}

// due is a key of a work list.
type due struct {
	Scope, Value string
	Created      time.Time
	Error        string
}

// each begins to work on the keys of a work list, which are in one state: at most on as many at a time as
// there are slots, until ctx ends. It reports the result of each.
func (f *Flow[S]) each(ctx context.Context, sql string, in state, slots chan struct{}, group *sync.WaitGroup, report func(done bool, err error), work func(context.Context, Key, *stored, due) (bool, error)) error {
	o := f.op
	rows, err := o.pool.Query(ctx, o.sql[sql], o.cfg.Operation, o.cfg.Operation, pageMax)
	if err != nil {
		return fmt.Errorf("look for keys: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[due])
	for _, d := range list {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		group.Go(func() {
			defer func() { <-slots }()
			key, done := Key{d.Scope, o.cfg.Operation, d.Value, Fingerprint{}}, false
			s, err := read(o.pool.QueryRow(ctx, o.sql[lookSQL], key.Scope, key.Operation, key.Value))
			if err == nil && s != nil && s.state == in && !s.locked && s.putOff <= 0 { // otherwise another worker changed it since
				done, err = work(ctx, key, s, d)
			}
			if err != nil {
				err = fmt.Errorf("%s key %v: %w", in, key, err)
			}
			report(done, err)
		})
	}
	return err
}

// resume continues one flow with the stored request.
func (f *Flow[S]) resume(ctx context.Context, key Key, s *stored, _ due) (bool, error) {
	h, err := f.takeOver(ctx, key, s, s.request)
	switch {
	case errors.Is(err, ErrUnknownRecoveryPoint):
		return false, errors.Join(err, f.leave(ctx, key, s, err))
	case errors.Is(err, ErrInProgress): // another worker has locked it
		return false, nil
	case h == nil || err != nil:
		return false, err
	}
	request, err := f.op.open(key, "request", s.request, s.sealed)
	if err != nil {
		return false, errors.Join(err, h.unlock(ctx, err, f.cfg.RetryAfter, false))
	}
	_, err = f.op.answered(f.drive(ctx, h, request))
	return err == nil, err
}

// leave postpones an indeterminate key that the reconciler cannot decide yet, or a key of a flow
// that this program does not know. Another version of the program may know it: during a deployment
// the older version meets keys of the newer one, so it must not give them up, use up their
// attempts, or decide about them.
func (f *Flow[S]) leave(ctx context.Context, key Key, s *stored, cause error) error {
	h := newHolder(f.op, key, s, time.Now())
	var why *string
	if cause != nil {
		why = new(text(cause))
	}
	if _, err := h.update(ctx, f.op.sql[leaveSQL], why, f.cfg.RetryAfter); err != nil {
		return fmt.Errorf("put %v off: %w", key, err)
	}
	return nil
}

// UndecidedKey is a key whose outcome is unknown.
type UndecidedKey[S any] struct {
	Key Key
	// Phase whose call may have been made, or not. Query the foreign system for ChildID.
	Phase string
	State S
	// Request, if it was stored.
	Request []byte
	// Since is when the request arrived.
	Since time.Time
	// Error that made the key indeterminate.
	Error string
}

// Decision of a reconciler.
type Decision struct {
	outcome   *Response
	continues bool
	state     []byte // JSON, behind a call that happened
	err       error
}

// Unknown means that the foreign system could not say either; the reconciler is called again later.
// It is the zero value.
func Unknown() Decision { return Decision{} }

// DidNotHappen means that the call did not take effect; the flow makes it again.
func DidNotHappen() Decision { return Decision{continues: true} }

// Happened means that the call took effect, and ends the flow with a response. It is for a last phase
// without Write: where a Write or a phase would be left out, the key stays undecided, with an error that
// says so. See UndecidedKey.Continue.
func Happened(response Response) Decision { return Decision{outcome: &response} }

// Continue means that the call took effect: the flow continues with state, as the call would have left
// it, with the Write of the phase, and then the phases behind it. A last phase has to Finish in its
// Write for that.
func (u UndecidedKey[S]) Continue(state S) Decision {
	d := Decision{continues: true}
	d.state, d.err = json.Marshal(state)
	return d
}

// Reconcile calls FlowConfig.Reconcile for keys that have been indeterminate for CallMax, so
// that a call on its way to the foreign system has arrived or never will: for at most 1,000, and at most
// FlowConfig.AtOnceMax at a time. It carries out the decisions, and returns how many keys were
// decided. Two concurrent runs may both call it for a key; only one of them decides. A key without a
// decision, because of an error too, is postponed for longer and longer. One whose phase in doubt this
// program does not know is reported each time: ErrUnknownRecoveryPoint.
func (f *Flow[S]) Reconcile(ctx context.Context) (decided int, err error) {
	if f.cfg.Reconcile == nil {
		return 0, errors.New("FlowConfig.Reconcile is not set")
	}
	return total(func(group *sync.WaitGroup, report func(bool, error)) error {
		return f.each(ctx, undecidedKeysSQL, indeterminate, f.reconciling, group, report, f.decide)
	})
}

// decide asks about one key, and returns it to its phases, or finishes it, unless another process decided in
// between.
func (f *Flow[S]) decide(ctx context.Context, key Key, s *stored, d due) (bool, error) {
	o := f.op
	decision, err := f.ask(ctx, key, s, d)
	if err != nil || !decision.continues && decision.outcome == nil {
		return false, errors.Join(err, f.leave(ctx, key, s, nil))
	}
	data, err := o.seal(key, "data", decision.state, s.sealed)
	if err != nil {
		return false, err
	}
	var happened *string
	if data != nil {
		happened = &f.names[len(s.phases)]
	}
	h := newHolder(o, key, s, time.Now())
	statements := []statement{h.statement(o.sql[decidedSQL], happened, data, o.window())}
	if s.token++; decision.outcome != nil {
		finishing, err := h.finishing(nil, *decision.outcome)
		if err != nil {
			return false, err
		}
		statements = append(statements, finishing)
	}
	rows, err := o.durably(ctx, statements...)
	if lost(err) { // another process decided
		return false, nil
	}
	return rows > 0, err
}

// ask calls the reconciler, bounded by CallMax like a call. It returns an error for a decision that would leave
// something out.
func (f *Flow[S]) ask(ctx context.Context, key Key, s *stored, d due) (Decision, error) {
	if err := f.knows(s); err != nil || f.op.gate.count(key, 0) > 0 {
		return Unknown(), err
	}
	phase := f.phases[len(s.phases)]
	state, err := f.state(key, s)
	if err != nil {
		return Unknown(), err
	}
	request, err := f.op.open(key, "request", s.request, s.sealed)
	if err != nil {
		return Unknown(), err
	}
	ctx, cancel := context.WithTimeout(ctx, f.cfg.CallMax)
	defer cancel()
	var decision Decision
	err = f.within(ctx, key, func() (err error) {
		decision, err = f.cfg.Reconcile(ctx, UndecidedKey[S]{key, phase.Name, state, request, d.Created, d.Error})
		return err
	})
	if err != nil { // decision may still be written
		return Unknown(), err
	}
	last := len(s.phases) == len(f.phases)-1
	switch {
	case decision.outcome != nil && (!last || phase.Write != nil):
		err = fmt.Errorf("the reconciler returned Happened for phase %q: its Write, or later phases, would be left out: return UndecidedKey.Continue", phase.Name)
	case decision.state != nil && last && phase.Write == nil:
		err = fmt.Errorf("the reconciler returned Continue for phase %q, which is the last one and has no Write that could finish the flow: return Happened", phase.Name)
	}
	return decision, errors.Join(decision.err, err)
}
