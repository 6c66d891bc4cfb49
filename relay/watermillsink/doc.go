// Package watermillsink publishes outbox rows to any broker that Watermill has a publisher for
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
// # Message format
//
// The UUID of a message is the row's ID, its payload the row's payload, its topic the row's topic.
// Its metadata has the row's headers, with message-id (the ID again) and occurred-at. It also has
// the key under Config.KeyName, if the row has one, and MetadataTombstone if there is no payload.
// Nothing is lost silently on the way to the publisher. A header that occurs several times is
// joined, or its row is refused (Config.HeaderSeparator). A header that is null is empty and listed
// in MetadataNullHeaders. A header with the name of one of these is refused. Bytes that are not
// UTF-8 stay as they are in Go's strings.
//
// From there on the publisher's marshaler decides. Marshalers that write JSON replace bytes that
// are not UTF-8. NATS leaves out headers whose names are not HTTP tokens, replaces line breaks in
// values with spaces and trims the values. SQS has ten attributes for each message. Encode binary
// keys and headers as text before you publish them.
//
// # Guarantees
//
// Each committed row reaches the broker at least once, under an unchanged ID, if the publisher
// returns only when the broker has stored the message durably. With a publisher that returns
// earlier, the messages that it had only in memory are published at most once.
//
// The rows of a key are in the order of their commit, among first occurrences, if two more
// conditions hold. The publisher sends the messages of a call one after the other and stops at the
// first that fails. The broker keeps the order of what it takes: for a key, a queue or a subject.
//
// Exactly-once publishing works only with Kafka (relay.Config.ExactlyOnce). With other brokers,
// consumers deduplicate by the message's UUID, which the metadata message-id repeats for package
// consumer.
//
// # Publishers
//
//   - Apache Kafka (watermill-kafka): better without this package. At least once with RequiredAcks
//     = WaitForAll (Sarama's default is the leader alone). Order per key only with
//     kafka.NewWithPartitioningMarshaler over the metadata "partition_key", Producer.Idempotent and
//     Net.MaxOpenRequests = 1.
//   - RabbitMQ (watermill-amqp): at least once only with Publish.ConfirmDelivery, durable queues
//     and persistent messages. Order per queue. The queues must be bound before: an exchange also
//     confirms messages that it routes to no queue. Not with Publish.Transactional: a call that was
//     rolled back returns the result of the commit after it, and counts as done.
//   - NATS JetStream (watermill-nats, pkg/nats): at least once, order per stream. TrackMsgId drops
//     second copies within the stream's duplicate window (2 minutes unless set): make it longer
//     than an outage. A server syncs its disk every 2 minutes unless sync_interval says otherwise:
//     use several replicas, or sync_interval: always.
//   - Core NATS (JetStream.Disabled), gochannel: at most once; without a subscriber, a message is
//     lost.
//   - SQS, SNS (watermill-aws): standard queues and topics at least once, without order. FIFO:
//     order per MessageGroupId, and copies are dropped for 5 minutes by MessageDeduplicationId. The
//     marshaler, or the function that makes the input, must take them from the metadata
//     "partition_key" and the UUID.
//   - Google Pub/Sub (watermill-googlecloud): at least once. Order per key with
//     EnableMessageOrdering, a marshaler that sets the ordering key, and
//     EnableMessageOrderingAutoResumePublishOnError. Without the last one, the first error of a key
//     holds it back until the publisher is made anew.
//   - SQL (watermill-sql): as durable as that database; order of its table. To the same database it
//     is a detour.
//   - Redis Streams (watermill-redisstream): order per stream. As durable as Redis is: with
//     appendonly and appendfsync everysec it may lose a second of acknowledged messages. MaxLen
//     deletes unread messages.
//
// # Failures
//
// A failed call with several messages does not report which messages were accepted. None of them
// count, and the sink publishes them again at once, one by one, up to the one that fails.
// Config.Batch therefore adds duplicates of the messages before it. With a publisher that continues
// after a failed message, it also changes the order.
//
// Publishers take no context. A call that is running when the relay's time is over continues while
// the relay starts over, here or in another replica: that adds duplicates. Until it returns, the
// sink begins no other call, so a publisher that hangs forever costs one goroutine for each shard
// and not one for each attempt. The relay logs what it waits for. A publisher should have a limit
// of its own, below relay.Config.Lease. The messages carry the context for publishers that use it.
package watermillsink
