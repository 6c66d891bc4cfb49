// Package pipeline is the read model of the relays: how far each shard is ([Shards]), what waits for
// it ([Count]), and which rows are published ([Cut]). Commands, checks and metrics show the same
// numbers because they take them from here.
//
//	shards, err := pipeline.Shards(ctx, conn, schema, nil)
//	...
//	err = pipeline.Count(ctx, conn, schema, shards, pipeline.CountMax)
//
// Every age and every lease is measured by the database's clock.
package pipeline
