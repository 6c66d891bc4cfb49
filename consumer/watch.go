package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// watchEvery is how often a session looks after its partitions: with one statement for all of
	// them, for operators' orders, pauses, due messages, and positions that moved back. A partition
	// that handles messages would also see the last in its own transactions.
	watchEvery = time.Second
	// lookEvery is how often it compares them with the ends of their topics.
	lookEvery = time.Minute
)

// watch looks after the partitions until ctx ends.
func (s *session) watch(ctx context.Context) {
	ticker := time.NewTicker(s.consumer.watchEvery)
	defer ticker.Stop()
	do := func(what string, f func(context.Context) error) {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			if times, due := s.said.Due(what, false); due {
				s.consumer.cfg.Logger.WarnContext(ctx, "could not "+what+"; will retry", "group", s.consumer.cfg.Group, "error", err, "times", times)
			}
		}
	}
	looked := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		do("poll for orders, pauses and due messages", s.poll)
		s.retryDue(ctx)
		do("commit offsets to Kafka; the database has the position", s.commitMarks)
		if time.Since(looked) >= s.consumer.lookEvery {
			looked = time.Now()
			do("compare partitions with their topics", s.look)
		}
	}
}

// found is the database's answer about one partition.
type found struct {
	place  int
	back   bool // the database lost commits of this holder
	order  bool // an operator wants it to resume elsewhere
	paused bool
	due    bool
}

// working lists the running partitions.
func (s *session) working() []*partition {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*partition, 0, len(s.assignments))
	for _, a := range s.assignments {
		if a.p != nil {
			list = append(list, a.p)
		}
	}
	return list
}

// poll asks the database about all partitions at once, also about halted ones.
func (s *session) poll(ctx context.Context) error {
	e := s.consumer
	var list []*assignment
	var workers []*partition
	var topics []string
	var numbers, consumers []int32
	var epochs []int64
	var known []*int64
	s.mu.Lock()
	for key, a := range s.assignments {
		if a.pos == nil || a.p == nil && a.does.state != StateHalted {
			continue
		}
		list, workers = append(list, a), append(workers, a.p)
		topics, numbers, consumers = append(topics, key.topic), append(numbers, key.partition), append(consumers, s.consumer.ids[key.topic].ID())
		epochs, known = append(epochs, a.pos.epoch), append(known, a.pos.stored())
	}
	s.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	limited, cancel := e.bounded(ctx)
	defer cancel()
	rows, err := e.pool.Query(limited, e.sql[pollSQL], e.cfg.Group, topics, numbers, consumers, epochs, known)
	if err != nil {
		return err
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f found, err error) {
		err = row.Scan(&f.place, &f.back, &f.order, &f.paused, &f.due)
		return f, err
	})
	if err != nil {
		return err
	}
	paused := make([]bool, len(list))
	for _, f := range all {
		paused[f.place] = f.paused
		switch key := list[f.place].key; {
		case f.order:
			s.acquireLater(ctx, "an operator ordered where it resumes", key)
		case f.back:
			s.acquireLater(ctx, errWentBack.Error(), key)
		case f.due && !f.paused && workers[f.place] != nil:
			signal(workers[f.place].looked)
		}
	}
	for i, p := range workers {
		if p != nil && p.halt(paused[i]) { //nolint:contextcheck // the partition has its own
			text := "an operator paused the topic for the group: the partition waits"
			if !paused[i] {
				text = "an operator resumed the topic for the group"
			}
			p.log(slog.LevelInfo, text)
		}
	}
	return nil
}

// acquireLater acquires partitions again, in a goroutine: others are looked after meanwhile.
func (s *session) acquireLater(ctx context.Context, why string, keys ...topicPartition) {
	var free []topicPartition
	s.mu.Lock()
	for _, key := range keys {
		if a := s.assignments[key]; a != nil && !a.acquiring {
			a.acquiring = true
			free = append(free, key)
		}
	}
	s.mu.Unlock()
	if len(free) == 0 {
		return
	}
	s.looking.Go(func() {
		s.acquire(ctx, why, free...)
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, key := range free {
			if a := s.assignments[key]; a != nil {
				a.acquiring = false
			}
		}
	})
}

// readsMax is how many reads in a row may bring damaged records at one position before the partition
// halts: the damage may have happened in transit.
const readsMax = 3

// retryDue acquires the partitions that had to wait, and those whose next records could not be read.
func (s *session) retryDue(ctx context.Context) {
	var due, again []topicPartition
	s.mu.Lock()
	for key, a := range s.assignments {
		switch {
		case !a.retryAt.IsZero() && time.Until(a.retryAt) <= 0:
			due = append(due, key)
		case a.unreadable != nil && !a.acquiring && a.p != nil && a.p.handledAll():
			if at := a.p.pos.next.Load(); a.reads == 0 || a.readAt != at {
				a.reads, a.readAt = 0, at
			}
			a.reads++
			again = append(again, key)
		}
	}
	s.mu.Unlock()
	s.acquireLater(ctx, "it had to wait", due...)
	s.acquireLater(ctx, "its records cannot be read", again...)
}

// errStuck asks for a new session: the broker has records that the client does not return.
var errStuck = errors.New("records exist in the topic but do not arrive: rejoining the group")

// atEnd is a partition that is handled up to its end.
type atEnd struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Epoch     int64  `json:"epoch"`
	Delivered int64  `json:"delivered"`
	Nothing   bool   `json:"nothing"` // nothing arrived since it was acquired
}

// look stores which partitions are at their end, so that idle ones do not delay the removal of
// claims. A partition that an open transaction of another program holds back is not at its end: its
// records may be older than claims that would be removed. look also detects a stuck client.
func (s *session) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, acquisitionMax)
	defer cancel()
	partitions := s.working()
	if len(partitions) == 0 {
		return nil
	}
	var now time.Time // read before the ends: later records are not covered
	if err := s.consumer.pool.QueryRow(ctx, clockSQL).Scan(&now); err != nil {
		return fmt.Errorf("ask for the time: %w", err)
	}
	admin := kadm.NewClient(s.client)
	ends, err := admin.ListEndOffsets(ctx, s.consumer.cfg.Topics...)
	stable, stableErr := admin.ListCommittedOffsets(ctx, s.consumer.cfg.Topics...)
	if err = errors.Join(err, stableErr); err != nil { // some leaders may have answered
		err = fmt.Errorf("ask Kafka for the ends of partitions: %w", err)
	}
	var list []atEnd
	for _, p := range partitions {
		end, ok := stable.Lookup(p.pos.topic, p.pos.partition)
		last, found := ends.Lookup(p.pos.topic, p.pos.partition)
		if !ok || !found || end.Err != nil || last.Err != nil {
			continue
		}
		s.mu.Lock()
		if a := s.assignments[p.key()]; a != nil {
			a.end = end.Offset
		}
		s.mu.Unlock()
		switch arrived, stuck, upTo := p.compare(end.Offset); {
		case stuck:
			s.restart(fmt.Errorf("%s/%d: %w", p.pos.topic, p.pos.partition, errStuck))
			return nil
		case arrived && last.Offset > end.Offset:
			p.log(slog.LevelWarn, "an open transaction of another program holds back records of the partition: end it, or claims are not forgotten", "readable_up_to", end.Offset, "end", last.Offset)
		case arrived:
			list = append(list, atEnd{p.pos.topic, p.pos.partition, p.pos.epoch, upTo, upTo == p.backlog.begin})
		}
	}
	if len(list) == 0 {
		return err
	}
	if _, failed := s.consumer.pool.Exec(ctx, s.consumer.sql[caughtUpSQL], s.consumer.cfg.Group, now, list); failed != nil {
		return errors.Join(err, fmt.Errorf("store that partitions are at their end: %w", failed))
	}
	return err
}

// inflateMin is the least bound on the inflated size of a batch of records if Config.MessageBytesMax
// is small: producers put many messages into a batch.
const inflateMin = 64 << 20

// inflateMax is what a compressed batch may inflate to, in bytes: two of the largest messages.
func (c *Config) inflateMax() int { return min(max(inflateMin, 2*c.MessageBytesMax), 1<<31-1) }

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

// unreadable stops the fetching of a partition. When the records that were read before are handled,
// it is acquired again, or halts: see damage. Unreadable records are not skipped.
func (s *session) unreadable(key topicPartition, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.assignments[key]; a != nil && a.p != nil && a.unreadable == nil {
		a.unreadable = err
		a.p.backlog.end()
		s.pauseFetching([]topicPartition{key})
	}
}

// damage is why a partition halts whose records cannot be read; nil: they are read again.
func (s *session) damage(a *assignment) error {
	var large *kgo.ErrDecompressTooLarge
	setting, at, err := "", "OFFSET", a.unreadable
	switch {
	case err == nil:
		return nil
	case errors.As(err, &large):
		limit, _ := s.client.OptValue(kgo.MaxDecompressBatchBytes).(int)
		err = fmt.Errorf("the batch at offset %d inflates to more than %d bytes", large.Offset, limit)
		setting, at = "raise Config.MessageBytesMax, or give kgo.MaxDecompressBatchBytes, and restart, or ", fmt.Sprint(large.NextOffset)
	case a.reads < readsMax:
		return nil
	}
	return fmt.Errorf("records of %s/%d cannot be read: %w. To continue, %sset where to resume, which skips the records before that: outbox-relay consumer resume-at --group %s --topic %s --partition %d --at %s --why '...'",
		a.key.topic, a.key.partition, err, setting, s.consumer.cfg.Group, a.key.topic, a.key.partition, at)
}
