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

// Scheme is how a sender signs: StandardWebhooks, Stripe, GitHub, or your own. No formatting verb,
// logger or encoder can reach its secrets.
type Scheme struct {
	// headers must each be present exactly once; otherwise nothing is read.
	headers []string
	verify  func(header http.Header, body []byte) (Event, error)
	problem error
}

// SchemeOf makes a scheme from a function, for other senders. The function returns the event's ID,
// Type and, if it is signed, Timestamp; or an error that wraps ErrSignature or ErrMalformed. It
// must compare with hmac.Equal, and must not put a secret into an error.
func SchemeOf(verify func(header http.Header, body []byte) (Event, error)) Scheme {
	return Scheme{verify: verify}
}

// once checks that each header of a scheme is present once: of two, a proxy may have read the other
// one.
func (s Scheme) once(header http.Header) error {
	for _, name := range s.headers {
		if n := len(header.Values(name)); n != 1 {
			return fmt.Errorf("%w: header %s occurs %d times: want once", ErrMalformed, name, n)
		}
		if n := len(header.Get(name)); n == 0 || n > headerBytesMax {
			return fmt.Errorf("%w: header %s has %d bytes: want 1 to %d", ErrMalformed, name, n, headerBytesMax)
		}
	}
	return nil
}

const (
	headerBytesMax = 4096 // far more than any sender sends, also during a rotation
	signaturesMax  = 32   // of a version in a delivery: each one is verified against each secret
)

// fits reports whether one of the given signatures was made with one of the secrets. It compares
// the encoded texts, so that a signature has only one valid form, and in constant time.
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

// parse returns the values in a header by their names. A scheme reads those that it knows: signatures of other
// versions are ignored.
func parse(name string, header http.Header, separator, assign string) (map[string][]string, error) {
	items := map[string][]string{}
	for item := range strings.SplitSeq(header.Get(name), separator) {
		key, value, found := strings.Cut(item, assign)
		if !found {
			return nil, fmt.Errorf("%w: %s has an item without %q", ErrMalformed, name, assign)
		}
		if items[key] = append(items[key], value); len(items[key]) > signaturesMax {
			return nil, fmt.Errorf("%w: %s has more than %d signatures", ErrMalformed, name, signaturesMax)
		}
	}
	return items, nil
}

// seconds parses a Unix time as senders write it: only digits.
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

// keys parses secrets. parse returns what it wants instead, if it cannot. Errors name a secret by its position.
func keys(sender string, secrets []string, parse func(secret string) (parsed []byte, want string)) (parsed [][]byte, problem error) {
	var problems []error
	if len(secrets) == 0 || len(secrets) > secretsMax {
		problems = append(problems, fmt.Errorf("%s: %d secrets: want 1 to %d", sender, len(secrets), secretsMax))
	}
	for i, secret := range secrets {
		raw, want := parse(secret)
		if want != "" {
			problems = append(problems, fmt.Errorf("%s: secret %d: want %s", sender, i+1, want))
		}
		parsed = append(parsed, raw)
	}
	return parsed, errors.Join(problems...)
}

// plain is for secrets that are used as they are.
func plain(secret string) (parsed []byte, want string) {
	if secret == "" || strings.TrimSpace(secret) != secret {
		want = "one that is not empty, without space around it (a line end of a file?)"
	}
	return []byte(secret), want
}

const secretsMax = 16
