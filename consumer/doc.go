// Package consumer turns Kafka messages into effects in PostgreSQL that happen exactly once.
//
//	handler := consumer.JSON(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, order Order) error {
//		_, err := tx.Exec(ctx, `INSERT INTO invoice (order_id, amount) VALUES ($1, $2)`, order.ID, order.Amount)
//		return err
//	})
//	c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:9092")}, handler, consumer.Config{
//		Group:  "billing",
//		Topics: []string{"orders"},
//	})
//	...
//	err = c.Run(ctx) // until ctx is cancelled; then it drains and returns nil
//
// # What the handler must know
//
// A handler may run several times for one message, and takes effect once: everything it does through
// tx commits together with the claim of the message's ID, or not at all. Whatever it does outside of tx
// (an HTTP call, an e-mail, a write through another connection) may happen again. Give such calls a
// key that stays the same, msg.ChildID("charge"), or publish a message with outbox.Publish and act on
// that. Messages that a handler publishes through its tx get derived IDs by themselves (OutboxID).
//
// A handler does not commit or roll back: it returns nil or an error. It does not keep tx, and does not
// use it from other goroutines.
//
// # What names a message
//
// The headers message-id and ce_id, and those of Debezium and Watermill where a second header proves the producer, or
// Config.IDProfiles does. A header named id or idempotency-key alone is no ID: it may be a customer's, or a
// request's. Config.IDHeaders names others, and IDFunc looks elsewhere, for example into the body. An ID of
// such headers with another payload than before is parked as a conflict, never dropped. A message without
// an ID is known by topic, partition and offset.
//
// The rule belongs to the consumer's name from its first registration on. A change of IDHeaders or IDProfiles
// alone changes no ID, so that a rolling deployment doubles no effect: see docs/operations.md.
//
// # What one batch does
//
// Messages of a partition are handled in order, up to BatchMax in one transaction: claim all IDs,
// handle what is fresh, advance the position of the partition, commit. The committed position decides
// where the partition resumes; Kafka's committed offset is advisory and follows it. With Config.Order
// OrderByKey or OrderUnordered several workers share a partition.
//
// # Failure
//
// If a batch fails it is rolled back and split until the culprit stands alone; the others commit as
// before. The culprit's error decides. One marked by Permanent, a value that cannot be decoded, a
// SQLSTATE of PermanentStates: it is parked at once. Any other: it is tried up to AttemptsMax times with
// growing pauses, counted in the database, and then parked. Where an error arose decides first: a failure of
// the engine's own statements, or a lost connection, is no attempt of a message, and the partition waits. A message
// that ends the process is found and parked, too.
//
// A parked message is stored in parked_messages in the transaction that claims it. Later messages of
// its key go behind it and everything else flows. An operator retries or discards it (outbox-relay
// parked), and the running consumers do the rest, in order. Config.OnFailure has other policies. When
// too many messages fail the partition pauses instead of parking them all: see ParkShareMax.
//
// # Health
//
// Consumer.Status says what each partition does and why: running, waiting, paused, blocked, halted, with position, lag
// and parked messages. Hooks.State is called on each change, and ReadyHandler is a readiness probe. The context that
// Run gets lends its values to handlers, and not its end.
//
// # The dedup window
//
// Claims are kept for Config.Window at least. What was forgotten is noted for each consumer: a message of that time, by
// its ID or its record's timestamp, cannot be proven fresh and is parked as expired, not run. So is one inside the
// range of offsets that this consumer has worked through, if its claim is gone. A new name has forgotten nothing.
// Choose the window longer than the topic's retention.
package consumer
