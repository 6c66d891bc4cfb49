// Package inspect reads where messages are: "outbox-relay explain", "tail" and "positions" are this package.
//
//	cut, err := inspect.ReadCut(ctx, conn, schema, "default") // what the relay has published, at this moment
//	...
//	found, err := inspect.Explain(ctx, conn, kafka, inspect.Question{Schema: schema, Text: "order-4711"})
//	...
//	fmt.Println(found.Known(), found.Records)
//
// It changes nothing. The outbox has no index on IDs (a row would pay for it at every publish), so that a
// search for an ID reads the table once.
package inspect
