package consumer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// Phase is what Run is doing.
type Phase string

// The phases.
const (
	// PhaseStopped: Run was not called yet, or it returned.
	PhaseStopped Phase = "stopped"
	// PhaseStarting: Run checks the database and the topics, and waits for them if they do not
	// answer.
	PhaseStarting Phase = "starting"
	// PhaseJoining: the consumer is not yet, or no longer, in the group.
	PhaseJoining Phase = "joining"
	// PhaseConsuming: the consumer is in the group. It may have no partitions.
	PhaseConsuming Phase = "consuming"
	// PhaseDraining: Run's context ended; batches in progress may finish.
	PhaseDraining Phase = "draining"
)

// Status is the state of a consumer.
type Status struct {
	Group string `json:"group"`
	Phase Phase  `json:"phase"`
	// Err is why the consumer does not consume: what Run waits for, why it rejoins the group, or
	// what it returned. It is empty while the consumer consumes.
	Err string `json:"-"`
	// Partitions are those that Kafka assigned to this consumer, sorted by topic and number.
	Partitions []PartitionStatus `json:"partitions"`
}

// PartitionStatus is the state of a partition.
type PartitionStatus struct {
	Topic     string         `json:"topic"`
	Partition int32          `json:"partition"`
	State     PartitionState `json:"state"`
	Since     time.Time      `json:"since"` // when the state began
	// Err is why the partition does not run, or the last failure of the message that it retries.
	// Otherwise it is empty. It may contain the text of a handler's error, such as parts of a
	// payload.
	Err string `json:"-"`
	// Position is the stored next offset; -1: none is stored.
	Position int64 `json:"position"`
	// Lag is the number of offsets between the last handled message and the end of the partition.
	// The end is as this consumer last saw it: with the last records that arrived, or up to a
	// minute ago. A topic without new writes has lag 0. Offsets of control records count for up to
	// 10 s. -1: unknown, the partition is not taken over.
	Lag int64 `json:"lag"`
	// Parked is how many messages of the partition are parked, counted up to 10,000, every 10 s.
	// -1: not counted yet.
	Parked int64 `json:"parked"`
	// Epoch is the epoch of this consumer's takeover; 0: the partition is not taken over.
	Epoch int64 `json:"epoch"`
}

// Status returns the state of the consumer and its partitions. It reads memory only, is safe for
// concurrent use, and may be called at any time, also before and after Run. It does not cover
// Deliver.
func (c *Consumer) Status() Status {
	now := c.phase.Load()
	status := Status{Group: c.engine.cfg.Group, Phase: now.phase, Partitions: []PartitionStatus{}}
	if now.err != nil {
		status.Err = now.err.Error()
	}
	s := c.session.Load()
	if s == nil {
		return status
	}
	if status.Phase == PhaseJoining && s.joined() {
		status.Phase, status.Err = PhaseConsuming, ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, a := range s.assignments {
		status.Partitions = append(status.Partitions, a.status(s.partitions[key]))
	}
	slices.SortFunc(status.Partitions, func(a, b PartitionStatus) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return status
}

// status returns the state of an assigned partition; p is nil if it has no worker.
func (a *assignment) status(p *partition) PartitionStatus {
	status := PartitionStatus{
		Topic: a.key.topic, Partition: a.key.partition, State: a.state, Since: a.since, Position: a.position, Lag: -1, Parked: a.parked, Epoch: a.epoch,
	}
	if a.err != nil {
		status.Err = a.err.Error()
	}
	if a.end >= 0 && a.reached >= 0 {
		status.Lag = max(0, a.end-a.reached)
	}
	if p != nil {
		pos := p.current.Load()
		status.Epoch, status.Position = pos.epoch, -1
		if pos.stored != nil {
			status.Position = *pos.stored
		}
	}
	return status
}

// joined reports whether the session is a member of the group.
func (s *session) joined() bool {
	if s.isClosing() {
		return false
	}
	select {
	case <-s.ready:
		member, generation := s.client.GroupMetadata()
		return member != "" && generation > 0
	default:
		return false
	}
}

// phaseNow is the phase of Run, and why it does not consume.
type phaseNow struct {
	phase Phase
	err   error
}

func (c *Consumer) enter(phase Phase, err error) { c.phase.Store(&phaseNow{phase, err}) }

// countEvery is how often parked messages are counted: one statement for all partitions of a
// session.
const countEvery = 10 * time.Second

// parkedCountMax bounds the count of a partition.
const parkedCountMax = 10_000

// keepCounting counts the parked messages of the session's partitions, for Status.
func (s *session) keepCounting(ctx context.Context) {
	ticker := time.NewTicker(s.consumer.countEvery)
	defer ticker.Stop()
	said := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		err := s.countParked(ctx)
		if err != nil && ctx.Err() == nil && !said {
			s.engine.cfg.Logger.WarnContext(ctx, "could not count parked messages; will retry",
				"group", s.engine.cfg.Group, "error", err)
		}
		said = err != nil
	}
}

func (s *session) countParked(ctx context.Context) error {
	e := s.engine
	var keys []topicPartition
	s.mu.Lock()
	for key := range s.assignments {
		keys = append(keys, key)
	}
	s.mu.Unlock()
	if len(keys) == 0 {
		return nil
	}
	consumers, topics, numbers := make([]int32, len(keys)), make([]string, len(keys)), make([]int32, len(keys))
	for i, key := range keys {
		consumers[i], topics[i], numbers[i] = s.consumer.ids[key.topic].ID(), key.topic, key.partition
	}
	ctx, cancel := e.bounded(ctx)
	defer cancel()
	rows, err := e.pool.Query(ctx, e.sql.countParked, consumers, topics, numbers, parkedCountMax)
	if err != nil {
		return fmt.Errorf("count parked messages: %w", err)
	}
	var place int
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&place, &n}, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if a := s.assignments[keys[place]]; a != nil {
			a.parked = n
		}
		return nil
	})
	return err
}
