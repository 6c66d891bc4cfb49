// Package dead is the operator's half of outbox_dead: it lists the rows that Kafka did not take, hands them
// back to the running relay ([Retry]) or gives them up ([Discard]), and writes down who did so and why. The
// relay does the rest: what is handed back is published within about a second, and then what is behind it.
//
//	places, err := dead.Targets(ctx, conn, schema, dead.Filter{Topic: &topic}, operator.TargetsMax)
//	...
//	result, err := dead.Retry(ctx, conn, schema, operator.By{Who: "ana@ops", Why: "the limit is raised"}, places)
//	...
//	wait.Add(result.Done)
//	report, err := wait.Look(ctx, conn, schema)
//
// The rows of one relay, topic and key are a queue in the order of seq. Only its first row, the head, can be
// retried; the others follow it in their order. A row without a key stands alone.
//
// A relay locks nothing while it publishes. So a row can be given up only while the relay leaves it alone:
// when it is held, or is behind one that is. What was handed back already may be with Kafka.
package dead
