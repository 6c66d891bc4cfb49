package idempotency

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/dedup"
)

// Key names one request of one tenant for one operation, and identifies what the request asks for.
type Key struct {
	// Scope is the tenant: the same value in two scopes is two keys. Required, 1 to 255 bytes of
	// UTF-8 without control characters.
	Scope string
	// Operation of the request. Empty: that of the Operation that gets the key. 1 to 255 bytes.
	Operation string
	// Value is what the client sent, or Domain made. 1 to 255 bytes of UTF-8 without control
	// characters.
	Value string
	// Fingerprint of the request: see NewFingerprint. A claim under the same key with another
	// fingerprint is refused. Zero: none, for values that identify the request completely (Domain).
	// A claim with a fingerprint does not match one without.
	Fingerprint Fingerprint
}

// Fingerprint distinguishes requests: a SHA-256 hash.
type Fingerprint [sha256.Size]byte

// NewFingerprint hashes the parts of a request, each with its length: method, path, query,
// canonical body.
func NewFingerprint(parts ...[]byte) Fingerprint { return Fingerprint(hash("", parts...)) }

// NewKey makes a key for a new logical request: a UUIDv7. Call it once, before the first attempt,
// and send the key with each attempt.
func NewKey() string { return uuid.Must(uuid.NewV7()).String() }

// Domain makes the value of a key from what identifies the operation everywhere, so that no random
// key has to be remembered: Domain("charge", "order", "4127"). The boundaries between parts count:
// Domain("a", "b-c") differs from Domain("a-b", "c"). A value longer than 255 bytes is replaced by
// a hash.
func Domain(parts ...string) string {
	escaped := make([]string, len(parts))
	for i, part := range parts {
		escaped[i] = strings.NewReplacer(`~`, `~~`, `-`, `~-`).Replace(part)
	}
	value := strings.Join(escaped, "-")
	if len(value) > keyBytesMax || !readable(value) {
		return fmt.Sprintf("~sha256-%x", hash("domain", []byte(value)))
	}
	return value
}

const keyBytesMax = 255

// ErrInvalid marks a key that is out of bounds. No statement was sent to the database.
var ErrInvalid = errors.New("invalid idempotency key")

// Validate returns all problems of a key at once; the error wraps ErrInvalid. It does not repeat
// the value.
func (k Key) Validate() error {
	var problems []error
	for _, part := range []struct{ field, value string }{{"scope", k.Scope}, {"operation", k.Operation}, {"value", k.Value}} {
		switch {
		case part.value == "" || len(part.value) > keyBytesMax:
			problems = append(problems, fmt.Errorf("%w: %s has %d bytes: want 1 to %d", ErrInvalid, part.field, len(part.value), keyBytesMax))
		case !readable(part.value):
			problems = append(problems, fmt.Errorf("%w: %s has control characters, or is not UTF-8", ErrInvalid, part.field))
		}
	}
	return errors.Join(problems...)
}

// readable reports whether text can be stored, and shown to a person in one line.
func readable(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// ChildID derives the ID under which a step of the work calls other systems, or publishes. It is
// the same at every attempt, on every machine, and also after a failover that lost the key. It
// carries no time (it is a UUIDv8), since a time would not survive such a failover. Pass it to
// foreign calls as their idempotency key, and to outbox messages as their ID. It panics without a
// scope, an operation or a value, since IDs of other requests would be the same: Operation.Key sets
// all three.
func (k Key) ChildID(step string) uuid.UUID {
	if k.Scope == "" || k.Operation == "" || k.Value == "" {
		panic("idempotency: ChildID of a key without scope, operation or value: make the key by Operation.Key")
	}
	return dedup.MessageID("effectonce:idempotency", hash("child", []byte(k.Scope), []byte(k.Operation), []byte(k.Value), []byte(step)))
}

// String names a key in logs and errors, without its value, which may be a client's secret.
func (k Key) String() string {
	return fmt.Sprintf("%s of scope %q (%x)", k.Operation, k.Scope, hash("show", []byte(k.Value))[:4])
}

func hash(purpose string, parts ...[]byte) []byte {
	h := sha256.New()
	for _, part := range append([][]byte{[]byte(purpose)}, parts...) {
		var length [8]byte
		binary.BigEndian.PutUint64(length[:], uint64(len(part)))
		h.Write(length[:])
		h.Write(part)
	}
	return h.Sum(nil)
}
