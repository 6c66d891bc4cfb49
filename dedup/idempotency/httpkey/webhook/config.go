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
	// BodyBytesMax is the largest body. 1 byte to 64 MiB; default 1 MiB.
	BodyBytesMax int
	// Idempotency configures the storage of events: the schema, the window, time limits. Window
	// defaults to 7 days here, and must be longer than the sender's retries and than twice the
	// tolerance. Operation, Strict and Failed are not allowed. Its Logger also gets deliveries that are
	// not handled, without secrets, bodies or headers.
	Idempotency idempotency.Config
}

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
	if i.WaitMax >= handleMax {
		problems = append(problems, bounds.Problem("Idempotency.WaitMax", i.WaitMax, fmt.Sprintf("less than %v", handleMax)))
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
	return idempotency.Response{Status: http.StatusOK, Body: []byte("refused")}
}
