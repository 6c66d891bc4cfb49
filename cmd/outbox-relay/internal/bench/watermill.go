package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// watermill runs the textbook's transaction as a handler of Watermill's router: each message is
// acknowledged before the next one of its partition is delivered. The subscriber uses franz-go, so
// that all variants use the same client.
func (b *consumeBench) watermill(ctx context.Context, l load, group string) (float64, error) {
	pool, err := b.newPool(ctx, b.opts.Partitions+2)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return 0, fmt.Errorf("watermill: %w", err)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	m := &meter{want: l.messages}
	claim, effect := b.sql(textbookClaimSQL), b.sql(effectSQL)
	router.AddConsumerHandler("bench", l.topic, &watermillSubscriber{b: b, l: l, group: group, stop: stop}, func(msg *message.Message) error { //nolint:contextcheck // the message has it
		err := pgx.BeginFunc(msg.Context(), pool, func(tx pgx.Tx) error {
			claimed, err := tx.Exec(msg.Context(), claim, msg.UUID, group)
			if err != nil || claimed.RowsAffected() == 0 {
				return err
			}
			_, err = tx.Exec(msg.Context(), effect, msg.Metadata["key"], []byte(msg.Payload))
			return err
		})
		switch {
		case err != nil:
			stop(err)
		case m.add(1):
			stop(errAllDone)
		}
		return err
	})
	if err := router.Run(ctx); err != nil {
		return 0, fmt.Errorf("watermill: %w", err)
	}
	if cause := context.Cause(ctx); !errors.Is(cause, errAllDone) {
		return 0, cause
	}
	return m.rate()
}

// watermillSubscriber delivers the records of each partition in order.
type watermillSubscriber struct {
	b     *consumeBench
	l     load
	group string
	stop  context.CancelCauseFunc
}

// Subscribe implements message.Subscriber.
func (s *watermillSubscriber) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		err := s.b.perPartition(ctx, s.l, s.group, func(ctx context.Context, client *kgo.Client, queue <-chan []*kgo.Record) error {
			for {
				select {
				case <-ctx.Done():
					return nil
				case records := <-queue:
					for _, record := range records {
						if !deliverWatermill(ctx, out, record) {
							return nil
						}
						client.MarkCommitRecords(record)
					}
				}
			}
		})
		if err != nil {
			s.stop(err)
		}
	}()
	return out, nil
}

// deliverWatermill returns whether the message was acknowledged.
func deliverWatermill(ctx context.Context, out chan<- *message.Message, record *kgo.Record) bool {
	var id string
	for _, header := range record.Headers {
		if header.Key == outbox.HeaderMessageID {
			id = string(header.Value)
		}
	}
	msg := message.NewMessage(id, record.Value)
	msg.Metadata.Set("key", string(record.Key))
	msg.SetContext(ctx)
	select {
	case out <- msg:
	case <-ctx.Done():
		return false
	}
	select {
	case <-msg.Acked():
		return true
	case <-msg.Nacked():
	case <-ctx.Done():
	}
	return false
}

// Close implements message.Subscriber.
func (s *watermillSubscriber) Close() error { return nil }
