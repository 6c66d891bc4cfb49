package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pause"
)

// acquisitionMax bounds one attempt to acquire partitions, so that a request that hangs is abandoned
// and logged.
const acquisitionMax = 15 * time.Second

// position is a partition's position as its present holder knows it. It exists once.
type position struct {
	topic     string
	topicID   uuid.UUID // zero if the brokers have none
	partition int32
	epoch     int64
	next      atomic.Int64 // next_offset as this holder last saw it stored; -1: none
	handled   handledRange
	// stuck is how many consecutive holders ended without a clean release and without finishing any
	// message.
	stuck int
	// server is the start time of the server on which the position was acquired. After a failover
	// it differs.
	server time.Time
}

// stored is next_offset as this holder last saw it; nil: none.
func (p *position) stored() *int64 {
	if next := p.next.Load(); next >= 0 {
		return &next
	}
	return nil
}

func (p *position) set(next *int64) {
	if next != nil {
		p.next.Store(*next)
	}
}

func (p *position) isHandled(offset int64) bool { return p.handled.contains(offset, p.stored()) }

// hold is a partition that is acquired, or why it could not be.
type hold struct {
	known
	waits    error // why it could not be acquired
	decision decision
	pos      *position // nil: it could not
}

func (c *Consumer) newHold(key topicPartition) *hold {
	return &hold{known: known{topicPartition: key, group: c.cfg.Group, dedup: c.cfg.Dedup, consumer: c.ids[key.topic].ID(), rule: c.idRule(key.topic)}}
}

var (
	errWentBack = errors.New("the database lost commits of this consumer (a failover?): resuming at its position")
	errPaused   = errors.New("an operator paused the topic")
)

// acquire ends what runs of partitions, and begins them where decideStart says. why is empty for an
// assignment. Otherwise an operator ordered where they resume, they had to wait, they were refused, or
// the database lost commits. It does nothing for a partition that is not assigned, or while the session
// closes: the next holder would treat it as a crash. It returns where each is fetched.
func (s *session) acquire(ctx context.Context, why string, keys ...topicPartition) map[topicPartition]int64 {
	s.assigning.Lock()
	defer s.assigning.Unlock()
	assigned, workers := s.takeWorkers(keys)
	if len(assigned) == 0 {
		return nil
	}
	s.pauseFetching(assigned)
	if len(workers) > 0 {
		for _, p := range workers {
			p.log(slog.LevelInfo, "partition is acquired again", "why", why)
		}
		s.stop(context.WithoutCancel(ctx), workers, min(s.consumer.cfg.DrainMax, againDrainMax))
		_ = s.commitMarks(ctx)
	}
	limited, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)() //nolint:contextcheck // either may end first
	begins, moved := map[topicPartition]int64{}, false
	for _, h := range s.hold(limited, assigned) {
		during := uint64(0)
		if why != "" && h.waits == nil && h.decision.halt == nil {
			s.setOffset(h.topicPartition, h.decision.at)
			during, moved = s.polls.Load(), moved || h.decision.moved
		}
		begins[h.topicPartition] = s.start(ctx, h, during)
	}
	if moved {
		_ = s.commitMarks(ctx) // at once: another program's offset behind it would look like a rewind
	}
	return begins
}

// takeWorkers returns those of the partitions that are assigned, and their workers, which end.
func (s *session) takeWorkers(keys []topicPartition) (assigned []topicPartition, workers []*partition) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range keys {
		a := s.assignments[key]
		if a == nil || s.life.Err() != nil {
			continue
		}
		assigned = append(assigned, key)
		a.retryAt = time.Time{}
		if a.p != nil {
			workers = append(workers, a.p)
			a.p.backlog.end()
			a.p = nil
			a.does.become(StateDraining, nil)
		}
	}
	slices.SortFunc(assigned, topicPartition.compare)
	return assigned, workers
}

// hold decides where partitions begin and stores that under a new epoch.
func (s *session) hold(ctx context.Context, keys []topicPartition) []*hold {
	ctx, cancel := context.WithTimeout(ctx, acquisitionMax)
	defer cancel()
	holds := make([]*hold, len(keys))
	s.mu.Lock()
	for i, key := range keys {
		a := s.assignments[key]
		holds[i] = s.consumer.newHold(key)
		holds[i].halt = s.damage(a)
	}
	s.mu.Unlock()
	err := s.ask(ctx, holds)
	answered := slices.DeleteFunc(slices.Clone(holds), func(h *hold) bool { return h.waits != nil })
	if err == nil && len(answered) > 0 {
		err = s.consumer.hold(ctx, answered, s.ask)
	}
	for _, h := range answered {
		h.waits = cmp.Or(err, h.waits)
	}
	return holds
}

// start carries out the decision for a partition: its worker begins, or its fetching pauses. It
// returns the offset at which the client must fetch. during is the poll that may still return
// records that were fetched before.
func (s *session) start(ctx context.Context, h *hold, during uint64) int64 {
	logger, where := s.consumer.cfg.Logger, []any{"group", s.consumer.cfg.Group, "topic", h.topic, "partition", h.partition}
	switch {
	case h.waits != nil:
		s.wait(ctx, h)
		return 0
	case h.decision.halt != nil:
		problem := halted(h.decision.halt)
		s.halt(h, problem)
		logger.ErrorContext(ctx, "partition halts", append(where, "error", problem)...)
		return h.decision.at
	}
	logger.InfoContext(ctx, "partition assigned", append(where, "epoch", h.pos.epoch, "resume", h.decision.at, "why", h.decision.why,
		"position", h.pos.next.Load(), "committed", h.log.committed.String(), "committed_by", h.log.committed.origin(h.log).String(), "first", h.log.first, "end", h.log.end)...)
	s.startWorker(h, during) //nolint:contextcheck // the worker outlives the assignment
	return h.decision.at
}

// wait pauses a partition that could not be acquired, until the next attempt.
func (s *session) wait(ctx context.Context, h *hold) {
	s.pauseFetching([]topicPartition{h.topicPartition})
	s.mu.Lock()
	a := s.assignments[h.topicPartition]
	a.does.become(StateWaiting, h.waits)
	a.attempt++
	wait := s.consumer.engineBackoff(a.attempt)
	a.retryAt = time.Now().Add(wait)
	s.mu.Unlock()
	if times, due := a.said.Due("", true); due {
		s.consumer.cfg.Logger.WarnContext(ctx, "partition cannot be acquired yet; the others begin", "group", s.consumer.cfg.Group, "topic", h.topic, "partition", h.partition,
			"error", h.waits, "attempt", times, "retry_in", readable(wait))
	}
}

// halt pauses a partition until an operator decides.
func (s *session) halt(h *hold, problem error) {
	s.pauseFetching([]topicPartition{h.topicPartition})
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.assignments[h.topicPartition]
	a.does.become(StateHalted, problem)
	a.retryAt = time.Time{}
	a.saw(h)
}

func (s *session) startWorker(h *hold, during uint64) {
	p := s.consumer.newPartition(s.values, s.client, h.pos) // it may log
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.assignments[h.topicPartition]
	a.saw(h)
	a.retryAt, a.unreadable = time.Time{}, nil
	a.said.End("")
	p.during = during
	p.marked = func(next int64) { s.mark(p, next) }
	p.refused = func(f *failure) { s.refused(p, f) }
	p.backlog.start(h.decision.at)
	p.halt(h.row.paused)
	a.p = p
	a.does.become(StateRunning, nil)
	if h.decision.moved {
		// Kafka's offset may be behind and committed by another program, which would undo the move.
		a.mark = h.decision.at
	}
	s.client.ResumeFetchPartitions(map[string][]int32{h.topic: {h.partition}})
	go p.run()
}

// refused is called by a partition whose position was refused, or whose COMMIT is unknown where only
// the position can tell. It ends by itself, and is acquired again after a pause: two holders that
// take a partition from each other without one would both make no progress. Kafka's assignment
// decides which one keeps it, and needs seconds.
func (s *session) refused(p *partition, f *failure) {
	s.mu.Lock()
	a := s.assignments[p.key()]
	if a == nil || a.p != p || !a.retryAt.IsZero() {
		s.mu.Unlock()
		return
	}
	a.attempt++
	wait := s.consumer.engineBackoff(a.attempt)
	if isFenced(f) && !errors.Is(f.err, errServerChanged) {
		wait = max(wait, refusalMin)
	}
	a.retryAt = time.Now().Add(wait)
	s.mu.Unlock()
	p.log(slog.LevelWarn, "the partition is acquired again: its position is refused, or only it can say whether a COMMIT succeeded", "error", f.err, "retry_in", wait)
}

const refusalMin = time.Second

// hold begins a new epoch for each partition, decides where it begins and stores the decision, all
// in one transaction. It locks the rows before it decides, and asks Kafka again about a position beyond
// the end of the topic: its holder may have advanced after Kafka's answer, and cannot any more. A stop waits
// a moment for the answer: an acquisition that is stored, and not released, looks like a crash.
func (c *Consumer) hold(ctx context.Context, holds []*hold, ask func(context.Context, []*hold) error) error {
	ctx, cancel := pause.Outlast(context.WithoutCancel(ctx), ctx, commitGrace)
	defer cancel()
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	err := pgx.BeginTxFunc(ctx, c.pool, options, func(tx pgx.Tx) error {
		if err := c.lockPositions(ctx, tx, holds); err != nil {
			return err
		}
		ahead := slices.DeleteFunc(slices.Clone(holds), func(h *hold) bool { return h.log == nil || h.row.next == nil || *h.row.next <= h.log.end })
		if len(ahead) > 0 {
			if err := ask(ctx, ahead); err != nil {
				return err
			}
		}
		for _, h := range holds {
			if h.waits == nil {
				c.decide(h)
			}
		}
		return c.storeHolds(ctx, tx, holds)
	})
	if err != nil {
		return fmt.Errorf("acquire positions: %w", err)
	}
	return nil
}

func (c *Consumer) decide(h *hold) {
	row := &h.row
	if row.handledRule != nil {
		// Two texts may describe rules that give every message the same ID.
		if earlier, err := dedup.ParseIDRule(*row.handledRule); err == nil && earlier.SameIDs(c.ids[h.topic].IDRule()) {
			row.handledRule = &h.rule
		}
	}
	d := decideStart(h.known)
	pos := &position{topic: h.topic, partition: h.partition, epoch: row.epoch + 1, handled: d.handled, server: row.server}
	if h.log != nil {
		pos.topicID = h.log.topicID
	}
	pos.next.Store(-1)
	pos.set(d.next)
	empty := h.log != nil && d.at >= h.log.end // then no message ended the last holder
	if !row.released && !empty && (row.next == nil) == (row.heldOffset == nil) && (row.next == nil || *row.next == *row.heldOffset) {
		pos.stuck = row.stuck + 1
	}
	h.pos, h.decision = pos, d
}

// idRule is the text of the rule by which messages of a topic get their IDs. Messages that were
// handled under another rule have other claims.
func (c *Consumer) idRule(topic string) string { return c.ids[topic].IDRule().String() }

// lockPositions inserts missing rows, then locks and reads all of them.
func (c *Consumer) lockPositions(ctx context.Context, tx pgx.Tx, holds []*hold) error {
	topics, numbers, rows := make([]string, len(holds)), make([]int32, len(holds)), map[topicPartition]*storedPosition{}
	for i, h := range holds {
		topics[i], numbers[i], rows[h.topicPartition] = h.topic, h.partition, &h.row
	}
	group := c.cfg.Group
	batch := &pgx.Batch{}
	batch.Queue(c.sql[settingsSQL], c.timeout[0], c.timeout[1], c.timeout[2])
	batch.Queue(c.sql[rowsSQL], group, topics, numbers)
	batch.Queue(c.sql[lockSQL], group, topics, numbers).Query(func(found pgx.Rows) error {
		for found.Next() {
			var key topicPartition
			var row storedPosition
			var topicID *[16]byte
			err := found.Scan(&key.topic, &key.partition, &topicID, &row.next, &row.epoch, &row.handledFrom, &row.handledTo, &row.rewoundFrom,
				&row.handledBy, &row.handledRule, &row.resumeAt, &row.released, &row.heldOffset, &row.stuck, &row.server, &row.paused)
			if err != nil {
				return err
			}
			if topicID != nil {
				row.topicID = *topicID
			}
			*rows[key] = row
		}
		return found.Err()
	})
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("read positions: %w", err)
	}
	return nil
}

// storeHolds stores the decisions.
func (c *Consumer) storeHolds(ctx context.Context, tx pgx.Tx, holds []*hold) error {
	list := []map[string]any{}
	for _, h := range holds {
		if h.waits != nil {
			continue
		}
		row, d := h.row, h.decision
		one := map[string]any{
			"topic": h.topic, "partition": h.partition, "epoch": row.epoch, "next": d.next, "stuck": h.pos.stuck, "moved": d.moved || h.recreated(), "ordered": d.ordered,
			"handled_from": d.handled.from, "handled_to": d.handled.to, "rewound_from": d.handled.rewound, "handled_by": h.consumer, "handled_rule": h.rule,
		}
		if h.log != nil && h.log.topicID != uuid.Nil {
			one["topic_id"] = h.log.topicID.String()
		}
		if d.halt != nil {
			one["halt"] = bounds.ErrorText(halted(d.halt))
			one["handled_from"], one["handled_to"], one["rewound_from"] = row.handledFrom, row.handledTo, row.rewoundFrom
			one["handled_by"], one["handled_rule"] = row.handledBy, row.handledRule
		}
		list = append(list, one)
	}
	if _, err := tx.Exec(ctx, c.sql[holdSQL], c.cfg.Group, c.owner, list); err != nil {
		return fmt.Errorf("store where partitions begin: %w", err)
	}
	return nil
}

func halted(problem error) error { return fmt.Errorf("the partition halts: %w", problem) }
