package webhook

import (
	"encoding/hex"
	"fmt"
	"net/http"
)

// GitHub verifies X-Hub-Signature-256 of GitHub's webhooks, with any of the secrets. The event's ID
// is X-GitHub-Delivery, its type X-GitHub-Event.
//
// GitHub signs only the body: no time, no ID, no type. An attacker who recorded one delivery can
// send it again under another ID, at any time. Use TLS up to the receiver; if that is not enough,
// derive Config.ID from the body.
//
// https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries
func GitHub(secrets ...string) Scheme {
	parsed, problem := keys("GitHub", secrets, plain)
	return Scheme{
		headers: []string{"X-Hub-Signature-256", "X-GitHub-Delivery", "X-GitHub-Event"},
		problem: problem,
		verify: func(header http.Header, body []byte) (Event, error) {
			encode := func(mac []byte) string { return "sha256=" + hex.EncodeToString(mac) }
			if !fits(parsed, []string{header.Get("X-Hub-Signature-256")}, encode, body) {
				return Event{}, fmt.Errorf("%w: X-Hub-Signature-256", ErrSignature)
			}
			return Event{ID: header.Get("X-GitHub-Delivery"), Type: header.Get("X-GitHub-Event")}, nil
		},
	}
}
