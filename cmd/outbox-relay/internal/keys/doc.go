// Package keys is the operator's side of idempotency_keys. It lists requests by their keys and ends
// locks ([Unlock]). It records of an indeterminate or abandoned request that it did not happen
// ([Retry]) or that it did ([Finish]), and who did so and why. It also deletes finished keys whose
// window is over ([Reap]), for installations where no program with package idempotency runs.
//
//	found, err := keys.Find(ctx, conn, schema, keys.Name{Key: "7f3c…"})
//	...
//	changed, err := keys.Retry(ctx, conn, schema, operator.By{Who: "ana@ops", Why: "the bank has no such transfer"}, found[0].Place, false)
//
// A worker writes to a key under the token of its lock. Each change here increases the token, so
// that a worker that is still alive can store nothing afterwards: its transaction is rolled back.
package keys
