package consumer

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// hold is a partition to be taken over.
type hold struct {
	topic     string
	partition int32
	topicID   uuid.UUID // zero: the broker does not know it
	committed int64     // Kafka's offset; negative: none
	start     *int64    // where to begin if neither knows; nil: at the start
	first     int64     // the earliest record that the topic has
	end       int64     // behind its last record
}

func (h hold) compare(other hold) int {
	return cmp.Or(strings.Compare(h.topic, other.topic), cmp.Compare(h.partition, other.partition))
}

// hold begins a new epoch for each partition and returns the positions in the same order. A position
// of an earlier topic of the same name is forgotten, and so is Kafka's offset, which is the earlier topic's too.
func (e *Consumer) hold(ctx context.Context, holds []hold) ([]*position, error) {
	topics, numbers := make([]string, len(holds)), make([]int32, len(holds))
	ids, starts := make([]*[16]byte, len(holds)), make([]*int64, len(holds))
	for i, h := range holds {
		topics[i], numbers[i], starts[i] = h.topic, h.partition, h.start
		if h.topicID != uuid.Nil {
			id := [16]byte(h.topicID)
			ids[i] = &id
		}
	}
	known, err := e.recreated(ctx, topics, ids, numbers)
	if err != nil {
		return nil, err
	}
	rows, err := e.engine.pool.Query(ctx, e.engine.sql.hold, e.engine.cfg.Group, e.owner, topics, ids, numbers, starts)
	if err != nil {
		return nil, fmt.Errorf("take positions over: %w", err)
	}
	taken, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*position, error) {
		pos := &position{handledFrom: math.MaxInt64}
		return pos, row.Scan(&pos.topic, &pos.partition, &pos.epoch, &pos.stored, &pos.stuck, &pos.server)
	})
	if err != nil {
		return nil, fmt.Errorf("take positions over: %w", err)
	}
	byKey := map[topicPartition]*position{}
	for _, pos := range taken {
		byKey[topicPartition{pos.topic, pos.partition}] = pos
	}
	held := make([]*position, len(holds))
	for i := range holds {
		key := topicPartition{holds[i].topic, holds[i].partition}
		held[i] = byKey[key]
		if known[key] {
			holds[i].committed = -1
		}
	}
	return held, nil
}

// giveUp notes that positions are given up in good order.
func (e *Consumer) giveUp(ctx context.Context, positions []*position) error {
	if len(positions) == 0 {
		return nil
	}
	topics, numbers, epochs := make([]string, len(positions)), make([]int32, len(positions)), make([]int64, len(positions))
	for i, pos := range positions {
		topics[i], numbers[i], epochs[i] = pos.topic, pos.partition, pos.epoch
	}
	ctx, cancel := context.WithTimeout(ctx, markMax)
	defer cancel()
	if _, err := e.engine.pool.Exec(ctx, e.engine.sql.givenUp, e.engine.cfg.Group, topics, numbers, epochs); err != nil {
		return fmt.Errorf("give positions up: %w", err)
	}
	return nil
}

// recreated tells which partitions have a position of an earlier topic of the same name.
func (e *Consumer) recreated(ctx context.Context, topics []string, ids []*[16]byte, numbers []int32) (map[topicPartition]bool, error) {
	rows, err := e.engine.pool.Query(ctx, e.engine.sql.recreated, e.engine.cfg.Group, topics, ids, numbers)
	if err != nil {
		return nil, fmt.Errorf("read positions: %w", err)
	}
	found := map[topicPartition]bool{}
	var key topicPartition
	_, err = pgx.ForEachRow(rows, []any{&key.topic, &key.partition}, func() error {
		found[key] = true
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read positions: %w", err)
	}
	return found, nil
}
