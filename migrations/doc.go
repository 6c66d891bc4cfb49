// Package migrations installs and updates the tables of effectonce. The migrations are plain
// numbered SQL that psql can run. They are embedded, and each is applied in its own transaction,
// under the lock of the row that holds the version.
//
//	conn, err := pgx.Connect(ctx, databaseURL)
//	...
//	err = migrations.Up(ctx, conn, migrations.Options{})
//
// Programs may run during a migration: one that does not get its locks within LockTimeout gives up,
// and is retried. A program that only uses the tables calls Check at its start. Check also accepts
// a newer schema that declares that the program works with it. Everything is in one schema,
// "effectonce" unless configured, and the tables are a public contract: docs/reference/schema.md.
package migrations
