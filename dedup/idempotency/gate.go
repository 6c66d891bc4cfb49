package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
)

// gate lets one request of this process per key query the database at a time; the others wait in
// memory. No waiting request holds a connection. Between processes, the database decides.
type gate struct {
	sync.Mutex
	lines    map[name]*line
	waiting  map[string]int // waiting requests, by scope
	answered [2]map[name]struct{}
	scopes   map[string]*scopeKeys
}

func newGate() gate {
	return gate{lines: map[name]*line{}, waiting: map[string]int{}, answered: [2]map[name]struct{}{{}, {}}, scopes: map[string]*scopeKeys{}}
}

// name is the key within its operation.
type name struct{ scope, value string }

// line holds the requests for one key.
type line struct {
	turn    chan struct{} // has one element while no request has the turn
	over    chan struct{} // closed once the key has an outcome
	waiting int
	users   int
	probed  bool // a request whose wait is over queries the database
	ended   bool // over is closed
}

const (
	answeredMax = 2048 // keys in each half of the cache of keys with an outcome
	scopesMax   = 4096 // scopes whose keys are counted
)

// inTurn answers a request from what is stored, or executes it when its turn comes. execute gets
// the time for which it may wait for other processes.
func (o *Operation) inTurn(ctx context.Context, key Key, execute func(wait time.Duration) (Response, error)) (Response, error) {
	at, err := o.enter(ctx, key)
	for err == nil && at.known {
		if response, ok, err := o.lookUp(ctx, key); ok || err != nil {
			return response, err
		}
		o.gate.unlearn(name{key.Scope, key.Value})
		at, err = o.enter(ctx, key)
	}
	if err != nil {
		return Response{}, err
	}
	ended := errNotEnded
	defer func() { at.leave(ended) }()
	if minted(key.Value) {
		if response, ok, err := o.lookUp(ctx, key); ok || err != nil {
			ended = err
			return response, err
		}
	}
	if err := o.quota(ctx, key); err != nil {
		ended = err
		return Response{}, err
	}
	response, err := execute(at.wait)
	ended = err
	return response, err
}

// minted reports whether the client made the key (a UUIDv7) a while ago, so it has most likely sent
// it before: a replay then takes one statement. A wrong clock costs one more statement.
func minted(value string) bool {
	id, err := uuid.Parse(value)
	return err == nil && id.Version() == 7 && time.Since(time.Unix(id.Time().UnixTime())) > mintedMin
}

const mintedMin = 2 * time.Second

// errNotEnded is the error of a request that panics.
var errNotEnded = errors.New("the work did not return")

// lookUp answers a request from what is stored, if that determines the answer. It begins no
// transaction.
func (o *Operation) lookUp(ctx context.Context, key Key) (response Response, ok bool, err error) {
	s, err := read(o.pool.QueryRow(ctx, o.sql.look, key.Scope, key.Operation, key.Value))
	if err != nil {
		return Response{}, false, fmt.Errorf("look at %v: %w", key, err)
	}
	if s == nil {
		return Response{}, false, nil
	}
	if s.state == finished && s.unfinished {
		o.unanswered(ctx, key)
	}
	return o.answer(key, s)
}

// place is the state of a request after it waited in memory. known: the key has an outcome, as far
// as this process knows. wait is how long it may still wait for other processes. leave is called
// with the error of the request.
type place struct {
	known bool
	wait  time.Duration
	leave func(error)
}

// enter waits for the request's turn, at most for WaitMax. The request that has the turn may hang,
// and may have lost the key long ago. So one at a time of the requests whose wait is over queries
// the database without the turn, and does not wait there.
func (o *Operation) enter(ctx context.Context, key Key) (at place, err error) {
	g, n, began := &o.gate, name{key.Scope, key.Value}, time.Now()
	g.Lock()
	defer g.Unlock()
	if g.knows(n) {
		return place{true, o.cfg.WaitMax, func(error) {}}, nil
	}
	l := g.lines[n]
	if l == nil {
		l = &line{turn: make(chan struct{}, 1), over: make(chan struct{})}
		l.turn <- struct{}{}
		g.lines[n] = l
	}
	select {
	case <-l.turn:
		l.users++
		return place{false, o.cfg.WaitMax, func(err error) { g.leave(n, l, false, err) }}, nil
	default:
	}
	if l.waiting >= o.cfg.KeyWaitersMax || g.waiting[n.scope] >= o.cfg.ScopeWaitersMax {
		return at, &CrowdedError{RetryAfter: time.Second}
	}
	l.users++
	l.waiting++
	g.waiting[n.scope]++
	g.Unlock()
	known, late := false, false
	timer := time.NewTimer(o.cfg.WaitMax)
	select {
	case <-l.turn:
	case <-l.over:
		known = true
	case <-ctx.Done():
		err = ctx.Err()
	case <-timer.C:
		late = true
	}
	timer.Stop()
	g.Lock()
	l.waiting--
	if g.waiting[n.scope]--; g.waiting[n.scope] == 0 {
		delete(g.waiting, n.scope)
	}
	if late && l.probed {
		err = &InProgressError{RetryAfter: time.Second}
	}
	if known || err != nil {
		g.drop(n, l)
		return place{known, o.cfg.WaitMax, func(error) {}}, err
	}
	l.probed = l.probed || late
	return place{false, max(0, o.cfg.WaitMax-time.Since(began)), func(err error) { g.leave(n, l, late, err) }}, nil
}

// leave ends the turn of a request, or its probe.
func (g *gate) leave(n name, l *line, probe bool, err error) {
	g.Lock()
	defer g.Unlock()
	if err == nil {
		g.learn(n)
	}
	if !l.ended && (err == nil || errors.Is(err, ErrIndeterminate) || errors.Is(err, ErrAbandoned)) {
		l.ended = true
		close(l.over)
		delete(g.lines, n) // later requests know the outcome, or begin another line
	}
	if probe {
		l.probed = false
	} else if !l.ended {
		l.turn <- struct{}{}
	}
	g.drop(n, l)
}

// drop forgets a line that has no users.
func (g *gate) drop(n name, l *line) {
	if l.users--; l.users == 0 && g.lines[n] == l {
		delete(g.lines, n)
	}
}

// knows reports whether a key had an outcome when this process last saw it.
func (g *gate) knows(n name) bool {
	_, lately := g.answered[0][n]
	_, before := g.answered[1][n]
	return lately || before
}

// learn records that a key has an outcome, and forgets the oldest half when full.
func (g *gate) learn(n name) {
	if len(g.answered[0]) >= answeredMax {
		g.answered[1], g.answered[0] = g.answered[0], map[name]struct{}{}
	}
	g.answered[0][n] = struct{}{}
}

// unlearn records that a key has no outcome.
func (g *gate) unlearn(n name) {
	g.Lock()
	defer g.Unlock()
	delete(g.answered[0], n)
	delete(g.answered[1], n)
}

// scopeKeys is how many keys of a scope were stored at the last count, and how many claims this
// process has made since.
type scopeKeys struct {
	stored, since int
	at            time.Time
}

// quotaEvery is how long a count of the keys of a scope is used.
const quotaEvery = 10 * time.Second

// quota refuses a new key of a scope that has reached Config.ScopeKeysMax.
func (o *Operation) quota(ctx context.Context, key Key) error {
	limit := o.cfg.ScopeKeysMax
	if limit == 0 {
		return nil
	}
	g := &o.gate
	g.Lock()
	s := g.scopes[key.Scope]
	counts := s == nil || time.Since(s.at) > quotaEvery || s.stored < limit && s.since >= max(1, limit/100)
	if s == nil {
		if len(g.scopes) >= scopesMax {
			clear(g.scopes)
		}
		s = &scopeKeys{}
		g.scopes[key.Scope] = s
	}
	if counts { // only this request counts; the others use the old number
		s.at, s.since = time.Now(), 0
	}
	s.since++
	stored := s.stored
	g.Unlock()
	if counts {
		if err := o.pool.QueryRow(ctx, o.sql.stored, key.Scope, o.cfg.Operation, limit).Scan(&stored); err != nil {
			g.Lock()
			s.at = time.Time{} // the next request counts
			g.Unlock()
			return fmt.Errorf("count the keys of scope %q: %w", key.Scope, err)
		}
		g.Lock()
		s.stored = stored
		g.Unlock()
	}
	if stored < limit {
		return nil
	}
	switch there, err := read(o.pool.QueryRow(ctx, o.sql.look, key.Scope, key.Operation, key.Value)); {
	case err != nil:
		return fmt.Errorf("look at %v: %w", key, err)
	case there == nil:
		return &QuotaError{Max: limit, RetryAfter: quotaEvery}
	}
	return nil
}
