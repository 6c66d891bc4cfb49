package webhook

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Event is a delivery with a verified signature.
type Event struct {
	// Sender is Config.Sender.
	Sender string
	// ID by which the event is deduplicated: the same at every redelivery.
	ID string
	// Type of the event: "invoice.paid". Empty if the sender gives none.
	Type string
	// Body as it was signed.
	Body []byte
	// Header of this delivery. Some senders do not sign it: see the scheme.
	Header http.Header
	// Timestamp of this delivery, by the sender's clock. Zero if the sender signs none.
	Timestamp time.Time

	key idempotency.Key
}

// ChildID is the ID under which the handler publishes, or a later step calls other systems: the
// same at every delivery. See idempotency.Key.ChildID.
func (e Event) ChildID(step string) uuid.UUID { return e.key.ChildID(step) }

// Handler applies the effects of an event, all of them through tx, which it must not commit or roll
// back. Like the work of idempotency.Operation.Once it may run more than once: its effects are
// those of one execution.
//
// An error rolls back, and makes the sender redeliver; Refuse ends the deliveries. ctx does not end
// when the sender disconnects, only after 30 s.
type Handler func(ctx context.Context, tx pgx.Tx, event Event) error

// Reasons why a delivery is not handled. Nothing was written.
var (
	// ErrSignature: no signature matches any of the secrets. 401.
	ErrSignature = errors.New("no signature matches")
	// ErrMalformed: a header or an ID is missing, repeated, or not in the sender's format. 400.
	ErrMalformed = errors.New("malformed delivery")
	// ErrStale: the delivery was signed longer ago, or further ahead, than Config.Tolerance. 400.
	ErrStale = errors.New("the delivery's timestamp is out of tolerance")
	// ErrTooLarge: the body has more than Config.BodyBytesMax. 413.
	ErrTooLarge = serving.ErrTooLarge
	// ErrSlow: the body did not arrive within 10 s. 408.
	ErrSlow = serving.ErrSlow
)

// Refuse means that the event can never be handled: the handler's writes are rolled back, the
// refusal is stored as the event's outcome, and the sender gets 200 with the body "refused", now and at
// each redelivery, so that it stops: after a 4xx Stripe and Standard Webhooks retry for days. Any other
// idempotency.Final does the same.
func Refuse(err error) error { return idempotency.Final(refusal(), err) }
