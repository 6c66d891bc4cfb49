package dedup

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/google/uuid"
)

// Secret makes the IDs that are derived from a message unguessable for those who know the message.
// It is never printed.
type Secret struct {
	// From is the time of the first messages whose IDs are derived with this secret. Set it later
	// than the deployment that brings the secret to the last replica: earlier messages keep their
	// IDs.
	From time.Time
	// Key has 32 to 1,024 random bytes.
	Key []byte
}

const hidden = "(secret)"

// Format implements fmt.Formatter.
func (s Secret) Format(out fmt.State, _ rune) { _, _ = io.WriteString(out, hidden) }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalText implements encoding.TextMarshaler.
func (s Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// Secrets derives IDs as ChildID and CallKey do, with HMAC-SHA-256 (RFC 2104) in place of SHA-256.
// The time in the message's ID, else of its record, selects the secret. So each attempt at a record,
// on whatever replica, gets the same IDs before, during and after a rotation. If the ID has no time,
// a second record of the message, such as a producer's duplicate, whose time is on the other side of
// a From, gets other IDs and other keys for its calls. A nil pointer derives without a secret.
type Secrets struct{ list []Secret }

// NewSecrets returns secrets in the order of their times, or all problems at once. Messages before
// the first From have IDs without a secret. Keep a secret as long as messages of its time are
// handled: for their retention, or for as long as they are parked.
func NewSecrets(list ...Secret) (*Secrets, error) {
	var problems []error
	if len(list) == 0 {
		problems = append(problems, errors.New("no secrets: want one at least"))
	}
	for i, s := range list {
		if n := len(s.Key); n < 32 || n > 1024 {
			problems = append(problems, fmt.Errorf("secret %d has a Key of %d bytes: want 32 to 1024", i, n))
		}
		if i > 0 && !s.From.After(list[i-1].From) {
			problems = append(problems, fmt.Errorf("secret %d has a From that is not after the From of the previous one: sort secrets by From", i))
		}
		for j := range i {
			if hmac.Equal(s.Key, list[j].Key) {
				problems = append(problems, fmt.Errorf("secrets %d and %d have the same Key: want different keys", j, i))
			}
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	s := &Secrets{}
	for _, one := range list {
		s.list = append(s.list, Secret{From: one.From, Key: append([]byte{}, one.Key...)})
	}
	return s, nil
}

// Format implements fmt.Formatter.
func (s *Secrets) Format(out fmt.State, _ rune) { _, _ = io.WriteString(out, hidden) }

// LogValue implements slog.LogValuer.
func (s *Secrets) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalText implements encoding.TextMarshaler.
func (s *Secrets) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// of returns the key for a message, by the time of its ID, or else of its record. Nil: none.
func (s *Secrets) of(parent uuid.UUID, record time.Time) []byte {
	if s == nil {
		return nil
	}
	at, ok := Time(parent)
	if !ok {
		at = record
	}
	var key []byte
	for _, one := range s.list {
		if !at.Before(one.From) {
			key = one.Key
		}
	}
	return key
}

// ChildID is the function ChildID with the secret of the parent. record is the time of the parent's
// record.
func (s *Secrets) ChildID(parent uuid.UUID, step string, at, record time.Time) uuid.UUID {
	key := s.of(parent, record)
	if key == nil {
		return ChildID(parent, step, at)
	}
	return timedID(s.sum(key, "child", parent[:], []byte(step)), at)
}

// CallKey is the function CallKey with the secret of the parent. record is the time of the parent's
// record.
func (s *Secrets) CallKey(scope string, parent uuid.UUID, step string, record time.Time) uuid.UUID {
	key := s.of(parent, record)
	if key == nil {
		return CallKey(scope, parent, step)
	}
	return hashedID(s.sum(key, "call", []byte(scope), parent[:], []byte(step)))
}

// LaterID derives the ID of a delayed message: it carries no time. record is the time of the
// parent's record.
func (s *Secrets) LaterID(parent uuid.UUID, step string, record time.Time) uuid.UUID {
	key := s.of(parent, record)
	if key == nil {
		return MessageID("effectonce:later", append(parent[:len(parent):len(parent)], step...))
	}
	return hashedID(s.sum(key, "later", parent[:], []byte(step)))
}

// sum returns the HMAC of the parts, each preceded by its length in 4 bytes (big-endian).
func (*Secrets) sum(key []byte, what string, parts ...[]byte) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range append([][]byte{[]byte(what)}, parts...) {
		mac.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		mac.Write(part)
	}
	return mac.Sum(nil)
}
