package idempotency

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/effectonce/effectonce/internal/pause"
)

// gate lets one request of this process per key query the database at a time; the others wait in
// memory. No waiting request holds a connection. Between processes, the database decides.
type gate struct {
	sync.Mutex
	lines   map[name]*line
	running map[name]int // functions of phases: while one runs that was left behind, nothing is decided
}

// count adds to the functions that run, and returns their number.
func (g *gate) count(key Key, more int) int {
	g.Lock()
	defer g.Unlock()
	at := name{key.Scope, key.Value}
	n := g.running[at] + more
	if g.running[at] = n; n == 0 {
		delete(g.running, at)
	}
	return n
}

// name is the key within its operation.
type name struct{ scope, value string }

// line holds the requests for one key.
type line struct {
	turn    chan struct{} // has one element while no request has the turn; closed once the key has an outcome
	waiting int
	users   int
}

// inTurn executes a request when its turn comes. While another process has the key, execute is called again,
// within WaitMax. It ends the turn also if the work panics, or does not return soon after ctx ended: then the
// server ends its transaction.
func (o *Operation) inTurn(ctx context.Context, key Key, execute func() (Response, error)) (response Response, err error) {
	l, waitMax, err := o.enter(ctx, key)
	if err != nil {
		return Response{}, err
	}
	ended, once := errNotEnded, sync.Once{}
	leave := func(err error) { once.Do(func() { o.gate.leave(name{key.Scope, key.Value}, l, err) }) }
	defer func() { leave(ended) }()
	defer context.AfterFunc(ctx, func() {
		<-time.After(callGrace)
		leave(errNotEnded)
	})()
	deadline := time.Now().Add(waitMax)
	for wait := claimWait; ; wait = min(2*wait, askEvery) {
		response, err = execute()
		if !errors.Is(err, ErrInProgress) || time.Now().After(deadline) || !pause.For(ctx, min(wait, time.Until(deadline))) {
			break
		}
	}
	ended = err
	return response, err
}

// claimWait is how long one claim waits in the database, where it holds a connection, and at first between
// two. askEvery is how often a request that has waited for some time asks.
const (
	claimWait = 5 * time.Millisecond
	askEvery  = 50 * time.Millisecond
)

// waitersMax bounds how many requests of this process wait for one key.
const waitersMax = 100

// errNotEnded is the error of a request that panics, or hangs.
var errNotEnded = errors.New("the work did not return")

// enter waits for the request's turn, at most for WaitMax: then it may claim the key, and wait for other processes
// for at most wait. Once the key has an outcome, every waiting request has a turn: its claim finds the outcome.
func (o *Operation) enter(ctx context.Context, key Key) (turn *line, wait time.Duration, err error) {
	g, n, began := &o.gate, name{key.Scope, key.Value}, time.Now()
	g.Lock()
	defer g.Unlock()
	if g.lines[n] == nil {
		g.lines[n] = &line{turn: make(chan struct{}, 1)}
		g.lines[n].turn <- struct{}{}
	}
	l := g.lines[n]
	select {
	case <-l.turn:
		l.users++
		return l, o.cfg.WaitMax, nil
	default:
	}
	if l.waiting >= waitersMax {
		return nil, 0, &InProgressError{RetryAfter: time.Second, Crowded: true}
	}
	l.users++
	l.waiting++
	g.Unlock()
	timer := time.NewTimer(o.cfg.WaitMax)
	select {
	case <-l.turn:
		turn, wait = l, max(0, o.cfg.WaitMax-time.Since(began))
	case <-ctx.Done():
		err = ctx.Err()
	case <-timer.C:
		err = &InProgressError{RetryAfter: time.Second}
	}
	timer.Stop()
	g.Lock()
	l.waiting--
	if turn == nil {
		g.drop(n, l)
	}
	return turn, wait, err
}

// leave ends the turn of a request, with its error.
func (g *gate) leave(n name, l *line, err error) {
	g.Lock()
	defer g.Unlock()
	switch {
	case g.lines[n] != l: // an earlier request left an outcome
	case err == nil, errors.Is(err, ErrIndeterminate), errors.Is(err, ErrAbandoned):
		close(l.turn)
		delete(g.lines, n) // later requests begin another line
	default:
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
