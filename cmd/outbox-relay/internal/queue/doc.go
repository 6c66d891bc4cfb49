// Package queue is the operator's side of rows that wait: those of outbox_dead, which Kafka did not
// take ([Dead]), and those of parked_messages, which a consumer could not handle ([Parked]). It
// lists them, hands them back to the running program ([Table.Retry]) or deletes them
// ([Table.Discard]), and records in operator_actions who did so and why. The program does the rest.
// Within about a second after a row was handed back, the relay publishes it, or the consumer that
// holds its partition handles it; the rows behind it follow.
//
//	rows := queue.Dead(schema)
//	places, err := rows.Targets(ctx, conn, queue.DeadFilter{Topic: &topic}, queue.TargetsMax)
//	...
//	result, err := rows.Retry(ctx, conn, operator.By{Who: "ana", Why: "limit raised"}, places)
//	...
//	wait.Add(result.Done)
//	report, err := rows.Look(ctx, conn, &wait)
//
// The rows of one key are a queue in the order of seq: of one relay, topic and key, or of one
// consumer, topic, partition and key. Only its first row, the head, can be retried; the others
// follow in their order. A row without a key is in no queue.
//
// A consumer locks the message that it handles, so the head of its queue can always be discarded. A
// relay locks nothing while it publishes. So a dead row can be discarded only while the relay does
// not touch it: when it is held, or is behind a held one. A row that was handed back may already be
// in Kafka.
package queue
