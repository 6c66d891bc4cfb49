package consumer

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/dedup"
)

// claimed is the database's answer about the messages of a transaction.
type claimed struct {
	fresh     []bool
	conflicts []bool               // another message has the same ID; nil: not compared
	forgotten time.Time            // claims of messages up to this time may have been forgotten; zero: none were
	held      map[keyHash]struct{} // those of the requested keys that have a parked message
}

// selection splits the messages of a transaction into handled and parked ones. Duplicates are in
// neither part.
type selection struct {
	handle []*Message
	index  []int // index of each in the batch
	parked []*Message
	why    []*parking           // of each parked
	behind []bool               // of each parked: it waits for an earlier one of its key
	keys   map[keyHash]struct{} // keys that are held from now on
	kept   map[*Message]bool    // parked messages that cannot be dead letters

	duplicate *Message // the first; nil: none
}

// choose decides for each message whether it is handled, parked or dropped as a duplicate.
func (e *engine) choose(w *work, c claimed) *selection {
	s := &selection{handle: make([]*Message, 0, len(w.msgs)), index: make([]int, 0, len(w.msgs))}
	for i, msg := range w.msgs {
		why := msg.park
		switch {
		case c.conflicts != nil && c.conflicts[i]:
			why = &parking{reason: reasonConflict, err: errConflict}
		case !c.fresh[i]:
			s.duplicate = cmp.Or(s.duplicate, msg)
			continue
		case why == nil && msg.row == 0 && e.expires():
			why = w.expired(msg, c.forgotten)
		}
		behind := msg.row == 0 && (holds(c.held, msg.Key) || holds(s.keys, msg.Key))
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

// report lists the parked messages, for hooks and the log.
func (s *selection) report(policy OnFailure) []Parked {
	if len(s.parked) == 0 {
		return nil
	}
	list := make([]Parked, len(s.parked))
	for i, msg := range s.parked {
		why := s.why[i]
		list[i] = Parked{Message: msg, Reason: why.reason, Err: why.err, Attempts: why.attempts, DeadLetter: policy == OnFailureDeadLetter && !s.kept[msg]}
	}
	return list
}

func holds(keys map[keyHash]struct{}, key []byte) bool {
	if len(keys) == 0 || key == nil {
		return false
	}
	_, held := keys[sha256.Sum256(key)]
	return held
}

// holdsKeys reports whether later messages wait for a parked message of their key.
func (e *engine) holdsKeys() bool {
	return e.cfg.Order != OrderUnordered && e.cfg.OnFailure != OnFailureDeadLetter
}

// expires reports whether claims are forgotten eventually, and with them the proof that a message
// is fresh.
func (e *engine) expires() bool {
	return !e.cfg.Forever && !e.unclaimed && e.cfg.Dedup != DedupByPosition
}

// expired returns why a message whose claim is fresh may have been handled before, or nil.
//
// In the range that this consumer has handled, every message was claimed. A fresh claim there means
// that the earlier claim was forgotten, whatever times the message carries. Outside of the range
// the time forgotten decides: claims of messages before it may have been forgotten. The older of
// the ID's time and the record's time counts.
func (w *work) expired(msg *Message, forgotten time.Time) *parking {
	if p := w.pos; p.handled(msg.Offset) {
		return &parking{reason: reasonExpired, err: fmt.Errorf("offset %d was already handled (as were offsets %d to %d), and the message's claim was forgotten since then: it is not run again",
			msg.Offset, p.handledFrom, *p.handledBefore()-1)}
	}
	if forgotten.IsZero() {
		return nil
	}
	if at, ok := dedup.Time(msg.ID); ok && at.Before(forgotten) {
		return &parking{reason: reasonExpired, err: expiredError{"ID", at, forgotten}}
	}
	if msg.Time.UnixMilli() > 0 && msg.Time.Before(forgotten) {
		return &parking{reason: reasonExpired, err: expiredError{"record", msg.Time, forgotten}}
	}
	return nil
}

// expiredError reports that a message is older than claims that were forgotten.
type expiredError struct {
	what          string
	at, forgotten time.Time
}

func (e expiredError) Error() string {
	return fmt.Sprintf("the message's %s is of %s, and claims of messages before %s were forgotten: it may have been handled before",
		e.what, e.at.UTC().Format(time.RFC3339), e.forgotten.UTC().Format(time.RFC3339))
}
