// Package keys is the operator's half of idempotency_keys: it lists requests by their keys, ends locks ([Unlock]), says
// of what is indeterminate or abandoned that it did not happen ([Retry]) or that it did ([Finish]), and writes down who
// did so and why. It also forgets finished keys ([Reap]), for where no program with package idempotency runs.
//
//	found, err := keys.Find(ctx, conn, schema, keys.Name{Key: "7f3c…"})
//	...
//	changed, err := keys.Retry(ctx, conn, schema, operator.By{Who: "ana@ops", Why: "the bank has no such transfer"}, found[0].Place, false)
//
// Whoever works on a key writes under the token of its lock. Each change here makes the token grow, so that a worker
// that is still alive can store nothing afterwards: its transaction is rolled back.
package keys
