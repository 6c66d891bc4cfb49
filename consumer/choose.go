package consumer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
)

// claimed is the database's answer about the messages of a transaction.
type claimed struct {
	fresh     []bool
	taken     bool                 // messages were taken as fresh in vain
	result    *dedup.Result        // of a claim by ID; nil: there was none
	conflicts map[int]*Message     // that have the ID of another message, as they are parked
	dropped   int                  // conflicts that are dropped, as configured
	forgotten time.Time            // claims of messages up to this time may have been forgotten; zero: none were
	held      map[keyHash]struct{} // those of the requested keys that have a parked message
}

// selection splits the messages of a transaction into handled, skipped and parked ones. Duplicates are in
// no part.
type selection struct {
	handle []*Message
	skip   []*Message // tombstones that have no effect
	parked []parkedMessage
	keys   map[keyHash]struct{} // keys that are held from now on
}

// parkedMessage is a message that is not handled.
type parkedMessage struct {
	*Message

	why    *parking
	behind bool // it waits for an earlier one of its key
	letter bool // it became a dead letter
}

// compare finds messages that have the ID of another message. They are claimed under their
// coordinates, before they are parked: one that was parked before (it is redelivered) is a duplicate.
func (c *Consumer) compare(ctx context.Context, t *tx, w *work, got *claimed) error {
	if got.result == nil {
		return nil
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	if err := c.claims.Compare(ctx, t.conn, w.consumer, got.result); err != nil {
		return err
	}
	var own []*Message
	var places []int
	for i, conflict := range got.result.Conflicts() {
		if conflict {
			own, places = append(own, w.msgs[i].underCoordinates()), append(places, i)
		}
	}
	if len(own) == 0 {
		return nil
	}
	if c.cfg.OnConflict == OnConflictDrop {
		got.dropped = len(own)
		return nil
	}
	batch := &pgx.Batch{}
	result := c.claims.Queue(batch, w.consumer, claims(own))
	if err := t.conn.SendBatch(ctx, batch).Close(); err != nil {
		return dedup.WrapClaimError(err)
	}
	got.conflicts = map[int]*Message{}
	for i, fresh := range result.Fresh() {
		if fresh {
			got.conflicts[places[i]] = own[i]
		}
	}
	return nil
}

// choose decides for each message whether it is handled, parked or dropped as a duplicate.
func (c *Consumer) choose(w *work, got claimed) *selection {
	s := &selection{handle: make([]*Message, 0, len(w.msgs))}
	for i, msg := range w.msgs {
		why := msg.park
		switch {
		case got.conflicts[i] != nil:
			if why == nil || why.retry {
				why = cmp.Or(c.expired(w, msg, got.forgotten), &parking{reason: reasonConflict, err: fmt.Errorf("%w (ID %s)", errConflict, msg.ID)})
			}
			msg = got.conflicts[i]
		case !got.fresh[i]:
			continue
		case msg.row == 0 && (why == nil || why.retry):
			why = cmp.Or(c.expired(w, msg, got.forgotten), why)
		}
		behind := msg.row == 0 && (holds(got.held, msg.Key) || holds(s.keys, msg.Key))
		if behind && (why == nil || why.retry) {
			why = &parking{reason: reasonBehind}
		}
		switch {
		case why == nil && msg.Value == nil && c.cfg.OnTombstone == OnTombstoneSkip:
			s.skip = append(s.skip, msg)
			continue
		case why == nil:
			s.handle = append(s.handle, msg)
			continue
		}
		s.parked = append(s.parked, parkedMessage{Message: msg, why: why, behind: behind})
		if c.holdsKeys() && msg.Key != nil && !c.becomesLetter(why) {
			if s.keys == nil {
				s.keys = map[keyHash]struct{}{}
			}
			s.keys[sha256.Sum256(msg.Key)] = struct{}{}
		}
	}
	return s
}

// becomesLetter reports whether a message is published as a dead letter and not parked.
func (c *Consumer) becomesLetter(why *parking) bool {
	return c.cfg.OnFailure == OnFailureDeadLetter && !why.retry && !why.kept && why.reason != reasonBehind && why.reason != reasonTooLarge
}

// report lists the parked messages, for hooks and the log.
func (s *selection) report() (list []Parked) {
	for _, p := range s.parked {
		list = append(list, Parked{
			Message: p.Message, Reason: p.why.reason, Err: p.why.err, Attempts: p.why.attempts, Retry: p.why.retry, RetryIn: p.why.wait, DeadLetter: p.letter,
		})
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
func (c *Consumer) holdsKeys() bool { return c.cfg.Order != OrderUnordered }

// expires reports whether claims are forgotten eventually, and with them the proof that a message
// is fresh.
func (c *Consumer) expires() bool {
	return !c.cfg.Forever && !c.unclaimed && c.cfg.Dedup != DedupByPosition
}

// expired returns why a message whose claim is fresh may have been handled before, or nil.
//
// In the range that this consumer has handled, every message was claimed. A fresh claim there means
// that the earlier claim was forgotten, whatever times the message carries. Outside of the range
// the time forgotten decides: claims of messages before it may have been forgotten. The older of
// the ID's time and the record's time counts.
func (c *Consumer) expired(w *work, msg *Message, forgotten time.Time) *parking {
	if !c.expires() {
		return nil
	}
	if w.pos.isHandled(msg.Offset) {
		return &parking{reason: reasonExpired, err: fmt.Errorf("offset %d was already handled (as were all from offset %d on), and the message's claim was forgotten since then: it is not run again",
			msg.Offset, w.pos.handled.from)}
	}
	if forgotten.IsZero() {
		return nil
	}
	if at, ok := dedup.Time(msg.ID); ok && at.Before(forgotten) {
		return &parking{reason: reasonExpired, err: tooOld("ID", at, forgotten)}
	}
	if msg.Time.Year() >= timeBegins && msg.Time.Before(forgotten) {
		return &parking{reason: reasonExpired, err: tooOld("record", msg.Time, forgotten)}
	}
	return nil
}

// timeBegins is the first year in which a record's time counts: an earlier one is no time (zero, or
// seconds where milliseconds are expected), and proves nothing.
const timeBegins = 2010

// tooOld reports that a message is older than claims that were forgotten.
func tooOld(what string, at, forgotten time.Time) error {
	return fmt.Errorf("the message's %s is of %s, and claims of messages before %s were forgotten: it may have been handled before",
		what, at.UTC().Format(time.RFC3339), forgotten.UTC().Format(time.RFC3339))
}
