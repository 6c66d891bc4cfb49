// Package keys is the operator's side of idempotency_keys. It lists requests by their keys and ends
// locks ([Unlock]). It lets an indeterminate or abandoned request continue ([Retry]) or stores its outcome
// ([Finish]), and records who did so and why.
//
// A worker writes to a key under the token of its lock. Each change here increases the token, so
// that a worker that is still alive can store nothing afterwards: its transaction is rolled back.
package keys
