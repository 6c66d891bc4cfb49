// Package checker compares what the demo's shop committed with the records of the topic and with
// the effects of its consumers, and reports every difference.
//
// It deliberately shares no code with the engine: a mistake in how the engine writes IDs, orders
// rows or counts must not be repeated by the code that looks for it. It reads the tables with
// plain SQL and the topic from its first offset with a plain client (topicscan), and imports no
// other package of this module.
//
//	var evidence checker.Evidence
//	err := checker.ReadDatabase(ctx, conn, "shop", &evidence)
//	...
//	err = checker.ReadTopic(ctx, client, "orders", &evidence)
//	...
//	verdict := checker.Judge(evidence)
//	fmt.Println(verdict.Held(), verdict.Examples)
package checker
