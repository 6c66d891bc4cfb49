package httpkey

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
)

// Accept configures AcceptHandler.
type Accept struct {
	// StatusURL is where StatusHandler is served: a URL or a path that ends with a slash, such as
	// "/charges/status/". Required.
	StatusURL string
	// After is how long a client waits for the outcome before it gets 202. Less than
	// Config.HandlerTimeout; 1 ms to 1 h; default 5 s.
	After time.Duration
	// AtOnceMax is how many flows whose client got 202 may run in this process; beyond it a client
	// waits for the outcome, as with a FlowHandler. 1 to 100,000; default 100.
	AtOnceMax int
}

// AcceptHandler is FlowHandler for flows that may take long. If there is no outcome after
// Accept.After, and the request is stored, it answers 202 Accepted, with Retry-After, and with a
// Location that StatusHandler serves. A retry while the flow is unfinished gets the same answer; a
// later one gets the outcome. StatusHandler needs authentication in front of it, too.
//
// After a 202 the flow continues in this process, within Config.HandlerTimeout. If it stops then
// (by that limit, a failure, or the end of the process), the completer continues it, so Flow.Run
// must run somewhere, and FlowConfig.StoreRequest is required. The exception: if the process ends
// during the Call of an AtMostOnce phase, the outcome is unknown, and FlowConfig.Reconcile or a
// person decides. So a program that stops calls Middleware.Drain: http.Server.Shutdown does not
// wait for these flows.
//
// It must not be inside the Handler of any Middleware, which would store the 202 as the outcome:
// such a request is refused with 500.
//
// The Location contains the key in base64, encrypted if Operation.Seal is set; other callers get
// 404 for it.
func AcceptHandler[S any](m *Middleware, flow *idempotency.Flow[S], request func(r *http.Request) ([]byte, error), accept Accept) (http.Handler, error) {
	problems := flowProblems(m, flow)
	problems = append(problems, bounds.Durations(bounds.Duration{Field: "After", Value: &accept.After, Default: 5 * time.Second, Min: time.Millisecond, Max: time.Hour})...)
	problems = append(problems, bounds.Ints(bounds.Int{Field: "AtOnceMax", Value: &accept.AtOnceMax, Default: 100, Min: 1, Max: 100_000})...)
	if accept.After >= m.cfg.HandlerTimeout {
		problems = append(problems, bounds.Problem("After", accept.After, fmt.Sprintf("less than Config.HandlerTimeout, %v", m.cfg.HandlerTimeout)))
	}
	if !strings.HasSuffix(accept.StatusURL, "/") {
		problems = append(problems, bounds.Problem("StatusURL", strconv.Quote(accept.StatusURL), "a URL or a path that ends with a slash"))
	}
	if !flow.Config().StoreRequest {
		problems = append(problems, bounds.Problem("FlowConfig.StoreRequest", false, "true, so that the completer can finish what was accepted"))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	left := make(chan struct{}, accept.AtOnceMax)
	return m.flowHandler(request, true, func(w http.ResponseWriter, r *http.Request, key idempotency.Key, body []byte) {
		mark, err := m.mark(key)
		if err != nil {
			m.fail(w, r, key, err, true)
			return
		}
		done := m.start(r, key, func(ctx context.Context) (idempotency.Response, error) { return flow.Do(ctx, key, body) }) //nolint:contextcheck // it outlives its client
		timer := time.NewTimer(accept.After)
		defer timer.Stop()
		var e ending
		for waits := true; waits; {
			select {
			case e = <-done:
				waits = false
			case <-timer.C:
				// Only a stored request is accepted, and only under its fingerprint. A request that
				// waits for another one has not compared it yet.
				if _, err := m.op.Look(r.Context(), key); errors.Is(err, idempotency.ErrInProgress) && m.leave(r, key, done, left) {
					m.accepted(w, accept.StatusURL+mark)
					return
				}
				timer.Reset(max(accept.After, 100*time.Millisecond))
			}
		}
		var crowded *idempotency.CrowdedError
		if errors.Is(e.err, idempotency.ErrInProgress) && !errors.As(e.err, &crowded) {
			e.response, e.err = m.op.Look(r.Context(), key) // as above
			if errors.Is(e.err, idempotency.ErrNotStored) {
				e.err = &idempotency.InProgressError{RetryAfter: m.cfg.RetryAfter} // the key is about to be claimed
			} else if errors.Is(e.err, idempotency.ErrInProgress) {
				m.accepted(w, accept.StatusURL+mark)
				return
			}
		}
		switch {
		case e.panicked != nil:
			panic(e.panicked) // as in a FlowHandler, which runs the flow in the request's goroutine
		case !e.returned:
			panic(http.ErrAbortHandler)
		default:
			m.answerFlow(w, r, key, e.response, e.err)
		}
	}), nil
}

// ending is how a flow ended: it returned, it panicked, or it called runtime.Goexit.
type ending struct {
	response idempotency.Response
	err      error
	returned bool
	panicked any
}

// start runs a flow in a goroutine, bounded by HandlerTimeout.
func (m *Middleware) start(r *http.Request, key idempotency.Key, do func(ctx context.Context) (idempotency.Response, error)) <-chan ending {
	ctx, cancel := m.outliving(r)
	done := make(chan ending, 1)
	m.all.begin()
	go func() {
		defer m.all.end()
		defer cancel()
		var e ending
		defer func() {
			if !e.returned {
				e.panicked = recover() // as net/http does: the process continues
				m.log.ErrorContext(ctx, "a flow panicked", "key", key, "panic", e.panicked, "stack", string(debug.Stack()))
			}
			done <- e
		}()
		e.response, e.err = do(ctx)
		e.returned = true
	}()
	return done
}

// Drain waits for the flows of AcceptHandlers that run in this process, answered with 202 or not,
// of this Middleware and all others of the same New (see For). Call it after http.Server.Shutdown,
// which does not wait for flows answered with 202, and before the pool is closed. Flows end within
// Config.HandlerTimeout plus one FlowConfig.CallMax. Drain stops no flow. An error means that ctx
// ended first; it wraps the cause, and the flows continue.
func (m *Middleware) Drain(ctx context.Context) error {
	flows, idle := m.all.running()
	if flows == 0 {
		return nil
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("httpkey: some of %d accepted flows are still running: %w", flows, context.Cause(ctx))
	}
}

// begin, end and running count flows. A WaitGroup does not fit: a flow may begin while Drain waits.
func (o *operations) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.flows++; o.flows == 1 {
		o.idle = make(chan struct{})
	}
}

func (o *operations) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.flows--; o.flows == 0 {
		close(o.idle)
	}
}

func (o *operations) running() (flows int, idle <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.flows, o.idle
}

// leave lets a flow continue without its client, unless AtOnceMax flows do so already. left has one
// entry for each.
func (m *Middleware) leave(r *http.Request, key idempotency.Key, done <-chan ending, left chan struct{}) bool {
	select {
	case left <- struct{}{}:
	default:
		return false
	}
	go func() {
		defer func() { <-left }()
		if e := <-done; e.err != nil {
			m.stopped(r, key, e.err)
		}
	}()
	return true
}

// StatusHandler serves the status resources of flows of this Middleware's operation: see
// AcceptHandler. The last part of the path identifies the request, in the scope of the caller. The
// answer is 202 with Retry-After until there is an outcome; then the outcome, status included, as a
// replay; 404 if the request is unknown; 409 if a person has to decide. It reads one row and has no
// effect.
func (m *Middleware) StatusHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scope, ok := m.principal(w, r)
		if !ok {
			return
		}
		value, ok := m.unmark(scope, r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:])
		if !ok {
			m.refuse(w, r, ProblemKeyUnknown, 0)
			return
		}
		key := m.op.Key(scope, value, idempotency.Fingerprint{})
		response, err := m.op.Look(r.Context(), key)
		switch {
		case err == nil:
			m.replay(w, r, response)
		case errors.Is(err, idempotency.ErrInProgress):
			m.accepted(w, "")
		case errors.Is(err, idempotency.ErrNotStored), errors.Is(err, idempotency.ErrInvalid):
			m.refuse(w, r, ProblemKeyUnknown, 0)
		default:
			m.fail(w, r, key, err, r.Context().Err() == nil)
		}
	})
}

// accepted answers that there is no outcome yet.
func (m *Middleware) accepted(w http.ResponseWriter, location string) {
	header := w.Header()
	if location != "" {
		header.Set("Location", location)
	}
	header.Set("Content-Type", "application/json")
	header.Set("Cache-Control", "no-store")
	header.Set("Retry-After", strconv.Itoa(int(math.Ceil(m.cfg.RetryAfter.Seconds()))))
	w.WriteHeader(http.StatusAccepted)
	_, _ = w.Write([]byte(`{"status":"in progress"}` + "\n")) // a client that is gone retries
}

// mark encodes a key for a URL.
func (m *Middleware) mark(key idempotency.Key) (string, error) {
	text := []byte(key.Value)
	if seal := m.cfg.Operation.Seal; seal != nil {
		var err error
		if text, err = seal.Seal(text, markOf(key.Scope, key.Operation)); err != nil {
			return "", fmt.Errorf("encrypt the key of a status resource: %w", err)
		}
	}
	return base64.RawURLEncoding.EncodeToString(text), nil
}

func (m *Middleware) unmark(scope, mark string) (string, bool) {
	text, err := base64.RawURLEncoding.DecodeString(mark)
	if seal := m.cfg.Operation.Seal; err == nil && seal != nil {
		text, err = seal.Open(text, markOf(scope, m.cfg.Operation.Operation))
	}
	return string(text), err == nil
}

// markOf binds an encrypted mark to its caller. Neither part contains a NUL.
func markOf(scope, operation string) []byte { return []byte("status\x00" + scope + "\x00" + operation) }
