package consumer

import (
	"context"
	"time"

	"github.com/effectonce/effectonce/dedup"
)

// Asks is how many batches ask before one is taken as fresh again.
func (p *Position) Asks() int { return int(p.asks.Load()) }

// Trust makes the next batch be taken as fresh.
func (p *Position) Trust() { p.asks.Store(0) }

// Outcome is what a batch came to.
type Outcome struct{ Fresh, Duplicates, Parked int }

// ApplyNumbers runs one batch at an offset: a message for each number, which is all that its ID and
// value depend on.
func (e *Engine) ApplyNumbers(ctx context.Context, at *Position, offset int64, apart bool, numbers ...int) (Outcome, error) {
	msgs := make([]*Message, len(numbers))
	for i, n := range numbers {
		text := []byte{byte(n >> 8), byte(n)}
		msgs[i] = &Message{
			ID: dedup.PublishID("test", dedup.MessageID("test", text), "", time.Now()), Topic: at.p.topic, Partition: at.p.partition,
			Offset: offset + int64(i), Time: time.Now(), Value: text,
		}
		if n%2 == 0 {
			msgs[i].ID = dedup.MessageID("test", text)
		}
	}
	out, err := e.apply(ctx, &work{consumer: e.id, pos: at.p, msgs: msgs, held: newHeldKeys(), asks: at.asks, apart: apart})
	if err != nil {
		return Outcome{}, err
	}
	return Outcome{out.fresh, out.duplicates, len(out.parked)}, nil
}

// MoveServer makes a position one that was taken over on another server.
func (p *Position) MoveServer() { p.p.server = time.Unix(0, 0) }
