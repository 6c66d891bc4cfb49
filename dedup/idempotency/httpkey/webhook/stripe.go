package webhook

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
)

// Stripe verifies Stripe-Signature, with any of the endpoint's secrets (whsec_…, as Stripe shows
// them). ID and type of the event are those of its body. During a rotation Stripe signs with both
// secrets.
//
// Stripe may make two events for one occurrence: if that matters, derive Config.ID from the type
// and the ID of data.object.
//
// https://docs.stripe.com/webhooks#verify-manually
func Stripe(secrets ...string) Scheme {
	parsed, problem := keys("Stripe", secrets, plain)
	return Scheme{
		headers: []string{"Stripe-Signature"},
		problem: problem,
		verify: func(header http.Header, body []byte) (Event, error) {
			items, err := parse("Stripe-Signature", header, ",", "=") // "t=1492774577,v1=5257a8…,v0=6ffbb5…"
			if err != nil {
				return Event{}, err
			}
			if len(items["t"]) != 1 {
				return Event{}, fmt.Errorf("%w: Stripe-Signature has %d timestamps", ErrMalformed, len(items["t"]))
			}
			stamp := items["t"][0]
			timestamp, err := seconds(stamp)
			if err != nil {
				return Event{}, err
			}
			if !fits(parsed, items["v1"], hex.EncodeToString, []byte(stamp), []byte("."), body) {
				return Event{}, fmt.Errorf("%w: Stripe-Signature", ErrSignature)
			}
			var event struct {
				ID   string `json:"id"`
				Type string `json:"type"`
			}
			if err := json.Unmarshal(body, &event); err != nil || event.ID == "" {
				return Event{}, fmt.Errorf("%w: the body is not a JSON object with an id", ErrMalformed)
			}
			return Event{ID: event.ID, Type: event.Type, Timestamp: timestamp}, nil
		},
	}
}
