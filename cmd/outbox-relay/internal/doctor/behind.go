package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// LagAgeMaxDefault is how old a position may be. For most consumers a message later than this is
// late; a consumer at the end of its partition stores that once a minute.
const LagAgeMaxDefault = 5 * time.Minute

// Behind is how late a consumer is. A position is as old as the last record before it, or as the
// last time when it was seen at the end of its partition. So the position of a consumer that no
// longer runs also gets older.
type Behind struct {
	Partitions int64 `json:"partitions"` // partitions that are older than the limit
	Unheld     int64 `json:"unheld"`     // how many of them no process holds
	// The oldest of them, and its holder. Owner is empty if no process holds it.
	Topic      string  `json:"topic"`
	Partition  int32   `json:"partition"`
	Owner      string  `json:"owner"`
	AgeSeconds float64 `json:"age_seconds"`
	// OpenTransaction describes a transaction that holds its records back; empty: there is none, or
	// Kafka was not asked.
	OpenTransaction string `json:"open_transaction"`
}

// text is what is wrong; remedy is what to do.
func (b *Behind) text() string {
	text := fmt.Sprintf("%s behind, the oldest, %s/%d, for %s", human.Count(b.Partitions, "partition"), oneLine(b.Topic), b.Partition, human.Seconds(b.AgeSeconds))
	switch {
	case b.Unheld == b.Partitions:
		return text + ", and no process holds " + them(b.Partitions)
	case b.Unheld > 0:
		return text + fmt.Sprintf("; %d of them not held by any process", b.Unheld)
	}
	return text + ", held by " + oneLine(b.Owner)
}

func them(n int64) string {
	if n == 1 {
		return "it"
	}
	return "them"
}

func (b *Behind) remedy(group string) string {
	if b.Unheld > 0 {
		return fmt.Sprintf("start a consumer of group %s, or find out why it does not get its partitions: \"outbox-relay positions --group %s\"", oneLine(group), human.Word(group))
	}
	if b.OpenTransaction != "" {
		return b.OpenTransaction
	}
	return fmt.Sprintf("the consumer is slow, hangs or died, or a transaction of another program is open on the topic (--brokers): see its log, and the members and the lag of the group in \"outbox-relay positions --group %s\"", human.Word(group))
}

// readBehind adds the consumers that are later than the limit; 0: no limit.
func (s *Status) readBehind(ctx context.Context, db operator.Querier, schema string, limit time.Duration, open func(ctx context.Context, topic string, partition int32) error) error {
	if limit == 0 {
		return nil
	}
	var name string
	var b Behind
	into := []any{&name, &b.Topic, &b.Partition, &b.Owner, &b.AgeSeconds, &b.Partitions, &b.Unheld}
	return operator.Each(ctx, db, "read how late consumers are", schema, behindSQL, []any{limit.Seconds()}, into, func() error {
		for i := range s.Consuming {
			if s.Consuming[i].Name == name {
				found := b
				if open != nil && b.Unheld == 0 {
					if err := open(ctx, b.Topic, b.Partition); err != nil {
						found.OpenTransaction = err.Error()
					}
				}
				s.Consuming[i].Behind = &found
			}
		}
		return nil
	})
}
