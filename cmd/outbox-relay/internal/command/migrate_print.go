package command

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/migrations"
)

func newMigratePrint(s *cli.Settings) *cobra.Command {
	version := 0
	cmd := cli.Offline(&cobra.Command{
		Use:   "print",
		Short: "Print the SQL of the migrations, for psql",
		Long: `Print the SQL of all migrations in order, or of one, to apply them by hand:

  outbox-relay migrate print | psql -v ON_ERROR_STOP=1

Each migration is one transaction. It records its version, requires the version before it, waits for the
lock of "migrate up", and refuses a schema that another role created. A statement that waits more than
1.5 s for a table lock fails, so that claims do not queue behind it, and nothing changes: run psql again.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := migrations.All(migrations.Options{Schema: s.Schema})
			if err != nil {
				return err
			}
			for _, m := range all {
				if version != 0 && version != m.Version {
					continue
				}
				if err := printMigration(cmd.OutOrStdout(), m, s.Schema); err != nil {
					return err
				}
			}
			return nil
		},
	})
	addVersionFlag(cmd.Flags(), &version, "version", 1, "print only this migration")
	return cmd
}

// begin starts a transaction whose search path finds no function or operator of another role.
const begin = `BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL client_min_messages = warning;
`

// before and after record versions as "migrate up" does, so that either can continue where the
// other stopped. VERSION and PREVIOUS are numbers; TIMEOUT is migrations.LockTimeout.
const before = `SET LOCAL lock_timeout = 'TIMEOUTms';
DO $before$
BEGIN
  -- CREATE SCHEMA IF NOT EXISTS asks for the right to create schemas even where this one is there.
  IF to_regnamespace('effectonce') IS NULL THEN
    CREATE SCHEMA effectonce;
  END IF;
  -- What another role made there would run with the rights of this one: a view in place of the table, a trigger.
  IF EXISTS (
    SELECT FROM (SELECT n.nspowner AS owner FROM pg_namespace n WHERE n.oid = to_regnamespace('effectonce')
      UNION ALL SELECT c.relowner FROM pg_class c WHERE c.relnamespace = to_regnamespace('effectonce')
      UNION ALL SELECT p.proowner FROM pg_proc p WHERE p.pronamespace = to_regnamespace('effectonce')) o
    JOIN pg_roles r ON r.oid = o.owner WHERE NOT r.rolsuper AND r.rolname NOT IN (current_user, 'pg_database_owner')) THEN
    RAISE EXCEPTION 'schema effectonce, or something in it, belongs to another role: connect as its owner, or drop it';
  END IF;
  CREATE TABLE IF NOT EXISTS effectonce.schema_version (version int4 NOT NULL);
  INSERT INTO effectonce.schema_version SELECT 0 WHERE NOT EXISTS (SELECT FROM effectonce.schema_version);
  PERFORM FROM effectonce.schema_version FOR UPDATE;
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
	return terminal.Write(out, fmt.Sprintf("-- migration %d: %s\n", m.Version, m.Name)+begin+in(before)+"\n"+strings.TrimSpace(m.Up)+"\n"+in(after))
}
