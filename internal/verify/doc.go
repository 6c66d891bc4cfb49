// Package verify compares the outbox with the topics, and the topics with the claims of a consumer group.
//
//	report, err := verify.Run(ctx, conn, kafka, verify.Options{Schema: schema, Relay: "default"})
//	...
//	fmt.Println(report.Well, report.Missing.Examples)
//
// It is right while rows are published and consumed: the relay's progress and the group's positions are
// read first, and then the topics up to the end that they have at that later moment; only what the
// earlier reading says to be done has to be found in the later ones.
//
// Memory is bounded whatever the number of rows: what is known of rows and records (about 60 bytes each)
// goes to temporary files, divided by ID, and then by key, and is judged part by part.
package verify
