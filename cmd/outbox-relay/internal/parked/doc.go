// Package parked is the operator's side of parking. It lists the messages in parked_messages, hands
// them back to the running consumers ([Retry]) or deletes them ([Discard]), and records who did so
// and why. The consumers do the rest: the one that holds its partition handles a message within
// about a second after it was handed back.
//
//	seqs, err := parked.Targets(ctx, conn, schema, parked.Filter{Topic: &topic}, operator.TargetsMax)
//	...
//	result, err := parked.Retry(ctx, conn, schema, operator.By{Who: "ana@ops", Why: "the account exists now"}, seqs)
//	...
//	wait.Add(result.Done)
//	report, err := wait.Look(ctx, conn, schema)
//
// The rows of one consumer, topic, partition and key are a queue in the order of seq. Only its
// first row, the head, can be retried or discarded; the others follow in their order. A row without
// a key is in no queue.
package parked
