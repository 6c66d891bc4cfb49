package consumertest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// ignoredIDs: the ID of a published message contains the time of the retry, so that the next
// consumer can prove it fresh.
//
//nolint:gochecknoglobals // a constant
var ignoredIDs = []string{"outbox.id"}

func (s *schedule) ignore(o Options) []string { return append(slices.Clone(o.Ignore), s.ignored...) }

// parks reports whether the consumer parks messages that fail.
func (o Options) parks() bool {
	var cfg consumer.Config
	if o.Consumer != nil {
		o.Consumer(&cfg)
	}
	return cfg.OnFailure == consumer.OnFailurePark
}

var errParked = errors.New("parked by consumertest.Verify after the handler ran")

// parkedOnce fails each message that comes from Kafka after its handler ran: its calls to other
// systems were made, and its effects are rolled back. A message that an operator retries succeeds.
type parkedOnce struct{}

func (parkedOnce) middleware() consumer.Middleware {
	return consumer.Around(func(ctx context.Context, _ pgx.Tx, msgs []*consumer.Message, next func(ctx context.Context) error) error {
		if err := next(ctx); err != nil {
			return err
		}
		for _, msg := range msgs {
			if msg.Record() != nil {
				return consumer.Blame(msg, consumer.Permanent(errParked))
			}
		}
		return nil
	})
}

// retriesMax bounds the rounds: each retries the first message of each key, with all messages
// behind it.
const retriesMax = 10

// retry retries parked messages, as an operator does hours later (then the IDs of what they publish
// have the time of the release), until none is parked.
func retry(ctx context.Context, pool *pgxpool.Pool, c *consumer.Consumer, records []*kgo.Record) error {
	for range retriesMax {
		if _, err := pool.Exec(ctx, `UPDATE effectonce.parked_messages SET state = 'retry', released_at = clock_timestamp() WHERE state = 'parked'`); err != nil {
			return fmt.Errorf("retry parked messages: %w", err)
		}
		if _, err := c.Deliver(ctx, records...); err != nil {
			return err
		}
		var left int
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM effectonce.parked_messages`).Scan(&left); err != nil {
			return fmt.Errorf("count parked messages: %w", err)
		}
		if left == 0 {
			return nil
		}
	}
	return errors.New("messages stay parked although they are retried")
}
