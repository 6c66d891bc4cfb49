// Package inspect finds out where messages are. It implements "outbox-relay explain", "tail" and
// "positions".
//
//	found, err := inspect.Explain(ctx, conn, kafka, inspect.Question{Schema: schema, Text: "order-4711"})
//	...
//	fmt.Println(found.Known(), found.Records)
//
// It changes nothing. The outbox has no index on IDs (every publish would pay for it), so a search
// for an ID reads the table once.
package inspect
