// Package trace finds out where messages are, and whether any is lost: it implements "outbox-relay
// explain", "tail", "positions", "verify" and "replay". One predicate says what a relay has published
// (pipeline.CutPublished).
//
//	found, err := trace.Explain(ctx, conn, kafka, trace.Question{Schema: schema, Text: "order-4711"})
//	...
//	fmt.Println(found.Known(), found.Records)
//
// All but Replay change nothing. The outbox has no index on IDs (every publish would pay for it), so a
// search for an ID reads the table once.
//
// Verify compares the outbox with the topics, and the topics with the claims of a consumer group. It is
// correct while rows are published and consumed. It first reads the relay's progress and the
// group's positions, then the topics up to the end that they have at that later moment. Only what
// was done at the earlier reading has to be found in the later ones. Memory is bounded whatever the
// number of rows: what is known of rows and records (about 60 bytes each) goes to temporary files,
// partitioned by ID and then by key, and is judged part by part.
//
// Replay puts rows into the outbox again that a relay has published and that are still there. Every
// relay of the outbox then publishes them, by its own rules and in its order.
package trace
