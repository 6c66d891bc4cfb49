// Package dedup records which messages a consumer has processed, in the transaction of their
// effect.
//
//	tx, err := pool.Begin(ctx)
//	...
//	claims, err := dedup.New(dedup.Config{})
//	billing, err := claims.Register(ctx, pool, dedup.Registration{Name: "billing/orders", Group: "billing", Topics: []string{"orders"}})
//	id := dedup.MessageID("orders", []byte("order-4711")) // the ID that the message carries
//	fresh, err := claims.Claim(ctx, tx, billing, id, dedup.Fingerprint(key, value))
//	if err != nil {
//		return err // ErrConflict: another message has this ID; otherwise roll back and retry
//	}
//	if fresh {
//		_, err = tx.Exec(ctx, `UPDATE account SET balance = balance - 100 WHERE owner = $1`, owner)
//	}
//	...
//	err = tx.Commit(ctx) // commits the claim and the effect together
//
// A claim is an INSERT, never a SELECT followed by an INSERT: the unique constraint decides. A
// concurrent claim of the same ID waits for the other transaction. It is a duplicate if that
// transaction commits, and fresh if it rolls back. Under REPEATABLE READ and SERIALIZABLE,
// PostgreSQL reports the conflict as SQLSTATE 40001 instead: see [ErrRetry].
//
// Claims use disk space, so [Claims.Maintain] deletes (forgets) those that are older than every
// window. After that, a fresh claim of an old message proves nothing. So read, after the claim and
// in the same transaction, up to which time claims may be missing ([Claims.QueueForgotten]), and
// set older messages aside. A consumer that registers with Forever keeps all its claims.
//
// The package does not depend on Kafka or HTTP. Package consumer builds on it.
package dedup
