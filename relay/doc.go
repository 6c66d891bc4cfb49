// Package relay publishes outbox rows to Kafka: every committed row at least once, under an unchanged
// ID, and the rows of a key in the order in which they were inserted.
//
//	pool, err := pgxpool.New(ctx, databaseURL)
//	...
//	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:9092")}, relay.Config{})
//	...
//	err = r.Run(ctx) // until ctx is cancelled; then it drains and returns nil
//
// The command outbox-relay run is this program. Any number of replicas may run: keys are divided into shards
// (one, unless Config.Shards says otherwise), leases in the database let one replica publish each, and the
// others stand by. With Config.ExactlyOnce readers of committed records see each row once.
//
// # How it reads
//
// The cursor is neither a row number (a transaction that commits late would be lost) nor the oldest
// open transaction (one long transaction anywhere in the cluster would stall it). It is a snapshot, the
// technique of Skype's PgQ (https://github.com/pgq/pgq): what became visible between two snapshots is
// one batch, whoever reads it and however often. docs/design.md explains the query.
//
// # What survives what
//
// A relay that is killed publishes the rows after its last stored progress again: duplicates, never a
// loss, and never another order among first occurrences. A broker that is away is no failure of a row:
// the relay waits. A row that Kafka cannot take (unknown topic, no right to it, too large, refused) moves to the table
// outbox_dead with its reason, and later rows of its key wait behind it; everything else flows.
package relay
