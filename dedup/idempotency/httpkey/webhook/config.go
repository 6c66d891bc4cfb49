package webhook

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
)

// Config of a Receiver. The zero value works, but for Sender and Scheme.
type Config struct {
	// Sender names who sends, and is the scope of its events' IDs: two senders never meet. Required; 1 to 255 bytes. To
	// change it is to forget the events of the last days.
	Sender string
	// Scheme by which the sender signs, with its secrets. Required.
	Scheme Scheme
	// Tolerance is how far the signed timestamp may lie back, or ahead of the database's clock. 1 s to 24 h; default 5 min.
	// GitHub signs none.
	Tolerance time.Duration
	// ID makes of an event what it is deduplicated by, for senders that send one happening under two IDs. 1 to 255 bytes;
	// see idempotency.Domain. Default: Event.ID.
	ID func(event Event) (string, error)
	// CompareBody refuses an ID that comes again with another body, with 422. Default: the ID decides. Set it, or take it
	// back, together with another name of the sender, or a window after the last event: redeliveries of events that were
	// handled before the change would be refused.
	CompareBody bool
	// RefusedStatus answers what Refuse made, so that the sender stops: 200 to 299, or 400 to 499 but for 408, 409, 410, 425
	// and 429, which senders take for a wish to try again, or to be removed. Default 200, with the body "refused". With 4xx
	// Stripe and Standard Webhooks try again for days: see the package's text.
	RefusedStatus int
	// RetryAfter is what a sender is told after a failure. 1 s to 1 h; default 10 s.
	RetryAfter time.Duration
	// BodyBytesMax is the largest body. 1 byte to 64 MiB; default 1 MiB.
	BodyBytesMax int
	// ReadMax is how long the body may take; no database connection is held meanwhile. It shortens what http.Server.ReadTimeout
	// allows and never extends it. 1 ms to 10 min; default 10 s.
	ReadMax time.Duration
	// HandleMax is how long an event may take, with all its attempts; the sender's hanging up does not end it. More than
	// Idempotency.WaitMax; 1 ms to 1 h; default 30 s.
	HandleMax time.Duration
	// Idempotency is how events are remembered: the schema, the window, time limits. Here Window is 7 days unless set, and
	// must be longer than the sender's retries and than twice the tolerance. Operation is "webhook" unless set. AttemptsMax
	// refuses an event that failed so often. Strict and Failed are not for webhooks.
	Idempotency idempotency.Config
	// Logger gets deliveries that are not handled. No secret, body or header. Default: none.
	Logger *slog.Logger
	// Hooks are called synchronously; they must return quickly.
	Hooks Hooks
}

// Hooks are optional callbacks, for metrics.
type Hooks struct {
	// Answered is called for each delivery.
	Answered func(answer Answer)
}

// Answer is what a delivery was told.
type Answer struct {
	Sender string
	// ID and Type of the event: empty if the delivery was not verified.
	ID, Type string
	// Status that the sender got.
	Status int
	// Replayed: the event was handled, or refused, before. Refused: it was refused, now or before.
	Replayed, Refused bool
	// Err says why it is not handled: one of this package's, of idempotency's, or of the handler.
	Err error
}

const refused = "refused"

func (c Config) withDefaults() (Config, error) {
	problems := []error{c.Scheme.problem}
	if c.Scheme.verify == nil {
		problems = append(problems, errors.New("Scheme is empty: want StandardWebhooks, Stripe, GitHub or SchemeOf"))
	}
	if err := (idempotency.Key{Scope: c.Sender, Operation: "-", Value: "-"}).Validate(); err != nil {
		problems = append(problems, fmt.Errorf("%s: %w", "Sender", err))
	}
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "Tolerance", Value: &c.Tolerance, Default: 5 * time.Minute, Min: time.Second, Max: 24 * time.Hour},
		bounds.Duration{Field: "RetryAfter", Value: &c.RetryAfter, Default: 10 * time.Second, Min: time.Second, Max: time.Hour},
		bounds.Duration{Field: "ReadMax", Value: &c.ReadMax, Default: 10 * time.Second, Min: time.Millisecond, Max: 10 * time.Minute},
		bounds.Duration{Field: "HandleMax", Value: &c.HandleMax, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
	)...)
	problems = append(problems, bounds.Ints(
		bounds.Int{Field: "BodyBytesMax", Value: &c.BodyBytesMax, Default: 1 << 20, Min: 1, Max: 64 << 20},
		bounds.Int{Field: "RefusedStatus", Value: &c.RefusedStatus, Default: 200, Min: 200, Max: 499},
	)...)
	switch s := c.RefusedStatus; {
	case s >= 300 && s < 400, s == 408, s == 409, s == 410, s == 425, s == 429:
		problems = append(problems, bounds.Problem("RefusedStatus", s, "2xx, or 4xx but for 408, 409, 410, 425 and 429"))
	}
	i := &c.Idempotency
	i.Operation = cmp.Or(i.Operation, "webhook")
	if !i.Forever {
		i.Window = cmp.Or(i.Window, 7*24*time.Hour)
		// Otherwise a delivery that was recorded could be sent again when its ID is forgotten, and still be fresh.
		if i.Window <= 2*c.Tolerance {
			problems = append(problems, bounds.Problem("Idempotency.Window", i.Window, fmt.Sprintf("more than twice the Tolerance of %v", c.Tolerance)))
		}
	}
	if i.Strict {
		problems = append(problems, errors.New("Idempotency.Strict: want false: a failure that is over tomorrow would refuse the event"))
	}
	if i.Failed != nil {
		problems = append(problems, errors.New("Idempotency.Failed: want none: RefusedStatus answers"))
	}
	i.Failed = func(error) idempotency.Response { return c.refusal() }
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if i.Logger == nil {
		i.Logger = c.Logger
	}
	return c, errors.Join(problems...)
}

// refusal is the outcome that is stored of a refused event.
func (c Config) refusal() idempotency.Response {
	return idempotency.Response{Status: c.RefusedStatus, Body: []byte(refused)}
}
