package webhook

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
)

// StandardWebhooks verifies webhook-signature of https://www.standardwebhooks.com, with any of the
// keys: shared secrets (whsec_…, for signatures v1) and ed25519 public keys (whpk_…, for v1a). The
// event's ID is webhook-id; its type is that of the body, if it is JSON.
func StandardWebhooks(keys ...string) Scheme {
	secrets, publics, problem := standardKeys(keys)
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
			symmetric, asymmetric, err := parseStandard(header.Get("Webhook-Signature"))
			if err != nil {
				return Event{}, err
			}
			prefix := []byte(id + "." + stamp + ".")
			if !fits(secrets, symmetric, base64.StdEncoding.EncodeToString, prefix, body) && !signed(publics, asymmetric, prefix, body) {
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

// parseStandard splits "v1,K5oZ… v1a,hnO3…". Other versions are ignored.
func parseStandard(text string) (symmetric, asymmetric []string, err error) {
	for item := range strings.SplitSeq(text, " ") {
		version, signature, found := strings.Cut(item, ",")
		switch {
		case !found:
			return nil, nil, fmt.Errorf("%w: Webhook-Signature has a signature without a version", ErrMalformed)
		case version == "v1":
			symmetric = append(symmetric, signature)
		case version == "v1a":
			asymmetric = append(asymmetric, signature)
		}
		if len(symmetric)+len(asymmetric) > signaturesMax {
			return nil, nil, fmt.Errorf("%w: Webhook-Signature has more than %d signatures", ErrMalformed, signaturesMax)
		}
	}
	return symmetric, asymmetric, nil
}

// signed reports whether one of the signatures was made with the private key of one of the public
// keys.
func signed(publics []ed25519.PublicKey, given []string, prefix, body []byte) bool {
	if len(publics) == 0 || len(given) == 0 {
		return false
	}
	message := append(prefix[:len(prefix):len(prefix)], body...)
	for _, text := range given {
		signature, err := base64.StdEncoding.DecodeString(text)
		// The decoder ignores line ends, and the last bits.
		if err != nil || len(signature) != ed25519.SignatureSize || base64.StdEncoding.EncodeToString(signature) != text {
			continue
		}
		for _, public := range publics {
			if ed25519.Verify(public, message, signature) {
				return true
			}
		}
	}
	return false
}

// standardKeys parses keys. Errors name a key by its position.
func standardKeys(keys []string) (secrets [][]byte, publics []ed25519.PublicKey, problem error) {
	var problems []error
	if len(keys) == 0 || len(keys) > secretsMax {
		problems = append(problems, fmt.Errorf("StandardWebhooks: %d keys: want 1 to %d", len(keys), secretsMax))
	}
	for i, key := range keys {
		kind, text, _ := strings.Cut(key, "_")
		// The decoder's error would show a character of the secret.
		raw, err := base64.StdEncoding.DecodeString(text)
		whole := err == nil && !strings.ContainsAny(text, "\r\n")
		switch {
		case kind == "whsec" && whole && len(raw) >= secretBytesMin && len(raw) <= secretBytesMax:
			secrets = append(secrets, raw)
		case kind == "whpk" && whole && len(raw) == ed25519.PublicKeySize:
			publics = append(publics, raw)
		case kind == "whsk":
			problems = append(problems, fmt.Errorf("StandardWebhooks: key %d is the sender's private one: want its public key, whpk_…", i+1))
		default:
			problems = append(problems, fmt.Errorf("StandardWebhooks: key %d: want whsec_ and %d to %d bytes of base64, or whpk_ and %d",
				i+1, secretBytesMin, secretBytesMax, ed25519.PublicKeySize))
		}
	}
	return secrets, publics, errors.Join(problems...)
}

// The standard's bounds of shared secrets.
const (
	secretBytesMin = 24
	secretBytesMax = 64
)
