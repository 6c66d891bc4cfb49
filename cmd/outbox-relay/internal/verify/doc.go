// Package verify compares the outbox with the topics, and the topics with the claims of a consumer
// group.
//
//	report, err := verify.Run(ctx, conn, kafka, verify.Options{Schema: schema, Relay: "default"})
//	...
//	fmt.Println(report.Well, report.Missing.Examples)
//
// It is correct while rows are published and consumed. It first reads the relay's progress and the
// group's positions, then the topics up to the end that they have at that later moment. Only what
// was done at the earlier reading has to be found in the later ones.
//
// Memory is bounded whatever the number of rows. What is known of rows and records (about 60 bytes
// each) goes to temporary files, partitioned by ID and then by key, and is judged part by part.
package verify
