package consumer

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
)

// Engine drives batches without Kafka.
type Engine struct {
	c  *Consumer
	id dedup.Consumer
}

// NewEngine makes and registers a consumer.
func NewEngine(t *testing.T, pool *pgxpool.Pool, handler Handler, cfg Config) *Engine {
	t.Helper()
	c, err := New(pool, nil, handler, cfg)
	require.NoError(t, err)
	require.NoError(t, c.prepare(t.Context()))
	return &Engine{c, c.ids[cfg.Topics[0]]}
}

// Hold takes a partition over.
func (e *Engine) Hold(ctx context.Context, number int32) (*Position, error) {
	taken, err := e.c.hold(ctx, []hold{{topicPartition: topicPartition{e.c.engine.cfg.Topics[0], number}}}, nil)
	if err != nil {
		return nil, err
	}
	return &Position{taken[0].pos, newClaimForm()}, nil
}

// Position is a held partition.
type Position struct {
	p    *position
	form *claimForm
}

// Apply runs one batch: n messages whose IDs are made of numbers from first on.
func (e *Engine) Apply(ctx context.Context, at *Position, first, n int) (int, error) {
	msgs := make([]*Message, n)
	for i := range msgs {
		number := first + i
		msgs[i] = &Message{
			ID: dedup.MessageID("test", []byte{byte(number >> 16), byte(number >> 8), byte(number)}), Topic: at.p.topic,
			Partition: at.p.partition, Offset: int64(number), Time: time.Now(), Value: []byte("x"),
		}
	}
	out, f := e.c.engine.apply(ctx, &work{consumer: e.id, pos: at.p, msgs: msgs, held: newHeldKeys(), form: at.form})
	if f != nil {
		return 0, f
	}
	return out.fresh, nil
}

// ApplyAll runs batches until all are done, as a partition does.
func (e *Engine) ApplyAll(ctx context.Context, number int32, first, n, batch int) error {
	at, err := e.Hold(ctx, number)
	if err != nil {
		return err
	}
	for done := 0; done < n; {
		if _, err := e.Apply(ctx, at, first+done, min(batch, n-done)); err != nil {
			var f *failure
			if errors.As(err, &f) && e.c.engine.verdict(f) == verdictRepeat {
				continue
			}
			return err
		}
		done += batch
	}
	return nil
}

// IsFenced reports whether a batch was refused because of its position.
func IsFenced(err error) bool {
	var f *failure
	return errors.As(err, &f) && isFenced(nil, f)
}

// LookEvery makes a consumer compare its partitions with their topics more often.
func LookEvery(c *Consumer, d time.Duration) { c.lookEvery = d }

// CountEvery makes a consumer count its parked messages more often.
func CountEvery(c *Consumer, d time.Duration) { c.countEvery = d }

// CountParkedSQL counts the parked messages of partitions, up to ParkedCountMax each.
const (
	CountParkedSQL = countParkedSQL
	ParkedCountMax = parkedCountMax
)

// Retake makes the running consumer decide anew where a partition begins.
func Retake(ctx context.Context, c *Consumer, topic string, partition int32) {
	if s := c.session.Load(); s != nil {
		s.retake(ctx, topicPartition{topic, partition}, "the test asks for it")
	}
}

// State says what an assigned partition does; empty: it is not assigned.
func State(c *Consumer, topic string, partition int32) string {
	s := c.session.Load()
	if s == nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.assignments[topicPartition{topic, partition}]
	if a == nil {
		return ""
	}
	return a.state.String()
}

// Meet makes first contact with a topic whose partitions end at ends, and takes all of them over. It returns
// where they begin.
func (e *Engine) Meet(ctx context.Context, topic string, ends ...int64) ([]int64, error) {
	answer := topicLogs{logs: map[topicPartition]*topicLog{}, counts: map[string]int32{topic: int32(len(ends))}}
	var holds []hold
	for i, end := range ends {
		key := topicPartition{topic, int32(i)}
		log := &topicLog{cluster: "c", topicID: [16]byte{1}, end: end}
		answer.logs[key] = log
		holds = append(holds, hold{topicPartition: key, log: log})
	}
	taken, err := e.c.hold(ctx, holds, answer.contacts(e.c.engine.cfg.Start))
	if err != nil {
		return nil, err
	}
	begins := make([]int64, len(taken))
	for i, t := range taken {
		begins[i] = t.decision.at
	}
	return begins, nil
}

// CommitMetadata is what a consumer's own commits carry.
func CommitMetadata(cluster string, topicID [16]byte, offset int64) string {
	return commitMetadata(cluster, topicID, offset, -1)
}
