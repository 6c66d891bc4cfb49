package consumer

import (
	"context"
	"errors"
	"slices"
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
	h := e.c.newHold(topicPartition{e.c.cfg.Topics[0], number})
	if err := e.c.hold(ctx, []*hold{h}, nil); err != nil {
		return nil, err
	}
	return &Position{h.pos, 1}, nil
}

// HoldAt takes a partition over where Kafka first said that it ends at one offset, and then at another one.
func (e *Engine) HoldAt(ctx context.Context, number int32, end, then int64) (at int64, halt, err error) {
	h := e.c.newHold(topicPartition{e.c.cfg.Topics[0], number})
	h.log = &topicLog{end: end}
	err = e.c.hold(ctx, []*hold{h}, func(_ context.Context, again []*hold) error {
		again[0].log = &topicLog{end: then}
		return nil
	})
	return h.decision.at, h.decision.halt, errors.Join(err, h.waits)
}

// Position is a held partition.
type Position struct {
	p    *position
	asks int
}

// messages makes n messages whose IDs are made of numbers from first on.
func (e *Engine) messages(at *Position, first, n int) []*Message {
	msgs := make([]*Message, n)
	for i := range msgs {
		number := first + i
		msgs[i] = &Message{
			ID: dedup.MessageID("test", []byte{byte(number >> 16), byte(number >> 8), byte(number)}), Topic: at.p.topic, named: true,
			Partition: at.p.partition, Offset: int64(number), Time: time.Now(), Value: []byte("x"),
		}
	}
	return msgs
}

// Apply runs one batch of messages.
func (e *Engine) Apply(ctx context.Context, at *Position, first, n int) (int, error) {
	out, err := e.apply(ctx, at, e.messages(at, first, n), false)
	return out.fresh, err
}

// apply waits for a transaction, as a lane does.
func (e *Engine) apply(ctx context.Context, at *Position, msgs []*Message, apart bool) (outcome, error) {
	w := &work{consumer: e.id, pos: at.p, msgs: msgs, held: newHeldKeys(), asks: at.asks > 0, apart: apart}
	out, f := e.c.apply(ctx, w)
	if at.asks = asksAfter(at.asks, out, f); f != nil {
		return outcome{}, f
	}
	w.pos.set(w.stored)
	return out, nil
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
			if errors.As(err, &f) && f.verdict() == verdictRepeat {
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
	return errors.As(err, &f) && isFenced(f)
}

// WatchEvery makes a consumer look after its partitions more often.
func WatchEvery(c *Consumer, d time.Duration) { c.watchEvery = d }

// LookEvery makes a consumer compare its partitions with their topics more often.
func LookEvery(c *Consumer, d time.Duration) { c.lookEvery = d }

// ReleaseBytesMax is releaseBytesMax.
const ReleaseBytesMax = releaseBytesMax

// Retake makes the running consumer decide again where a partition begins.
func Retake(ctx context.Context, c *Consumer, topic string, partition int32) {
	if s := c.session.Load(); s != nil {
		s.acquire(ctx, "the test asks for it", topicPartition{topic, partition})
	}
}

// Rejoin makes the running consumer leave the group and join it again.
func Rejoin(c *Consumer, why error) { c.session.Load().restart(why) }

// State is the state of an assigned partition; empty: it is not assigned.
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
	return string(a.status().State)
}

// CommitMetadata is what a consumer's own commits carry.
func CommitMetadata(cluster string, topicID [16]byte, offset int64) string {
	return commitMetadata(cluster, topicID, offset)
}

// IdleEvery makes partitions without messages store sooner that they are behind control records.
func IdleEvery(c *Consumer, d time.Duration) { c.idleEvery = d }

// Statements whose plans are tested.
const (
	PollSQL       = pollSQL
	HeadsSQL      = headsSQL
	HeldNowSQL    = heldNowSQL
	TouchHeadsSQL = touchHeadsSQL
	DueSQL        = dueSQL
	ReleaseSQL    = releaseSQL
)

// HandledFrom is the offset from which the partition was handled.
func (at *Position) HandledFrom(offset int64) { at.p.handled.from = offset }

// ApplyApart is Apply as a worker does it: the position is advanced separately.
func (e *Engine) ApplyApart(ctx context.Context, at *Position, first, n int) (int, error) {
	out, err := e.apply(ctx, at, e.messages(at, first, n), true)
	return out.fresh, err
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func (v verdict) String() string {
	return [...]string{"repeat", "wait", "fenced", "divide", "count", "park"}[v]
}

// Rules lists the rows of the table.
func Rules() (names []string) {
	for _, r := range rules {
		names = append(names, r.name)
	}
	return names
}

// Origins lists where a failure may arise.
func Origins() []string {
	return []string{originEngine.String(), originStatement.String(), originHandler.String(), originCommit.String()}
}

// Judge returns the verdict about a failure, and the name of the row that decides.
func Judge(from string, err error, lost bool) (verdict, row string) {
	f := &failure{lost: lost, err: err, origin: origin(slices.Index(Origins(), from))}
	for _, r := range rules {
		if slices.Contains(r.origins, f.origin) && r.matches(f) {
			return f.verdict().String(), r.name
		}
	}
	return f.verdict().String(), ""
}

// OfAnotherServer makes a position one that was taken over before the server began.
func OfAnotherServer(at *Position) { at.p.server = at.p.server.Add(-time.Hour) }

// Asks is how many batches ask before one is taken as fresh again.
func (at *Position) Asks() int { return at.asks }

// Outcome is what a batch came to.
type Outcome struct{ Fresh, Duplicates, Parked int }

// ApplyNumbers runs one batch at an offset: a message for each number, which is all that its ID and
// value depend on.
func (e *Engine) ApplyNumbers(ctx context.Context, at *Position, offset int64, apart bool, numbers ...int) (Outcome, error) {
	msgs := make([]*Message, len(numbers))
	for i, n := range numbers {
		text := []byte{byte(n >> 8), byte(n)}
		msgs[i] = &Message{
			ID: dedup.PublishID("test", dedup.MessageID("test", text), "", time.Now()), Topic: at.p.topic, named: true, Partition: at.p.partition,
			Offset: offset + int64(i), Time: time.Now(), Value: text,
		}
		if n%2 == 0 {
			msgs[i].ID = dedup.MessageID("test", text)
		}
	}
	out, err := e.apply(ctx, at, msgs, apart)
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{out.fresh, out.duplicates, len(out.parked)}, nil
}
