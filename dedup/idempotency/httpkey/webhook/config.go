package webhook

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
)

// Config of a Receiver. The zero value works, except that Sender, Name and Scheme are required.
type Config struct {
	// Sender is the name of the sender, and the scope of its events' IDs: the same ID of two
	// senders is two events. Required; 1 to 255 bytes. After a change, stored events are not
	// recognized.
	Sender string
	// Name of the receiver: the operation of its keys. Each receiver of an event handles it once, so
	// two receivers need two names, and the replicas of one have the same. Required; 1 to 255 bytes.
	Name string
	// Scheme is how the sender signs, with its secrets. Required.
	Scheme Scheme
	// Tolerance is how far the signed timestamp may be behind or ahead of the database's clock. 1 s
	// to 24 h; default 5 min. GitHub signs no timestamp.
	Tolerance time.Duration
	// ID derives the deduplication key from an event, for senders that send one occurrence under
	// two IDs. 1 to 255 bytes; see idempotency.Domain. Default: Event.ID.
	ID func(event Event) (string, error)
	// CompareBody refuses an ID that is delivered again with another body, with 422. Default: only
	// the ID counts. Change it together with the name of the sender, or one window after the last
	// event: otherwise redeliveries of events that were handled before the change are refused.
	CompareBody bool
	// BodyBytesMax is the largest body. 1 byte to 64 MiB; default 1 MiB.
	BodyBytesMax int
	// ReadMax is how long reading the body may take; no database connection is held during it. It
	// can shorten http.Server.ReadTimeout, never extend it. 1 ms to 10 min; default 10 s.
	ReadMax time.Duration
	// HandleMax is how long handling an event may take, with all attempts; it continues if the
	// sender disconnects. More than Idempotency.WaitMax; 1 ms to 1 h; default 30 s.
	HandleMax time.Duration
	// Idempotency configures the storage of events: the schema, the window, time limits. Window
	// defaults to 7 days here, and must be longer than the sender's retries and than twice the
	// tolerance. Operation, Strict and Failed are not allowed. Its Logger also gets deliveries that are
	// not handled, without secrets, bodies or headers.
	Idempotency idempotency.Config
	// Hooks are called synchronously; they must return quickly.
	Hooks Hooks
}

// Hooks are optional callbacks, for metrics.
type Hooks struct {
	// Answered is called for each delivery.
	Answered func(answer Answer)
}

// Answer describes the response to a delivery.
type Answer struct {
	Sender string
	// ID and Type of the event: empty if the delivery was not verified.
	ID, Type string
	// Status that the sender got.
	Status int
	// Replayed: the event was handled, or refused, before. Refused: it was refused, now or before.
	Replayed, Refused bool
	// Err is the reason why it was not handled: an error of this package, of idempotency, or of the
	// handler.
	Err error

	retryAfter time.Duration // zero: none is sent
}

const refused = "refused"

func (c Config) withDefaults() (Config, error) {
	problems := []error{c.Scheme.problem}
	if c.Scheme.verify == nil {
		problems = append(problems, errors.New("Scheme is empty: want StandardWebhooks, Stripe, GitHub or SchemeOf"))
	}
	for _, named := range [][2]string{{"Sender", c.Sender}, {"Name", c.Name}} {
		if err := (idempotency.Key{Scope: named[1], Operation: "-", Value: "-"}).Validate(); err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", named[0], err))
		}
	}
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "Tolerance", Value: &c.Tolerance, Default: 5 * time.Minute, Min: time.Second, Max: 24 * time.Hour},
		bounds.Duration{Field: "ReadMax", Value: &c.ReadMax, Default: 10 * time.Second, Min: time.Millisecond, Max: 10 * time.Minute},
		bounds.Duration{Field: "HandleMax", Value: &c.HandleMax, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
	)...)
	problems = append(problems, bounds.Ints(
		bounds.Int{Field: "BodyBytesMax", Value: &c.BodyBytesMax, Default: 1 << 20, Min: 1, Max: 64 << 20},
	)...)
	i := &c.Idempotency
	if i.Operation != "" {
		problems = append(problems, errors.New("Idempotency.Operation: want none: it is the Name"))
	}
	i.Operation = cmp.Or(c.Name, "-")
	if !i.Forever {
		i.Window = cmp.Or(i.Window, 7*24*time.Hour)
		// Otherwise a recorded delivery could be replayed after its ID is forgotten, while its
		// timestamp is still within the tolerance.
		if i.Window <= 2*c.Tolerance {
			problems = append(problems, bounds.Problem("Idempotency.Window", i.Window, fmt.Sprintf("more than twice the Tolerance of %v", c.Tolerance)))
		}
	}
	if i.Strict {
		problems = append(problems, errors.New("Idempotency.Strict: want false: a failure that is over tomorrow would refuse the event"))
	}
	if i.Failed != nil {
		problems = append(problems, errors.New("Idempotency.Failed: want none: Refuse answers"))
	}
	i.Failed = func(error) idempotency.Response { return refusal() }
	return c, errors.Join(problems...)
}

// refusal is the stored outcome of a refused event.
func refusal() idempotency.Response {
	return idempotency.Response{Status: http.StatusOK, Body: []byte(refused)}
}
