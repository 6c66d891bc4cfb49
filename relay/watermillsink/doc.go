// Package watermillsink takes outbox rows to any broker that Watermill has a publisher for
// (https://watermill.io/pubsubs/): RabbitMQ, NATS, Google Pub/Sub, SNS and SQS, Redis, SQL.
//
//	package main
//
//	import (
//		"context"
//		"log"
//		"os"
//		"os/signal"
//
//		"github.com/ThreeDotsLabs/watermill"
//		"github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
//		"github.com/jackc/pgx/v5/pgxpool"
//
//		"github.com/effectonce/effectonce/relay"
//		"github.com/effectonce/effectonce/relay/watermillsink"
//	)
//
//	func main() {
//		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
//		defer stop()
//		if err := run(ctx, os.Getenv("DATABASE_URL"), os.Getenv("NATS_URL")); err != nil {
//			log.Fatal(err)
//		}
//	}
//
//	func run(ctx context.Context, databaseURL, natsURL string) error {
//		pool, err := pgxpool.New(ctx, databaseURL)
//		if err != nil {
//			return err
//		}
//		defer pool.Close()
//		publisher, err := nats.NewPublisher(nats.PublisherConfig{
//			URL:       natsURL,
//			JetStream: nats.JetStreamConfig{TrackMsgId: true}, // the stream drops second copies
//		}, watermill.NopLogger{})
//		if err != nil {
//			return err
//		}
//		defer publisher.Close()
//		sink, err := watermillsink.New(publisher, watermillsink.Config{Batch: 100})
//		if err != nil {
//			return err
//		}
//		r, err := relay.New(pool, nil, relay.Config{Sink: sink})
//		if err != nil {
//			return err
//		}
//		return r.Run(ctx)
//	}
//
// # What a message is
//
// Its UUID is the row's ID, its payload the row's payload, its topic the row's topic. Metadata has the row's headers, with
// message-id (the ID once more) and occurred-at; the key under Config.KeyName, if the row has one; and
// MetadataTombstone where there is no payload. Nothing is lost silently on the way here: a header that is there several
// times is joined or its row refused (Config.HeaderSeparator), one that is null is empty and listed in MetadataNullHeaders,
// and a header with the name of one of these is refused. Bytes that are no UTF-8 stay as they are in Go's strings.
//
// From there on it is the publisher's marshaler that decides. Those that write JSON replace bytes that are no UTF-8; NATS
// leaves out headers whose names are no tokens of HTTP, makes spaces of line breaks in values and trims them; SQS has ten
// attributes for each message. Give binary keys and headers a form in text before they are published.
//
// # Which guarantee survives
//
// Each committed row reaches the broker at least once, under an unchanged ID, if the publisher returns only when the
// broker has the message durably. A publisher that returns earlier makes it at most once for what it had in memory.
//
// The rows of a key are in the order of their commit, among first occurrences, if besides the publisher sends the messages of
// a call one after the other and stops at the first that fails, and the broker keeps the order of what it takes: for a
// key, a queue or a subject.
//
// Exactly-once publishing is Kafka's alone (relay.Config.ExactlyOnce). Elsewhere consumers deduplicate: by the
// message's UUID, which the metadata message-id repeats for package consumer.
//
// # Publishers
//
//   - Apache Kafka (watermill-kafka): better without this package. At least once with RequiredAcks = WaitForAll (Sarama's
//     default is the leader alone); order per key only with kafka.NewWithPartitioningMarshaler over the
//     metadata "partition_key", Producer.Idempotent and Net.MaxOpenRequests = 1.
//   - RabbitMQ (watermill-amqp): at least once only with Publish.ConfirmDelivery, durable queues and persistent messages;
//     order per queue. The queues must be bound before: an exchange confirms what it routes nowhere. Not with
//     Publish.Transactional: a call that was rolled back returns the result of the commit behind it, and counts as done.
//   - NATS JetStream (watermill-nats, pkg/nats): at least once, order per stream. TrackMsgId drops second copies within
//     the stream's duplicate window (2 minutes unless set): make it longer than an outage. A server syncs its disk every 2
//     minutes unless sync_interval says otherwise: several replicas, or sync_interval: always.
//   - Core NATS (JetStream.Disabled), gochannel: at most once; nobody listening, nobody gets it.
//   - SQS, SNS (watermill-aws): standard queues and topics at least once, without order. FIFO: order per MessageGroupId,
//     and copies are dropped for 5 minutes by MessageDeduplicationId; the marshaler, or the function that makes the
//     input, has to take them from the metadata "partition_key" and the UUID.
//   - Google Pub/Sub (watermill-googlecloud): at least once. Order per key with EnableMessageOrdering, a marshaler that sets
//     the ordering key, and EnableMessageOrderingAutoResumePublishOnError, without which the first trouble of a key holds
//     it back until the publisher is made anew.
//   - SQL (watermill-sql): as durable as that database; order of its table. To the same database it is a detour.
//   - Redis Streams (watermill-redisstream): order per stream; as durable as Redis is, which with appendonly and
//     appendfsync everysec may lose a second that it acknowledged. MaxLen deletes what nobody read.
//
// # Failures
//
// A call with several messages that fails does not say which were accepted. None of them count, and they go again at
// once, one by one, up to the one that fails. Duplicates of those before it are the price of Config.Batch; with
// a publisher that goes on behind a message that failed, so is the order.
//
// Publishers take no context. A call that is under way when the relay's time is over goes on behind its back while the relay
// starts over, here or in another replica: that adds duplicates. Until it returns, the sink begins no other call, so a
// publisher that hangs for good costs one goroutine for each shard and not one for each attempt; the relay says in its log
// what it waits for. A publisher should have a limit of its own, below relay.Config.Lease, and the
// messages carry the context for those that heed it.
package watermillsink
