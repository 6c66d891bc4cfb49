package idempotencytest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

// run is the state of a schedule: a database, and the current replica.
type run struct {
	pool  *pgxpool.Pool
	start Start
	send  Request

	mu      sync.Mutex
	answer  *idempotency.Response // the first one; each later one must be the same
	inDoubt bool
}

// restart replaces the current replica.
func (r *run) restart() (err error) {
	if r.send, err = r.start(r.pool); err != nil {
		return fmt.Errorf("start a replica: %w", err)
	}
	return nil
}

// triesMax bounds how often a client sends the request.
const triesMax = 20

// settle sends the request until it got an answer.
func (r *run) settle(ctx context.Context) error {
	var last error
	doubted := false
	for range triesMax {
		response, err := r.send(ctx)
		switch last = err; {
		case err == nil:
			return r.answered(response)
		case errors.Is(err, idempotency.ErrIndeterminate) && doubted: // the reconciler, if there is one, could not decide either
			r.inDoubt = true
			return nil
		case errors.Is(err, idempotency.ErrIndeterminate):
			doubted = true
		case errors.Is(err, idempotency.ErrMismatch), errors.Is(err, idempotency.ErrInvalid), ctx.Err() != nil:
			return err
		}
		if err := r.expire(ctx); err != nil {
			return err
		}
	}
	return fmt.Errorf("the request was not answered after %d tries: %w", triesMax, last)
}

var errOtherAnswer = errors.New("the request was answered differently")

// answered records an answer, and returns an error if it differs from an earlier one.
func (r *run) answered(response idempotency.Response) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.answer == nil {
		r.answer = &response
		return nil
	}
	first := r.answer
	if dropped := first.BodyDropped || response.BodyDropped; first.Status != response.Status || !dropped && !bytes.Equal(first.Body, response.Body) {
		return fmt.Errorf("%w: first status %d and %.200q, then status %d and %.200q: the first answer has to be stored, and replayed",
			errOtherAnswer, first.Status, first.Body, response.Status, response.Body)
	}
	if first.BodyDropped {
		r.answer = &response // a replay may have the body
	}
	return nil
}

// expireSQL expires the locks of killed replicas, and the pauses of completer and reconciler, as
// time would.
const expireSQL = `-- idempotencytest.expire
UPDATE effectonce.idempotency_keys SET locked_until = least(locked_until, clock_timestamp()), retry_at = least(retry_at, clock_timestamp())
WHERE state IN ('running', 'indeterminate') AND (locked_until > clock_timestamp() OR retry_at > clock_timestamp())`

// expire simulates the time that a client waits.
func (r *run) expire(ctx context.Context) error {
	if _, err := r.pool.Exec(ctx, expireSQL); err != nil {
		return fmt.Errorf("expire the locks: %w", err)
	}
	return nil
}

// together sends the request n times concurrently, to one replica. A client that is told to wait
// retries at the end.
func (r *run) together(ctx context.Context, n int) error {
	var waited sync.Once
	ctx = crashpoint.With(ctx, func(name string) {
		if name == crashpoint.KeyWorked {
			waited.Do(func() { <-time.After(togetherFor) }) // by then the others have arrived, and wait for this one
		}
	})
	var group errgroup.Group
	for range n {
		group.Go(func() error {
			response, err := r.send(ctx)
			if err != nil {
				return nil //nolint:nilerr // settle retries, and reports the error then
			}
			return r.answered(response)
		})
	}
	return group.Wait()
}

// togetherFor is shorter than the default time for which requests wait for each other.
const togetherFor = 100 * time.Millisecond

// killed sends the request, and kills the replica when the request passes a point for the n-th time, from 0: the
// goroutine that passes it does nothing more, the lock stays, and the transaction is rolled back, as the
// server does when a process dies. Another replica replaces it.
func (r *run) killed(ctx context.Context, point string, n int) error {
	doomed, kill := context.WithCancel(ctx)
	defer kill()
	var reached atomic.Bool
	var passes atomic.Int64
	hook := func(name string) {
		if name == point && passes.Add(1) == int64(n)+1 {
			reached.Store(true)
			kill()
			runtime.Goexit()
		}
	}
	done := make(chan error, 1)
	go func() {
		var err error
		defer func() { done <- err }()
		var response idempotency.Response
		if response, err = r.send(crashpoint.With(doomed, hook)); err == nil {
			err = r.answered(response)
		}
	}()
	timer := time.NewTimer(endMax) // a point in another goroutine ends only that
	defer timer.Stop()
	var err error
	select {
	case err = <-done:
	case <-timer.C:
	}
	if !reached.Load() {
		return errors.New("the work did not get as far as in the clean run: does it pass on the context that it is given?")
	}
	if errors.Is(err, errOtherAnswer) {
		return err
	}
	return errors.Join(r.expire(ctx), r.restart()) // err does not reach the client
}

// endMax bounds how long the request to a killed replica may take.
const endMax = 10 * time.Second

// clean sends the request once, and returns the points that it passes.
func (r *run) clean(ctx context.Context) (passed []string, err error) {
	response, err := r.send(crashpoint.With(ctx, func(name string) { passed = append(passed, name) }))
	if err != nil {
		return nil, err
	}
	if len(passed) == 0 {
		return nil, errors.New("the request passed none of the points at which work under a key can be cut off: does it go through Once or Flow.Do, with the context that it is given?")
	}
	return passed, r.answered(response)
}
