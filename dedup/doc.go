// Package dedup records which messages a consumer has processed, in the transaction of their effect.
//
//	tx, err := pool.Begin(ctx)
//	...
//	claims, err := dedup.New(dedup.Config{})
//	billing, err := claims.Register(ctx, pool, dedup.Registration{Name: "billing/orders", Group: "billing", Topics: []string{"orders"}})
//	id := dedup.MessageID("orders", []byte("order-4711")) // what the message carries
//	fresh, err := claims.Claim(ctx, tx, billing, id)
//	if err != nil {
//		return err // roll back; run again
//	}
//	if fresh {
//		_, err = tx.Exec(ctx, `UPDATE account SET balance = balance - 100 WHERE owner = $1`, owner)
//	}
//	...
//	err = tx.Commit(ctx) // the claim and the effect are there together, or neither
//
// A claim is an insert, never a look followed by an insert: the unique constraint decides. A concurrent
// claim of the same ID waits for the other transaction and then is a duplicate, or fresh if that one
// rolled back. Under REPEATABLE READ and SERIALIZABLE PostgreSQL reports the conflict as SQLSTATE 40001
// instead: see [ErrRetry].
//
// Claims take room, so [Claims.Maintain] forgets those that are older than every window. From then on a fresh claim of
// an old message proves nothing: read how far back claims are complete behind the claim, in the same transaction
// ([Claims.QueueForgotten]), and put aside what is older. A consumer that registers with Forever forgets nothing.
//
// The package knows no Kafka and no HTTP. Package consumer builds on it.
package dedup
