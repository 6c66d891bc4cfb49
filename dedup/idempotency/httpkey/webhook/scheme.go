package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Scheme is how a sender signs: StandardWebhooks, Stripe, GitHub, or one of your own. It holds the secrets where no
// formatting verb, logger or encoder finds them.
type Scheme struct {
	// headers are there exactly once, or nothing is read.
	headers []string
	verify  func(header http.Header, body []byte) (Event, error)
	problem error
}

// SchemeOf makes a scheme of a function, for other senders. It returns the event's ID, Type and, if it is signed,
// Timestamp; or an error that wraps ErrSignature or ErrMalformed. It compares with hmac.Equal, and puts no secret into
// an error.
func SchemeOf(verify func(header http.Header, body []byte) (Event, error)) Scheme {
	return Scheme{verify: verify}
}

// once looks that the headers of a scheme are there, each one time: of two, a proxy may have read the other.
func (s Scheme) once(header http.Header) error {
	for _, name := range s.headers {
		if n := len(header.Values(name)); n != 1 {
			return fmt.Errorf("%w: header %s is there %d times: want once", ErrMalformed, name, n)
		}
		if n := len(header.Get(name)); n == 0 || n > headerBytesMax {
			return fmt.Errorf("%w: header %s has %d bytes: want 1 to %d", ErrMalformed, name, n, headerBytesMax)
		}
	}
	return nil
}

const (
	headerBytesMax = 4096 // far more than any sender's, also in a rotation
	signaturesMax  = 32   // of one delivery: each costs a verification for each secret
)

// fits tells whether one of the given signatures is that of one of the secrets. It compares texts, so that a signature
// has only one form, and in constant time.
func fits(secrets [][]byte, given []string, encode func(mac []byte) string, parts ...[]byte) bool {
	found := false
	for _, secret := range secrets {
		mac := hmac.New(sha256.New, secret)
		for _, part := range parts {
			mac.Write(part)
		}
		want := []byte(encode(mac.Sum(nil)))
		for _, signature := range given {
			found = hmac.Equal([]byte(signature), want) || found
		}
	}
	return found
}

// seconds reads a Unix time as senders write it: digits alone.
func seconds(text string) (time.Time, error) {
	if text == "" || len(text) > 12 || strings.Trim(text, "0123456789") != "" {
		return time.Time{}, fmt.Errorf("%w: the timestamp is not one of Unix in seconds", ErrMalformed)
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: the timestamp is not one of Unix in seconds", ErrMalformed)
	}
	return time.Unix(n, 0).UTC(), nil
}

// keys checks secrets that are used as they stand. Problems name them by their place.
func keys(sender string, secrets []string) (parsed [][]byte, problem error) {
	var problems []error
	if len(secrets) == 0 || len(secrets) > secretsMax {
		problems = append(problems, fmt.Errorf("%s: %d secrets: want 1 to %d", sender, len(secrets), secretsMax))
	}
	for i, secret := range secrets {
		if secret == "" || strings.TrimSpace(secret) != secret {
			problems = append(problems, fmt.Errorf("%s: secret %d is empty, or has space around it (a line end of a file?)", sender, i+1))
		}
		parsed = append(parsed, []byte(secret))
	}
	return parsed, errors.Join(problems...)
}

const secretsMax = 16
