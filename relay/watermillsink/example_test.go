package watermillsink_test

import (
	"context"
	"errors"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/effectonce/effectonce/relay"
	"github.com/effectonce/effectonce/relay/watermillsink"
)

// A relay to NATS JetStream. Each row is stored once within the stream's duplicate window. A row
// that is too large moves to outbox_dead instead of holding up its shard.
func Example() {
	run := func(ctx context.Context, pool *pgxpool.Pool, url string) error {
		publisher, err := wmnats.NewPublisher(wmnats.PublisherConfig{
			URL:         url,
			NatsOptions: []nats.Option{nats.MaxReconnects(-1)},
			JetStream:   wmnats.JetStreamConfig{TrackMsgId: true},
		}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		defer func() { _ = publisher.Close() }()
		sink, err := watermillsink.New(publisher, watermillsink.Config{
			Batch: 100,
			Final: func(err error) bool { return errors.Is(err, nats.ErrMaxPayload) },
		})
		if err != nil {
			return err
		}
		r, err := relay.New(pool, nil, relay.Config{Sink: sink})
		if err != nil {
			return err
		}
		return r.Run(ctx)
	}
	_ = run
}
