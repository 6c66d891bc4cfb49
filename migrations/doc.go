// Package migrations brings the tables of effectonce: plain numbered SQL that psql can run, embedded,
// applied by tern under an advisory lock.
//
//	conn, err := pgx.Connect(ctx, databaseURL)
//	...
//	err = migrations.Up(ctx, conn, migrations.Options{})
//
// A program that only uses the tables calls Check at its start. Everything lives in one schema,
// "effectonce" unless configured, and the tables are a public contract: docs/schema.md.
package migrations
