package webhook

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// StandardWebhooks verifies webhook-signature of https://www.standardwebhooks.com, with any of the
// shared secrets (whsec_…, for signatures v1). The event's ID is webhook-id; its type is that of the
// body, if it is JSON. For public keys (whpk_…, v1a) use SchemeOf with ed25519.Verify.
func StandardWebhooks(secrets ...string) Scheme {
	parsed, problem := keys("StandardWebhooks", secrets, standard)
	return Scheme{
		headers: []string{"Webhook-Id", "Webhook-Timestamp", "Webhook-Signature"},
		problem: problem,
		verify: func(header http.Header, body []byte) (Event, error) {
			id, stamp := header.Get("Webhook-Id"), header.Get("Webhook-Timestamp")
			// id.timestamp.body is signed: with a full stop in the ID the boundaries could be
			// shifted.
			if strings.Contains(id, ".") {
				return Event{}, fmt.Errorf("%w: Webhook-Id has a full stop", ErrMalformed)
			}
			timestamp, err := seconds(stamp)
			if err != nil {
				return Event{}, err
			}
			items, err := parse("Webhook-Signature", header, " ", ",") // "v1,K5oZ… v1a,hnO3…"
			if err != nil {
				return Event{}, err
			}
			if !fits(parsed, items["v1"], base64.StdEncoding.EncodeToString, []byte(id+"."+stamp+"."), body) {
				return Event{}, fmt.Errorf("%w: Webhook-Signature", ErrSignature)
			}
			var event struct {
				Type string `json:"type"`
			}
			_ = json.Unmarshal(body, &event) // the body need not be JSON
			return Event{ID: id, Type: event.Type, Timestamp: timestamp}, nil
		},
	}
}

// standard parses a secret. The decoder's error would show a character of it.
func standard(secret string) (raw []byte, want string) {
	text, known := strings.CutPrefix(secret, "whsec_")
	raw, err := base64.StdEncoding.DecodeString(text)
	if !known || err != nil || strings.ContainsAny(text, "\r\n") || len(raw) < secretBytesMin || len(raw) > secretBytesMax {
		want = fmt.Sprintf("whsec_ and %d to %d bytes of base64; for public keys (v1a) use SchemeOf", secretBytesMin, secretBytesMax)
	}
	return raw, want
}

// The standard's bounds of shared secrets.
const (
	secretBytesMin = 24
	secretBytesMax = 64
)
