// Package pipeline is the read model: what waits and which replica relays it, how far consumers are, and
// what is wrong with the remedy of each ([ReadStatus]); in parts, how far each shard is ([Shards]), what
// waits for it ([Count]), and which rows are published ([Cut]). Commands, checks and metrics show the
// same numbers because they take them from here.
//
//	status, err := pipeline.ReadStatus(ctx, conn, schema, pipeline.StatusOptions{})
//	...
//	fmt.Println(status.Well, status.Problems)
//
// Every age and every lease is measured by the database's clock.
package pipeline
