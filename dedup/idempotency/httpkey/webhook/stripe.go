package webhook

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
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
	parsed, problem := keys("Stripe", secrets)
	return Scheme{
		headers: []string{"Stripe-Signature"},
		problem: problem,
		verify: func(header http.Header, body []byte) (Event, error) {
			stamp, signatures, err := parseStripe(header.Get("Stripe-Signature"))
			if err != nil {
				return Event{}, err
			}
			timestamp, err := seconds(stamp)
			if err != nil {
				return Event{}, err
			}
			if !fits(parsed, signatures, hex.EncodeToString, []byte(stamp), []byte("."), body) {
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

// parseStripe splits "t=1492774577,v1=5257a8…,v0=6ffbb5…". Only v1 counts: v0 belongs to test
// events, and other versions do not exist yet.
func parseStripe(text string) (stamp string, signatures []string, err error) {
	for item := range strings.SplitSeq(text, ",") {
		name, value, found := strings.Cut(item, "=")
		switch {
		case !found:
			return "", nil, fmt.Errorf("%w: Stripe-Signature has an item without =", ErrMalformed)
		case name == "t" && stamp != "":
			return "", nil, fmt.Errorf("%w: Stripe-Signature has two timestamps", ErrMalformed)
		case name == "t":
			stamp = value
		case name == "v1" && len(signatures) == signaturesMax:
			return "", nil, fmt.Errorf("%w: Stripe-Signature has more than %d signatures", ErrMalformed, signaturesMax)
		case name == "v1":
			signatures = append(signatures, value)
		}
	}
	return stamp, signatures, nil
}
