// Package parked is the operator's half of parking: it lists the messages that wait in parked_messages,
// hands them back to the running consumers ([Retry]) or gives them up ([Discard]), and writes down who did
// so and why. The consumers do the rest: what is handed back is handled by the one that holds its
// partition, within about a second.
//
//	seqs, err := parked.Targets(ctx, conn, schema, parked.Filter{Topic: &topic}, operator.TargetsMax)
//	...
//	result, err := parked.Retry(ctx, conn, schema, operator.By{Who: "ana@ops", Why: "the account exists now"}, seqs)
//	...
//	wait.Add(result.Done)
//	report, err := wait.Look(ctx, conn, schema)
//
// The rows of one consumer, topic, partition and key are a queue in the order of seq. Only its first row,
// the head, can be retried or discarded; the others follow it in their order. A row without a key stands
// alone.
package parked
