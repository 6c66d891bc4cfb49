// Package held is the operator's side of rows that wait, of two kinds: those of outbox_dead, which
// Kafka did not accept ([Dead]), and those of parked_messages, which a consumer could not handle
// ([Parked]). It lists them, hands them back to the running program or deletes them ([Kind.Run]),
// and records in operator_actions who did so and why. The program does the rest. Within about a
// second after a row was handed back, the relay publishes it, or the consumer that holds its
// partition handles it; the rows behind it follow.
//
//	refs, err := held.Dead.Choose(ctx, conn, schema, held.Filter{Topic: &topic}, held.TargetsMax)
//	...
//	decision := held.Decision{By: operator.By{Who: "ana", Why: "limit raised"}, WaitMax: time.Minute}
//	report := held.Dead.NewReport(decision, len(refs))
//	err = held.Dead.Run(ctx, conn, schema, decision, refs, report, screen.Step)
//
// The rows of one key are a queue in the order of seq: of one relay, topic and key, or of one
// consumer, topic, partition and key. Only its first row, the head, can be retried; the others
// follow in their order. A row without a key is in no queue.
//
// A consumer locks the message that it handles, so the head of its queue can always be discarded. A
// relay locks nothing while it publishes. So a dead row can be discarded only while the relay does
// not touch it: when it is held, or is behind a held one. A row that was handed back may already be
// in Kafka.
package held
