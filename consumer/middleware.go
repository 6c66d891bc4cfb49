package consumer

import (
	"context"
	"errors"
	"sync"
)

// Middleware wraps a handler. Create one with Around.
type Middleware func(next Handler) Handler

// Around returns a Middleware for any kind of handler, for example for tracing, tenancy or metrics.
// around is called for each call of the handler, with its messages: one message with Each, JSON and
// Decoded, all fresh messages of the transaction with Queued, Batch and Route. It must call next
// once, with ctx or a context derived from it.
//
// It cannot hide a failure: next's error is the outcome even if around returns nil, and an error of
// around is a failure of its messages. If around does not call next, the messages have had no
// effect, so they fail.
func Around(around func(ctx context.Context, msgs []*Message, next func(ctx context.Context) error) error) Middleware {
	return func(next Handler) Handler { return &wrapped{around: around, next: next} }
}

type wrapped struct {
	around func(ctx context.Context, msgs []*Message, next func(ctx context.Context) error) error
	next   Handler
}

var (
	errNextTwice  = errors.New("middleware called next twice: the handler would have its effect twice")
	errNextLate   = errors.New("middleware returned before next did, or called next later: wait for next")
	errNextNotRun = errors.New("middleware returned without calling next: the message would be lost; return an error, or call next")
)

// single is a handler that gets one message at a time.
type single interface{ single() bool }

func (h eachHandler) single() bool { return true }

func (w *wrapped) single() bool {
	s, ok := w.next.(single)
	return ok && s.single()
}

func (w *wrapped) handle(ctx context.Context, t *tx, msgs []*Message) error {
	if !w.single() {
		return w.call(ctx, t, msgs)
	}
	for i := range msgs {
		t.base.Add(int64(i)) // the engine reads it to find a message that took too long
		if err := w.call(ctx, t, msgs[i:i+1]); err != nil {
			return blameRun(i, 1, err)
		}
		t.base.Add(-int64(i))
	}
	return nil
}

// call calls around once. An error that is not from next belongs to the only message, or to all of
// them.
func (w *wrapped) call(ctx context.Context, t *tx, msgs []*Message) error {
	n := &next{t: t, handle: func(ctx context.Context) error { return w.next.handle(ctx, t, msgs) }}
	if len(msgs) == 1 {
		t.turn(0, msgs[0])
	} else {
		t.turn(unknownIndex, nil)
	}
	outer := guard(func() error {
		defer n.close()
		return w.around(ctx, msgs, n.call)
	})
	err := n.err
	if err == nil {
		switch {
		case t.misuse() != nil:
			err = Permanent(t.misuse())
		case outer != nil:
			err = outer
		case n.ended == nil:
			err = Permanent(errNextNotRun)
		default:
			return nil
		}
	}
	var one *messageError
	var batch *batchError
	if errors.As(err, &one) || errors.As(err, &batch) {
		return err
	}
	if len(msgs) == 1 {
		return &messageError{0, err}
	}
	return &batchError{err}
}

// next is the handler as a middleware gets it. It runs once, and before the middleware returns.
type next struct {
	t      *tx
	handle func(ctx context.Context) error

	mu     sync.Mutex
	ended  chan struct{} // closed when the call ended; nil: not called
	closed bool
	err    error
}

func (n *next) call(ctx context.Context) error {
	n.mu.Lock()
	again, late := n.ended != nil, n.closed
	if !again && !late {
		n.ended = make(chan struct{})
	}
	n.mu.Unlock()
	switch {
	case late:
		return errNextLate
	case again:
		return n.t.Misused(errNextTwice)
	}
	defer close(n.ended)
	n.err = errGoexit // unless it returns
	n.err = guard(func() error { return n.handle(ctx) })
	return n.err
}

// close waits for a call that runs in another goroutine: that call uses the transaction until it
// ends.
func (n *next) close() {
	n.mu.Lock()
	n.closed = true
	ended := n.ended
	n.mu.Unlock()
	if ended == nil {
		return
	}
	select {
	case <-ended:
	default:
		_ = n.t.Misused(errNextLate)
		<-ended
	}
}
