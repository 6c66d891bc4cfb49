// Package relay publishes outbox rows to Kafka. Every committed row is published at least once,
// under an unchanged ID. The rows of a key are published in the order in which they were inserted.
//
//	pool, err := pgxpool.New(ctx, databaseURL)
//	...
//	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:9092")}, relay.Config{})
//	...
//	err = r.Run(ctx) // until ctx is cancelled; then it drains and returns nil
//
// The command "outbox-relay run" is this program. Any number of replicas may run. Keys are divided
// into shards (one, unless Config.Shards says otherwise). A lease in the database lets one replica
// publish each shard; the other replicas stand by. With Config.ExactlyOnce, readers of committed
// records see each row once.
//
// # How it reads
//
// The cursor is not a row number: a transaction that commits late would be lost. It is not the
// oldest open transaction either: one long transaction anywhere in the cluster would stall it. It
// is a snapshot, the technique of Skype's PgQ (https://github.com/pgq/pgq). The rows that became
// visible between two snapshots are one batch, no matter which replica reads it and how often.
// docs/design.md explains the query.
//
// # Failures
//
// A relay that is killed publishes the rows after its last stored progress again. These are
// duplicates, never a loss, and the order among first occurrences never changes. An unavailable
// broker is not a failure of a row: the relay waits. A row that Kafka cannot take (unknown topic,
// no right to it, too large, refused) moves to the table outbox_dead with its reason. Later rows of
// its key wait behind it; all other rows are published.
package relay
