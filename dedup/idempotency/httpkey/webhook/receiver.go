package webhook

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Receiver is the endpoint of one sender. It is safe for concurrent use.
type Receiver struct {
	cfg    Config
	events *idempotency.Operation
	handle Handler
}

// New returns a receiver, or all problems of its configuration at once. It opens no connection. The
// caller owns the pool, which must connect to the primary.
func New(pool *pgxpool.Pool, cfg Config, handle Handler) (*Receiver, error) {
	cfg, err := cfg.withDefaults()
	problems := []error{err}
	if handle == nil {
		problems = append(problems, errors.New("handler is nil"))
	}
	events, err := idempotency.New(pool, cfg.Idempotency)
	if err != nil {
		problems = append(problems, fmt.Errorf("%s: %w", "Idempotency", err))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return &Receiver{cfg: cfg, events: events, handle: handle}, nil
}

// Run forgets events whose window is over, until ctx ends: see idempotency.Operation.Run. One Run
// is enough for all receivers and operations of a schema.
func (r *Receiver) Run(ctx context.Context) { r.events.Run(ctx) }

// ServeHTTP answers a delivery. The answer reveals neither secrets nor the handler's error.
func (r *Receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	a := r.receive(w, request)
	if a.err != nil {
		level := slog.LevelWarn
		if a.id == "" { // anyone can send any number of deliveries that are not verified
			level = slog.LevelInfo
		}
		r.events.Config().Logger.Log(request.Context(), level, "a webhook delivery is not handled", "sender", r.cfg.Sender, "id", a.id, "type", a.kind, "status", a.status, "error", a.err)
	}
	if a.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(a.retryAfter.Seconds()))))
	}
	w.Header().Set("Cache-Control", "no-store")
	if a.status == http.StatusMethodNotAllowed {
		w.Header().Set("Allow", http.MethodPost)
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(a.status)
	_, _ = io.WriteString(w, cmp.Or(a.text, http.StatusText(a.status))+"\n") // a sender that is gone delivers again
}

// answer describes the response to a delivery.
type answer struct {
	id, kind   string // of the event; empty if the delivery was not verified
	status     int
	text       string        // stored for the event; empty: that of the status
	retryAfter time.Duration // zero: none is sent
	err        error         // why the event was not handled
}

// receive reads and verifies a delivery before it acquires a database connection.
func (r *Receiver) receive(w http.ResponseWriter, request *http.Request) answer {
	var a answer
	if request.Method != http.MethodPost {
		a.status, a.err = http.StatusMethodNotAllowed, fmt.Errorf("%w: method is not POST", ErrMalformed)
		return a
	}
	event, err := r.verified(w, request)
	if err != nil {
		a.refuse(err)
		return a
	}
	a.id, a.kind = event.ID, event.Type
	event.key = idempotency.Key{Scope: r.cfg.Sender, Operation: r.cfg.Idempotency.Operation, Value: event.ID}
	r.once(request.Context(), event, &a)
	return a
}

// verified returns the event of a delivery whose signature matches.
func (r *Receiver) verified(w http.ResponseWriter, request *http.Request) (Event, error) {
	if err := r.cfg.Scheme.once(request.Header); err != nil {
		return Event{}, err
	}
	body, err := serving.ReadBody(w, request, r.cfg.BodyBytesMax, readMax)
	if err != nil {
		return Event{}, err
	}
	event, err := r.cfg.Scheme.verify(request.Header, body)
	if err != nil {
		return Event{}, err
	}
	event.Sender, event.Body, event.Header = r.cfg.Sender, body, request.Header.Clone()
	if r.cfg.ID != nil {
		if event.ID, err = r.cfg.ID(event); err != nil {
			return Event{}, fmt.Errorf("%w: %w", ErrMalformed, err)
		}
	}
	return event, nil
}

// once handles an event in one transaction with the claim of its ID.
func (r *Receiver) once(sender context.Context, event Event, a *answer) {
	ctx, cancel := serving.Outliving(sender, handleMax)
	defer cancel()
	var failure error // the handler's error, whatever it wraps
	response, err := r.events.Once(ctx, event.key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		failure = nil
		if err := r.fresh(ctx, tx, event.Timestamp); err != nil {
			return idempotency.Response{}, err
		}
		failure = r.handle(ctx, tx, event)
		if final := new(*idempotency.FinalError); errors.As(failure, final) {
			return idempotency.Response{}, idempotency.Final(refusal(), failure)
		}
		return idempotency.Response{Status: http.StatusOK}, failure
	})
	switch {
	case err == nil:
		a.status, a.text = cmp.Or(response.Status, http.StatusOK), string(response.Body) // 0: a person may have stored it (outbox-relay keys finish)
		if !response.Replayed {
			a.err = failure
		}
	case failure != nil:
		a.status, a.retryAfter, a.err = http.StatusServiceUnavailable, retryAfter, err
	default:
		a.refuse(err)
	}
}

// fresh compares the signed timestamp with the database's clock. It runs only for events that are
// not stored: a replayed recording of a stored event gets its outcome again, and has no effect.
func (r *Receiver) fresh(ctx context.Context, tx pgx.Tx, signed time.Time) error {
	if signed.IsZero() {
		return nil
	}
	var age float64
	if err := tx.QueryRow(ctx, ageSQL, float64(signed.Unix())).Scan(&age); err != nil {
		return fmt.Errorf("query the age of a delivery: %w", err)
	}
	if math.Abs(age) > r.cfg.Tolerance.Seconds() {
		return fmt.Errorf("%w: it was signed %.0f s ago: want at most %v, in either direction", ErrStale, age, r.cfg.Tolerance)
	}
	return nil
}

const (
	readMax    = 10 * time.Second // for the body
	handleMax  = 30 * time.Second // for handling an event, with all attempts
	retryAfter = 10 * time.Second // is sent to the sender after a failure
)

// refuse sets the status for a delivery that is not handled: 409, 429 or 5xx, and the time of the next one,
// if another delivery of the event may succeed.
func (a *answer) refuse(err error) {
	a.err = err
	switch problem, after := serving.ProblemOf(err); {
	case errors.Is(err, ErrSignature):
		a.status = http.StatusUnauthorized
	case errors.Is(err, ErrStale), errors.Is(err, ErrMalformed), errors.Is(err, idempotency.ErrInvalid):
		a.status = http.StatusBadRequest
	case slices.Contains([]serving.Problem{serving.TooManyWaiting, serving.KeyInProgress, serving.TooLarge, serving.ReadTimeout, serving.Unreadable}, problem):
		a.status, a.retryAfter = problem.Describe().Status, after
	default:
		a.status, a.retryAfter = http.StatusServiceUnavailable, retryAfter
	}
}
