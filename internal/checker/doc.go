// Package checker compares what the demo's shop committed with what reached the topic and what its
// consumers did about it, and names every difference.
//
// It shares no code with the engine, on purpose: a mistake in how the engine writes IDs, orders rows
// or counts must not be repeated by the one who looks for it. It imports no other package of this
// module, reads the tables with plain SQL and the topic from its first offset with a plain client.
//
//	var evidence checker.Evidence
//	err := checker.ReadDatabase(ctx, conn, "shop", &evidence)
//	...
//	err = checker.ReadTopic(ctx, client, "orders", &evidence)
//	...
//	verdict := checker.Judge(evidence)
//	fmt.Println(verdict.Held(), verdict.Examples)
//
// Extents and Scan read topics up to a moment's end; "outbox-relay explain" and "verify" do it with them.
package checker
