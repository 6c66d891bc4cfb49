// Package migrations brings the tables of effectonce: plain numbered SQL that psql can run, embedded,
// applied by tern under an advisory lock.
//
//	conn, err := pgx.Connect(ctx, databaseURL)
//	...
//	err = migrations.Up(ctx, conn, migrations.Options{})
//
// Programs may run meanwhile: a migration that does not get its locks within LockTimeout gives up, and is tried
// again. A program that only uses the tables calls Check at its start, which also accepts a newer schema that
// says that the program works with it. Everything lives in one schema,
// "effectonce" unless configured, and the tables are a public contract: docs/schema.md.
package migrations
