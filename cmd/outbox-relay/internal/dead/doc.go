// Package dead is the operator's side of outbox_dead. It lists the rows that Kafka did not take,
// hands them back to the running relay ([Retry]) or deletes them ([Discard]), and records who did
// so and why. The relay does the rest: it publishes a row within about a second after the row was
// handed back, and then the rows behind it.
//
//	places, err := dead.Targets(ctx, conn, schema, dead.Filter{Topic: &topic}, operator.TargetsMax)
//	...
//	result, err := dead.Retry(ctx, conn, schema, operator.By{Who: "ana@ops", Why: "the limit is raised"}, places)
//	...
//	wait.Add(result.Done)
//	report, err := wait.Look(ctx, conn, schema)
//
// The rows of one relay, topic and key are a queue in the order of seq. Only its first row, the
// head, can be retried; the others follow in their order. A row without a key is in no queue.
//
// A relay locks nothing while it publishes. So a row can be discarded only while the relay does not
// touch it: when it is held, or is behind a held one. A row that was handed back may already be in
// Kafka.
package dead
