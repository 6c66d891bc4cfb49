package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/migrations"
)

func newMigratePrint(s *settings) *cobra.Command {
	version := 0
	cmd := offline(&cobra.Command{
		Use:   "print",
		Short: "Print the SQL of the migrations, for psql",
		Long: `Print the SQL of all migrations in order, or of one, for people who bring the tables by hand:

  outbox-relay migrate print | psql -v ON_ERROR_STOP=1

Each migration is a transaction that also records its version, refuses to run on another version than
the one before it, and waits for the same lock as "migrate up". A statement that waits for a table's lock
for more than 1.5 s fails, so that no claim queues behind it for longer, and nothing is changed then: run
psql again.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := migrations.All(s.options())
			if err != nil {
				return err
			}
			for _, m := range all {
				if version != 0 && version != m.Version {
					continue
				}
				if err := printMigration(cmd.OutOrStdout(), m, s.schema); err != nil {
					return err
				}
			}
			return nil
		},
	})
	addVersionFlag(cmd.Flags(), &version, "version", 1, "print only this migration")
	return cmd
}

// locks keep "migrate up" away: the first is that of its library, for the whole of a migration, the
// second that under which it creates the schema.
const locks = `BEGIN;
SET LOCAL client_min_messages = warning;
DO $lock$
BEGIN
  PERFORM pg_advisory_xact_lock(9628173550095224), pg_advisory_xact_lock(hashtextextended('effectonce migrations', 0));
END
$lock$;
`

// before and after keep the record of versions as "migrate up" does, so that either can go on where the
// other stopped. VERSION and PREVIOUS are numbers; TIMEOUT is migrations.LockTimeout.
const before = `SET LOCAL lock_timeout = 'TIMEOUTms';
DO $before$
BEGIN
  -- CREATE SCHEMA IF NOT EXISTS asks for the right to create schemas even where this one is there.
  IF to_regnamespace('effectonce') IS NULL THEN
    CREATE SCHEMA effectonce;
  END IF;
  CREATE TABLE IF NOT EXISTS effectonce.schema_version (version int4 NOT NULL);
  INSERT INTO effectonce.schema_version SELECT 0 WHERE NOT EXISTS (SELECT FROM effectonce.schema_version);
  IF (SELECT version FROM effectonce.schema_version) <> PREVIOUS THEN
    RAISE EXCEPTION 'the schema has version %, migration VERSION needs version PREVIOUS', (SELECT version FROM effectonce.schema_version);
  END IF;
END
$before$;
`

const after = `
UPDATE effectonce.schema_version SET version = VERSION;
COMMIT;
`

func printMigration(out io.Writer, m migrations.Migration, schema string) error {
	numbers := strings.NewReplacer("VERSION", strconv.Itoa(m.Version), "PREVIOUS", strconv.Itoa(m.Version-1),
		"TIMEOUT", strconv.FormatInt(migrations.LockTimeout.Milliseconds(), 10))
	in := func(sql string) string { return migrations.InSchema(numbers.Replace(sql), schema) }
	_, err := fmt.Fprintf(out, "-- migration %d: %s\n%s%s\n%s\n%s", m.Version, m.Name, locks, in(before), strings.TrimSpace(m.Up), in(after))
	return err
}
