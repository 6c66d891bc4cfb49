package consumer

import (
	"crypto/sha256"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/outbox"
)

// Reasons why a message is parked. The schema lists the same.
const (
	reasonFailed      = "failed"       // it failed AttemptsMax times
	reasonPermanent   = "permanent"    // its error is permanent
	reasonUndecodable = "undecodable"  // its value is not of the expected form
	reasonUnknownType = "unknown_type" // no handler is routed to
	reasonInvalid     = "invalid"      // it cannot be identified
	reasonTooLarge    = "too_large"    // above MessageBytesMax; only its coordinates and key are kept
	reasonExpired     = "expired"      // older than the dedup window: it may have been handled before
	reasonConflict    = "conflict"     // its ID was claimed by a message with other content
	reasonCrashed     = "crashed"      // an attempt at it may have ended with the process
	reasonBehind      = "behind"       // an earlier message of its key is parked
)

// parking is why a message is not handled.
type parking struct {
	reason   string
	err      error
	attempts int
	retry    bool          // it is tried again,
	wait     time.Duration // after this
	kept     bool          // it cannot be a dead letter
}

// state is how the message is stored.
func (p *parking) state(behind bool) string {
	switch {
	case behind:
		return "behind"
	case p.retry:
		return "retry"
	default:
		return "parked"
	}
}

// errConflict: dropping the message as a duplicate would lose it.
var errConflict = errors.New("the ID was claimed by a message with another key or value: its producer uses an ID twice")

// keyHash is the hash of a key.
type keyHash [sha256.Size]byte

// heldKeys are the keys of a partition that may have a parked message: later messages of such a key
// are parked behind it. The holder of the partition loads the keys when it takes over, and adds the
// keys that it parks. Its workers share them. They are a hint: a transaction with a message of such
// a key asks the database (see queueHeld), so operators may delete parked messages without notice.
// A message without a key waits for no other message.
type heldKeys struct {
	mu   sync.Mutex
	keys map[keyHash]struct{}
}

func newHeldKeys() *heldKeys { return &heldKeys{keys: map[keyHash]struct{}{}} }

func readHashes(into map[keyHash]struct{}) func(rows pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var hash []byte
		_, err := pgx.ForEachRow(rows, []any{&hash}, func() error { into[keyHash(hash)] = struct{}{}; return nil })
		return err
	}
}

// of returns the keys of messages that may be held, each once.
func (h *heldKeys) of(msgs []*Message) (hashes [][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.keys) == 0 {
		return nil
	}
	seen := map[keyHash]struct{}{}
	for _, msg := range msgs {
		if msg.Key == nil {
			continue
		}
		hash := keyHash(sha256.Sum256(msg.Key))
		if _, held := h.keys[hash]; !held {
			continue
		}
		if _, again := seen[hash]; !again {
			seen[hash] = struct{}{}
			hashes = append(hashes, hash[:])
		}
	}
	return hashes
}

func (h *heldKeys) add(keys map[keyHash]struct{}) {
	if len(keys) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for key := range keys {
		h.keys[key] = struct{}{}
	}
}

// free removes keys. Only the caller that waited for the transaction may call it: an abandoned
// attempt whose COMMIT is answered late does not know what was parked since then.
func (h *heldKeys) free(keys [][]byte) {
	if len(keys) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, key := range keys {
		delete(h.keys, keyHash(key))
	}
}

// queuePark adds the statements that park messages, except those that became dead letters.
func (c *Consumer) queuePark(batch *pgx.Batch, consumer dedup.Consumer, s *selection) {
	for _, p := range s.parked {
		why, value, headers := p.why, p.Value, "{}"
		if why.reason == reasonTooLarge {
			value = nil
		} else if text, err := outbox.EncodeHeaders(slices.DeleteFunc(slices.Clone(p.Headers), func(h Header) bool { return !isText(h.Name) })); err == nil {
			headers = string(text)
		}
		switch text := bounds.ErrorText(why.err); {
		case p.letter:
		case p.row != 0:
			batch.Queue(c.sql[setBackSQL], p.row, why.state(false), why.reason, text, why.attempts, why.wait)
		default:
			batch.Queue(c.sql[parkSQL], consumer.ID(), p.ID, p.Topic, pgtype.UUID{Bytes: p.topicID, Valid: p.topicID != uuid.Nil}, p.Partition, p.Offset, p.Key, value, headers, p.Time,
				why.reason, text, why.attempts, why.state(p.behind), why.wait)
		}
	}
}

// isText reports whether the database can store the name of a header.
func isText(name string) bool { return utf8.ValidString(name) && !strings.ContainsRune(name, 0) }
