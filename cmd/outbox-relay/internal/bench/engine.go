package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// errAllDone stops a consumer that handled everything.
var errAllDone = errors.New("every message is handled")

// engine runs package consumer over a topic and returns its rate. It uses only defaults; the
// effects of a batch go in one round trip.
func (b *consumeBench) engine(ctx context.Context, l load, group string, level consumer.Dedup) (float64, error) {
	pool, err := b.newPool(ctx, consumePartitions+2)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	effect := b.sql(effectSQL)
	handler := consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue(effect, string(msg.Key), msg.Value)
		return nil
	})
	run, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	m := &meter{want: l.messages}
	c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers(b.Brokers...)}, handler, consumer.Config{
		Group: group, Topics: []string{l.topic}, Schema: b.Schema, Dedup: level, Logger: slog.New(slog.DiscardHandler), // errors end the run
		Hooks: consumer.Hooks{
			Processed: func(p consumer.Processed) {
				if m.add(p.Fresh + p.Duplicates + p.Parked) {
					stop(errAllDone)
				}
			},
			Failed: func(f consumer.Failed) { stop(fmt.Errorf("%s: %w", f.Message, f.Err)) },
		},
	})
	if err != nil {
		return 0, err
	}
	if err := c.Run(run); err != nil {
		return 0, err
	}
	if cause := context.Cause(run); !errors.Is(cause, errAllDone) {
		return 0, cause
	}
	return m.rate()
}
