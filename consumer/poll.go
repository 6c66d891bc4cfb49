package consumer

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
)

// pollEvery is how often a session queries the database about its partitions, with one statement
// for all of them.
const pollEvery = time.Second

// poll checks the partitions of the session until ctx ends: for due parked messages, operators'
// orders and pauses, and positions that moved back. A partition that handles messages would also
// see the last in its own transactions.
func (s *session) poll(ctx context.Context) {
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	said := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		err := s.pollOnce(ctx)
		if err != nil && ctx.Err() == nil && !said {
			s.engine.cfg.Logger.WarnContext(ctx, "could not poll for orders, pauses and due messages; will retry every second", "group", s.engine.cfg.Group, "error", err)
		}
		said = err != nil
	}
}

// found is the database's answer about one partition.
type found struct {
	place  int
	epoch  *int64
	other  *bool // another holder has it
	back   *bool // the database lost commits of this holder
	order  bool  // an operator wants it to resume elsewhere
	paused bool
	due    bool
}

func (s *session) pollOnce(ctx context.Context) error {
	e := s.engine
	list := s.working()
	if len(list) == 0 {
		return nil
	}
	n := len(list)
	topics, numbers, consumers, epochs, known := make([]string, n), make([]int32, n), make([]int32, n), make([]int64, n), make([]*int64, n)
	for i, p := range list {
		pos := p.current.Load()
		topics[i], numbers[i], epochs[i], known[i] = pos.topic, pos.partition, pos.epoch, pos.stored
		consumers[i] = s.consumer.ids[pos.topic].ID()
	}
	limited, cancel := e.bounded(ctx)
	defer cancel()
	rows, err := e.pool.Query(limited, e.sql.poll, e.cfg.Group, topics, numbers, consumers, epochs, known)
	if err != nil {
		return fmt.Errorf("poll partitions: %w", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f found, err error) {
		err = row.Scan(&f.place, &f.epoch, &f.other, &f.back, &f.order, &f.paused, &f.due)
		return f, err
	})
	if err != nil {
		return fmt.Errorf("poll partitions: %w", err)
	}
	paused := make([]bool, n)
	for _, f := range all {
		paused[f.place] = f.paused
		s.act(ctx, list[f.place], f)
	}
	for i, p := range list {
		if p.queue.halt(paused[i]) {
			text := "an operator paused the topic for the group: the partition waits"
			if !paused[i] {
				text = "an operator resumed the topic for the group"
			}
			p.lane.log(slog.LevelInfo, text)
		}
		s.notePause(p, paused[i])
	}
	return nil
}

// act acts on what was found about a partition.
func (s *session) act(ctx context.Context, p *partition, f found) {
	switch key := (topicPartition{p.pos.topic, p.pos.partition}); {
	case f.epoch == nil, f.back != nil && *f.back:
		s.restart(fmt.Errorf("%s/%d: %w", key.topic, key.partition, errWentBack))
	case f.order:
		s.retake(ctx, key, "an operator ordered where it resumes")
	case f.due && !f.paused:
		p.requestRelease()
	}
}

// working lists the running partitions.
func (s *session) working() []*partition {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*partition, 0, len(s.partitions))
	for _, p := range s.partitions {
		list = append(list, p)
	}
	return list
}
