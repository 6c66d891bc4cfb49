// Package outbox publishes messages inside the caller's database transaction. They are rows of a
// table until the relay (package relay, or the command outbox-relay) sends them to Kafka. If the
// transaction commits, they are published; if it rolls back, they never are.
//
//	tx, err := pool.Begin(ctx)
//	...
//	_, err = tx.Exec(ctx, `UPDATE orders SET state = 'paid' WHERE id = $1`, orderID) // takes the row's lock
//	...
//	err = outbox.Publish(ctx, tx, outbox.Message{
//		Topic:   "orders",
//		Key:     []byte(orderID),
//		Payload: body,
//	})
//	...
//	err = tx.Commit(ctx)
//
// # Order
//
// Messages of one key reach Kafka in the order in which they were inserted. That is commit order
// only if the lock that serialises the writers of a key (a row lock, a version check) is held
// before the message is inserted: publish after the UPDATE, not before it. No relay can repair the
// other order. If the code does not make this obvious, collect messages in a [Buffer] and flush it
// as the last statement before COMMIT. Inside a handler of package consumer this happens
// automatically.
//
// # By plain SQL
//
// INSERT INTO effectonce.outbox (topic, key, payload) VALUES (…) from any language is a complete
// publish; see docs/reference/schema.md for the other columns and the format of headers.
//
// # Later, and to several topics
//
// A message with DeliverAt waits in a separate table until it is due, and can be cancelled until
// then:
//
//	reminder := uuid.New()
//	err = outbox.Publish(ctx, tx, outbox.Message{ID: reminder, Topic: "reminders", Key: []byte(orderID), DeliverAt: inThreeDays})
//	...
//	cancelled, err := outbox.Cancel(ctx, tx, reminder) // false: it is published, or about to be
//
// To send a message to several topics, publish it to each under the same ID.
//
// # Later duplicates
//
// The relay publishes at least once and always under the ID of the row. A consumer that claims this
// ID (package dedup or consumer) has the effect once.
package outbox
