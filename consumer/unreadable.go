package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/bounds"
)

const (
	// inflateMin is the least bound on the inflated size of a batch of records if
	// Config.MessageBytesMax is small: producers put many messages into a batch.
	inflateMin = 64 << 20
	// unreadableMax is how many reads in a row may bring damaged records at one place before the
	// partition halts. The damage may have happened in transit. The count begins again when a later
	// record is read.
	unreadableMax = 3
	// unreadableEvery is how often the session checks whether the records read before are handled.
	unreadableEvery = 100 * time.Millisecond
)

// inflateMax is what a compressed batch may inflate to, in bytes: two of the largest messages.
func (c *Config) inflateMax() int { return min(max(inflateMin, 2*c.MessageBytesMax), 1<<31-1) }

// damage is a place in a partition whose records could not be read.
type damage struct {
	at    int64 // offset after the last record that arrived
	times int   // reads in a row that did not get past it
}

// again counts another read that ended at the offset. It may be smaller than before: the partition
// resumes after its last handled message, and reads the control records after that again.
func (d damage) again(at int64) damage {
	if at > d.at {
		return damage{at, 1}
	}
	return damage{d.at, d.times + 1}
}

// readPast ends the count of the reads at a place when a record at or behind it was read.
func (s *session) readPast(key topicPartition, offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d, found := s.unread[key]; found && offset >= d.at {
		delete(s.unread, key)
	}
}

// isUnreadable reports whether a partition's fetch failed because of its records, and not because
// of the broker or the network. The client has no type for damaged records. It also reports errors
// of requests and connections with a partition, for example if it cannot verify the certificate of
// a new leader. These come without a broker's response, so their high watermark is zero. The one of
// a partition with records is not.
func isUnreadable(fetched kgo.FetchTopicPartition) bool {
	var broker *kerr.Error
	var lost *kgo.ErrDataLoss
	return fetched.Topic != "" && fetched.HighWatermark != 0 && !errors.As(fetched.Err, &broker) && !errors.As(fetched.Err, &lost)
}

// unreadable halts a partition after the records that were read before are handled. It stays halted
// until an operator sets where it resumes, or a new session begins: unreadable records are not
// skipped. The other partitions continue.
func (s *session) unreadable(ctx context.Context, key topicPartition, err error) {
	s.mu.Lock()
	p := s.partitions[key]
	s.mu.Unlock()
	if p == nil {
		return
	}
	at, first := p.queue.fail()
	if !first {
		return
	}
	s.mu.Lock()
	s.unread[key] = s.unread[key].again(at)
	times := s.unread[key].times
	s.mu.Unlock()
	var large *kgo.ErrDecompressTooLarge
	again := times < unreadableMax && !errors.As(err, &large)
	s.looking.Go(func() {
		ticker := time.NewTicker(unreadableEvery)
		defer ticker.Stop()
		for !p.handledAll() {
			select {
			case <-ctx.Done():
				return
			case <-p.done:
				return
			case <-ticker.C:
			}
		}
		if again {
			s.retake(ctx, key, fmt.Sprintf("its records cannot be read: %v", err))
			return
		}
		s.haltUnreadable(ctx, key, p, s.tellUnreadable(key, err, large))
	})
}

func (s *session) tellUnreadable(key topicPartition, err error, large *kgo.ErrDecompressTooLarge) error {
	setting, at := "", "OFFSET"
	if large != nil {
		limit, _ := s.client.OptValue(kgo.MaxDecompressBatchBytes).(int)
		err = fmt.Errorf("the batch at offset %d inflates to more than %d bytes", large.Offset, limit)
		setting, at = "raise Config.MessageBytesMax, or give kgo.MaxDecompressBatchBytes, and restart, or ", fmt.Sprint(large.NextOffset)
	}
	return halted(fmt.Errorf("records of %s/%d cannot be read: %w. To continue, %sset where to resume, which skips the records before that: outbox-relay consumer resume-at --group %s --topic %s --partition %d --at %s --why '...'",
		key.topic, key.partition, err, setting, s.engine.cfg.Group, key.topic, key.partition, at))
}

// haltUnreadable ends the worker of a partition, and records the reason in the log, in its state
// and in the database.
func (s *session) haltUnreadable(ctx context.Context, key topicPartition, p *partition, problem error) {
	s.ends.Lock()
	defer s.ends.Unlock()
	s.mu.Lock()
	ours := s.partitions[key] == p && !s.closing
	if ours {
		delete(s.partitions, key)
		delete(s.unread, key) // an operator decides where it resumes
	}
	s.mu.Unlock()
	if !ours {
		return // it was revoked
	}
	s.stop(ctx, []*partition{p}, min(s.engine.cfg.DrainMax, retakeDrainMax))
	s.commitMarks(ctx)
	s.wait(key, StateHalted, problem)
	s.engine.cfg.Logger.ErrorContext(ctx, "partition halts", "group", s.engine.cfg.Group, "topic", key.topic, "partition", key.partition, "error", problem)
	bounded, cancel := s.engine.bounded(ctx)
	defer cancel()
	// The error is ignored: the reason is already in the log.
	_, _ = s.engine.pool.Exec(bounded, s.engine.sql.trouble, s.engine.cfg.Group, key.topic, key.partition, p.pos.epoch, bounds.ErrorText(problem))
}
