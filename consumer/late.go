package consumer

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// retryLate takes over partitions that had to wait, and halted ones that got an operator's order.
func (s *session) retryLate(ctx context.Context) {
	for ctx.Err() == nil {
		due, halted, next := s.lateOnes()
		for _, key := range due {
			s.retake(ctx, key, "it had to wait")
		}
		if len(due) > 0 {
			continue
		}
		if len(halted) > 0 {
			next = min(next, pollEvery)
			ordered, err := s.ordered(ctx, halted)
			if err != nil && ctx.Err() == nil {
				s.engine.cfg.Logger.DebugContext(ctx, "could not read orders for halted partitions; will retry", "group", s.engine.cfg.Group, "error", err)
			}
			for _, key := range ordered {
				s.retake(ctx, key, "an operator ordered where it resumes")
			}
		}
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
		case <-s.late:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// ordered lists the partitions that have an operator's order.
func (s *session) ordered(ctx context.Context, keys []topicPartition) ([]topicPartition, error) {
	topics, numbers := make([]string, len(keys)), make([]int32, len(keys))
	for i, key := range keys {
		topics[i], numbers[i] = key.topic, key.partition
	}
	e := s.engine
	ctx, cancel := e.bounded(ctx)
	defer cancel()
	rows, err := e.pool.Query(ctx, e.sql.orders, e.cfg.Group, topics, numbers)
	if err != nil {
		return nil, fmt.Errorf("read orders: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (key topicPartition, err error) {
		return key, row.Scan(&key.topic, &key.partition)
	})
	if err != nil {
		return nil, fmt.Errorf("read orders: %w", err)
	}
	return found, nil
}

// lateOnes lists the due and the halted partitions, and returns the time until the next one is due.
func (s *session) lateOnes() (due, halted []topicPartition, next time.Duration) {
	next = time.Minute
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, a := range s.assignments {
		if a.state == StateHalted {
			halted = append(halted, key)
		}
		switch left := time.Until(a.retryAt); {
		case a.retryAt.IsZero():
		case left <= 0:
			due = append(due, key)
		default:
			next = min(next, left)
		}
	}
	return due, halted, next
}
