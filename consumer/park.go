package consumer

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/outbox"
)

// Why a message is parked. The schema lists the same.
const (
	reasonFailed      = "failed"       // it failed AttemptsMax times
	reasonPermanent   = "permanent"    // its error cannot pass
	reasonUndecodable = "undecodable"  // its value is not of the expected form
	reasonUnknownType = "unknown_type" // no handler is routed to
	reasonInvalid     = "invalid"      // it cannot be identified
	reasonTooLarge    = "too_large"    // above MessageBytesMax; only its coordinates and key are kept
	reasonExpired     = "expired"      // older than the dedup window: it may have been handled before
	reasonConflict    = "conflict"     // its ID was claimed by a message of other content
	reasonCrashed     = "crashed"      // its last attempts ended with the process
	reasonBehind      = "behind"       // an earlier message of its key is parked
)

// parking says why a message is not handled.
type parking struct {
	reason   string
	err      error
	attempts int
}

// errConflict: dropping the message as a duplicate would lose it.
var errConflict = errors.New("the ID was claimed by a message with another key or value: its producer uses an ID twice")

// expiredError says how old a message is.
type expiredError struct {
	what       string
	at, oldest time.Time
}

func (e expiredError) Error() string {
	return fmt.Sprintf("the message's %s is of %s, and the dedup window begins at %s: it may have been handled before, and its claim be forgotten",
		e.what, e.at.UTC().Format(time.RFC3339), e.oldest.UTC().Format(time.RFC3339))
}

// keyHash stands for a key.
type keyHash [sha256.Size]byte

// heldKeys are the keys of a partition of which a message is parked: what comes later goes behind it. The
// holder of the partition loads them when it takes over and keeps them up to date; workers of a partition
// share them. A message without a key waits for nobody.
type heldKeys struct {
	mu   sync.Mutex
	keys map[keyHash]struct{}
}

func (h *heldKeys) has(key []byte) bool {
	if key == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	_, held := h.keys[sha256.Sum256(key)]
	return held
}

func (h *heldKeys) any() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.keys) > 0
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

func (h *heldKeys) replace(keys map[keyHash]struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.keys = keys
}

func (h *heldKeys) list() [][]byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := make([][]byte, 0, len(h.keys))
	for key := range h.keys {
		keys = append(keys, key[:])
	}
	return keys
}

// sorting divides the messages of a transaction.
type sorting struct {
	handle []*Message
	index  []int // of each in the batch
	parked []*Message
	why    []*parking           // of each parked
	behind []bool               // of each parked: it waits for an earlier one of its key
	keys   map[keyHash]struct{} // that are held from now on
}

// sortOut decides for each fresh message whether it is handled or parked.
func (e *engine) sortOut(w *work, c claimed) *sorting {
	s := &sorting{handle: make([]*Message, 0, len(w.msgs)), index: make([]int, 0, len(w.msgs))}
	anyHeld := e.holdsKeys() && w.held.any()
	for i, msg := range w.msgs {
		why := msg.park
		switch {
		case c.conflicts != nil && c.conflicts[i]:
			why = &parking{reason: reasonConflict, err: errConflict}
		case !c.fresh[i]:
			continue
		case why == nil && msg.row == 0:
			why = expired(msg, c.oldest)
		}
		behind := msg.row == 0 && (anyHeld && w.held.has(msg.Key) || s.holds(msg.Key))
		if why == nil && behind {
			why = &parking{reason: reasonBehind}
		}
		if why == nil {
			s.handle, s.index = append(s.handle, msg), append(s.index, i)
			continue
		}
		s.parked, s.why, s.behind = append(s.parked, msg), append(s.why, why), append(s.behind, behind)
		if e.holdsKeys() && msg.Key != nil {
			if s.keys == nil {
				s.keys = map[keyHash]struct{}{}
			}
			s.keys[sha256.Sum256(msg.Key)] = struct{}{}
		}
	}
	return s
}

func (s *sorting) holds(key []byte) bool {
	if len(s.keys) == 0 || key == nil {
		return false
	}
	_, held := s.keys[sha256.Sum256(key)]
	return held
}

// holdsKeys tells whether a parked message makes the later ones of its key wait.
func (e *engine) holdsKeys() bool {
	return e.cfg.Order != OrderUnordered && e.cfg.OnFailure != OnFailureDeadLetter
}

// expired returns why a message cannot be proven fresh, or nil: its claim, if it was handled before, may be
// forgotten. The ID's time counts and the record's, whichever is older.
func expired(msg *Message, oldest time.Time) *parking {
	if at, ok := dedup.Time(msg.ID); ok && at.Before(oldest) {
		return &parking{reason: reasonExpired, err: expiredError{"ID", at, oldest}}
	}
	if msg.Time.UnixMilli() > 0 && msg.Time.Before(oldest) {
		return &parking{reason: reasonExpired, err: expiredError{"record", msg.Time, oldest}}
	}
	return nil
}

// queuePark adds the insert of parked messages to a transaction.
func (e *engine) queuePark(batch *pgx.Batch, consumer dedup.Consumer, s *sorting) {
	n := len(s.parked)
	ids, topics, partitions, offsets := make([][16]byte, n), make([]string, n), make([]int32, n), make([]int64, n)
	topicIDs, keys, payloads, headers := make([]*[16]byte, n), make([][]byte, n), make([][]byte, n), make([]string, n)
	times, reasons, errs := make([]time.Time, n), make([]string, n), make([]string, n)
	attempts, states := make([]int32, n), make([]string, n)
	for i, m := range s.parked {
		ids[i], topics[i], partitions[i], offsets[i] = m.ID, m.Topic, m.Partition, m.Offset
		if id := [16]byte(m.topicID); id != [16]byte{} {
			topicIDs[i] = &id
		}
		keys[i], times[i], headers[i] = m.Key, m.Time, "{}"
		if s.why[i].reason != reasonTooLarge {
			payloads[i], headers[i] = m.Value, headersText(m.Headers)
		}
		reasons[i], errs[i], attempts[i] = s.why[i].reason, bounds.ErrorText(s.why[i].err), int32(s.why[i].attempts)
		states[i] = "parked"
		if s.behind[i] {
			states[i] = "behind"
		}
	}
	batch.Queue(e.sql.park, consumer.ID(), ids, topics, topicIDs, partitions, offsets, keys, payloads, headers, times, reasons, errs, attempts, states)
}

// headersText is the stored form of headers, as in the outbox. Names that JSON cannot hold are kept, too: then
// all headers are one value of raw pairs.
func headersText(headers []Header) string {
	stored := make([]outbox.Header, len(headers))
	storable := true
	for i, h := range headers {
		stored[i] = outbox.Header{Name: h.Name, Value: h.Value}
		storable = storable && utf8.ValidString(h.Name) && !strings.ContainsRune(h.Name, 0)
	}
	if storable {
		if text, err := outbox.EncodeHeaders(stored); err == nil {
			return string(text)
		}
	}
	raw := make([][2][]byte, len(headers))
	for i, h := range headers {
		raw[i] = [2][]byte{[]byte(h.Name), h.Value}
	}
	pairs, _ := json.Marshal(raw) // byte slices always marshal
	text, _ := outbox.EncodeHeaders([]outbox.Header{{Name: rawHeaders, Value: pairs}})
	return string(text)
}

const rawHeaders = "effectonce-raw-headers"

// headersOf reads headersText.
func headersOf(text []byte) ([]Header, error) {
	stored, err := outbox.DecodeHeaders(text)
	if err != nil {
		return nil, err
	}
	if len(stored) == 1 && stored[0].Name == rawHeaders {
		var raw [][2][]byte
		if err := json.NewDecoder(bytes.NewReader(stored[0].Value)).Decode(&raw); err != nil {
			return nil, err
		}
		headers := make([]Header, len(raw))
		for i, pair := range raw {
			headers[i] = Header{Name: string(pair[0]), Value: pair[1]}
		}
		return headers, nil
	}
	headers := make([]Header, len(stored))
	for i, h := range stored {
		headers[i] = Header(h)
	}
	return headers, nil
}
