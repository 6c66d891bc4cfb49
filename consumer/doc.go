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
// A handler may run several times for one message, but takes effect once: everything it does
// through tx commits together with the claim of the message's ID, or not at all. Anything it does
// outside of tx (an HTTP call, an e-mail, a write through another connection) may happen again.
// Give such calls a key that stays the same, msg.CallKey("charge"), or publish a message with
// outbox.Publish and act on that. Messages that a handler publishes through its tx get derived IDs
// automatically (PublishID).
//
// A handler must not commit or roll back: it returns nil or an error. It must not keep tx, and must
// not use it from other goroutines.
//
// # What names a message
//
// The ID of a message comes from the headers message-id and ce_id, or from those of Debezium and
// Watermill if a second header or Config.IDProfiles proves the producer. A header named id or
// idempotency-key alone is not an ID: it may be a customer's ID, or a request's. Config.IDHeaders
// names other headers, and IDFunc looks elsewhere, for example in the body. If a message has an ID
// from such headers that was claimed with another payload, it is parked as a conflict, never
// dropped. A message without an ID is identified by topic, partition and offset.
//
// The rule belongs to the consumer's name from its first registration on. A change of IDHeaders or
// IDProfiles alone changes no ID, so that a rolling deployment causes no double effect: see
// docs/runbook.md.
//
// # What one batch does
//
// Messages of a partition are handled in order, up to BatchMax in one transaction: claim all IDs,
// handle the fresh messages, advance the position of the partition, commit. The committed position
// decides where the partition resumes; Kafka's committed offset is advisory and follows it. With
// Config.Order OrderByKey or OrderUnordered several workers share a partition.
//
// # Failure
//
// If a batch fails, it is rolled back and split until the failing message is alone; the others
// commit as before. The message's error decides what happens to it. If the error is marked by
// Permanent, or the value cannot be decoded, the message is parked at once. After any other error the message is tried again for a second, then waits in
// parked_messages for its next attempt, up to AttemptsMax attempts with growing pauses. Only messages
// of its key wait for it. The origin of an error decides first: a failure of the engine's own
// statements, or a lost connection, is not an attempt at a message, and the partition waits. A
// message that ends the process is found and parked, too.
//
// What a handler does to its session (a role, SET, set_config, a temporary table) ends with its message: the next
// thousand get a transaction each. A rollback to a savepoint takes along what was published since.
//
// A parked message is stored in parked_messages in the transaction that claims it. Later messages
// of its key are parked behind it, and all others continue. An operator retries or discards it
// (outbox-relay parked). The running consumers then handle it, if it is retried, and the messages
// behind it, in order. Config.OnFailure has other policies. When too many messages fail, the
// partition pauses instead of parking them all: see ParkShareMax.
//
// # Health
//
// Consumer.Status reports the state of each partition and the reason: running, waiting, paused,
// blocked, halted, with position and lag. ReadyHandler is a readiness probe. Handlers get the values of Run's context, but not its
// cancellation.
//
// # The dedup window
//
// Claims are kept for at least Config.Window. Each consumer records the time up to which claims
// were forgotten. A message of that time, by its ID or its record's timestamp, cannot be proven
// fresh and is parked as expired, not run. The same applies to a message in the range of offsets
// that this consumer has handled, if its claim is gone. A new name has forgotten nothing. Choose a
// window longer than the topic's retention.
package consumer
