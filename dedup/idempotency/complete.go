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
		if err := db.QueryRow(ctx, migrations.InSchema(reapSQL, schema), reapMax).Scan(&now.Forgotten, &now.Doubted); err != nil {
			return all, fmt.Errorf("forget keys whose window is over: %w", err)
		}
		all = Reaped{all.Forgotten + now.Forgotten, all.Doubted + now.Doubted}
		if now.Forgotten+now.Doubted < reapMax { // keys left to a person fill a page, too
			return all, nil
		}
	}
}

// reapMax bounds a transaction; completeMax and reconcileMax bound a page.
const (
	reapMax      = 1000
	completeMax  = 100
	reconcileMax = 100
)

// Complete resumes unfinished flows whose client does not come back and that no worker holds, at
// most FlowConfig.AtOnceMax at a time, each from its recovery point, and returns how many it
// finished. It needs FlowConfig.StoreRequest. A flow that is too old is abandoned
// (FlowConfig.GiveUpAfter): a person decides. A flow whose phases this program does not know is postponed for longer and
// longer, and reported each time. An error of one flow does not stop the others; all errors are
// returned.
func (f *Flow[S]) Complete(ctx context.Context) (finished int, err error) {
	var group sync.WaitGroup
	var t tally
	t.add(false, f.complete(ctx, &group, t.add))
	group.Wait()
	return t.done, t.err
}

// tally adds up what happened to keys.
type tally struct {
	sync.Mutex
	done int
	err  error
}

func (t *tally) add(done bool, err error) {
	t.Lock()
	defer t.Unlock()
	if done {
		t.done++
	}
	t.err = errors.Join(t.err, err)
}

// complete starts to resume a page of flows, and reports the result of each.
func (f *Flow[S]) complete(ctx context.Context, group *sync.WaitGroup, report func(finished bool, err error)) error {
	page, err := f.page(ctx, f.op.sql[abandonedSQL], max(completeMax, f.cfg.AtOnceMax))
	if err != nil {
		return err
	}
	f.each(ctx, f.completing, group, "complete", page, report, f.resume)
	return nil
}

// each works on the keys of a list, at most on as many at a time as there are slots, until ctx ends, and
// reports the result of each.
func (f *Flow[S]) each(ctx context.Context, slots chan struct{}, group *sync.WaitGroup, what string, list []due, report func(done bool, err error), work func(context.Context, due) (bool, error)) {
	for _, d := range list {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		group.Go(func() {
			defer func() { <-slots }()
			done, err := work(ctx, d)
			if err != nil {
				err = fmt.Errorf("%s %v: %w", what, f.key(d), err)
			}
			report(done, err)
		})
	}
}

// due is a key of a work list.
type due struct {
	Scope, Value string
	Created      time.Time
	Error        string
}

func (f *Flow[S]) key(d due) Key { return Key{d.Scope, f.op.cfg.Operation, d.Value, Fingerprint{}} }

// page reads a work list of the flow.
func (f *Flow[S]) page(ctx context.Context, sql string, args ...any) ([]due, error) {
	rows, err := f.op.pool.Query(ctx, sql, append([]any{f.op.cfg.Operation, f.op.cfg.Operation}, args...)...)
	if err != nil {
		return nil, fmt.Errorf("look for keys: %w", err)
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[due])
}

// resume continues one flow with the stored request.
func (f *Flow[S]) resume(ctx context.Context, d due) (bool, error) {
	o, key := f.op, f.key(d)
	s, err := read(o.pool.QueryRow(ctx, o.sql[lookSQL], key.Scope, key.Operation, key.Value))
	if err != nil || s == nil {
		return false, err
	}
	if s.state != running || s.locked || s.putOff > 0 { // another worker changed the key after the page was read
		return false, nil
	}
	h, err := f.takeOver(ctx, key, s, s.request)
	if errors.Is(err, ErrUnknownRecoveryPoint) {
		return false, errors.Join(err, f.leave(ctx, key, s, err))
	}
	if h == nil || err != nil {
		return false, err
	}
	request, err := o.open(key, "request", s.request, s.sealed)
	if err != nil {
		return false, errors.Join(err, h.unlock(ctx, err, f.retryAfter(h), false))
	}
	_, err = o.answered(f.drive(ctx, h, request))
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

// Reconcile calls FlowConfig.Reconcile for each key that has been indeterminate for CallMax, so
// that a call on its way to the foreign system has arrived or never will. It makes at most
// FlowConfig.AtOnceMax calls at a time, carries out the decisions, and returns how many keys were
// decided. Two concurrent runs may both call it for a key; only one of them decides. A key whose
// phase in doubt this program does not know is postponed for longer and longer, and reported each
// time: ErrUnknownRecoveryPoint.
func (f *Flow[S]) Reconcile(ctx context.Context) (decided int, err error) {
	if f.cfg.Reconcile == nil {
		return 0, errors.New("FlowConfig.Reconcile is not set")
	}
	var group sync.WaitGroup
	var t tally
	var last due
	for ctx.Err() == nil {
		page, err := f.page(ctx, f.op.sql[undecidedKeysSQL], last.Created, last.Scope, last.Value, reconcileMax)
		t.add(false, err)
		f.each(ctx, f.reconciling, &group, "reconcile", page, t.add, f.decide)
		if len(page) < reconcileMax {
			break
		}
		last = page[len(page)-1]
	}
	group.Wait()
	return t.done, t.err
}

// decide asks about one key, and carries out the decision, unless another process decided in between.
func (f *Flow[S]) decide(ctx context.Context, u due) (bool, error) {
	key := f.key(u)
	s, err := read(f.op.pool.QueryRow(ctx, f.op.sql[lookSQL], key.Scope, key.Operation, key.Value))
	if err != nil || s == nil || s.state != indeterminate || s.putOff > 0 {
		return false, err
	}
	if err := f.knows(s); err != nil {
		return false, errors.Join(err, f.leave(ctx, key, s, nil))
	}
	if f.op.gate.count(key, 0) > 0 {
		return false, f.leave(ctx, key, s, nil)
	}
	phase := f.phases[len(s.phases)]
	asked := UndecidedKey[S]{Key: key, Phase: phase.Name, Since: u.Created, Error: u.Error}
	if asked.State, err = f.state(key, s); err != nil {
		return false, err
	}
	if asked.Request, err = f.op.open(key, "request", s.request, s.sealed); err != nil {
		return false, err
	}
	decision, err := f.ask(ctx, asked)
	if errors.Is(err, errLeftBehind) {
		err = errors.Join(err, f.leave(ctx, key, s, nil))
	}
	if err = errors.Join(err, decision.err); err != nil {
		return false, err
	}
	last := len(s.phases) == len(f.phases)-1
	switch {
	case !decision.continues && decision.outcome == nil:
		return false, f.leave(ctx, key, s, nil)
	case decision.outcome != nil && (!last || phase.Write != nil):
		err = fmt.Errorf("the reconciler returned Happened for phase %q: its Write, or later phases, would be left out: return UndecidedKey.Continue", phase.Name)
	case decision.state != nil && last && phase.Write == nil:
		err = fmt.Errorf("the reconciler returned Continue for phase %q, which is the last one and has no Write that could finish the flow: return Happened", phase.Name)
	}
	if err != nil {
		return false, errors.Join(err, f.leave(ctx, key, s, nil))
	}
	return f.carryOut(ctx, key, s, phase.Name, decision)
}

// ask calls the reconciler, bounded by CallMax like a call.
func (f *Flow[S]) ask(ctx context.Context, undecided UndecidedKey[S]) (decision Decision, err error) {
	ctx, cancel := context.WithTimeout(ctx, f.cfg.CallMax)
	defer cancel()
	var own Decision
	err = f.within(ctx, undecided.Key, func() (err error) {
		own, err = f.cfg.Reconcile(ctx, undecided)
		return err
	})
	if err != nil { // own may still be written
		return Unknown(), err
	}
	return own, nil
}

// carryOut returns the key to its phases, or finishes it.
func (f *Flow[S]) carryOut(ctx context.Context, key Key, s *stored, phase string, decision Decision) (bool, error) {
	o := f.op
	data, err := o.seal(key, "data", decision.state, s.sealed)
	if err != nil {
		return false, err
	}
	var happened *string
	if data != nil {
		happened = &phase
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
