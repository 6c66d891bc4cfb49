package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

func newMigrate(s *cli.Settings) *cobra.Command {
	return group(&cobra.Command{
		Use:   "migrate",
		Short: "Create, upgrade, check, print or remove the tables, and their roles",
	}, newMigrateUp(s), newMigrateDown(s), newMigrateStatus(s), newMigratePrint(s), newMigrateRoles(s))
}

// printMigrated prints what "migrate up" and "migrate down" did.
func printMigrated(out io.Writer, asJSON bool, before migrations.State, to int) error {
	change := fmt.Sprintf("was %d", before.Current)
	if before.Current == to {
		change = "nothing to do"
	}
	printed := struct {
		Schema string `json:"schema"`
		From   int    `json:"from"`
		To     int    `json:"to"`
	}{before.Schema, before.Current, to}
	return say(out, asJSON, printed, "schema %s: version %d, %s\n", before.Schema, to, change)
}

func newMigrateUp(s *cli.Settings) *cobra.Command {
	var lockWait time.Duration
	cmd := cli.Needs(&cobra.Command{
		Use:   "up",
		Short: "Create the tables, or upgrade them to this program's version",
		Long: `Create the tables, or upgrade them to this program's version. Of several processes one works; the others wait and then
find nothing to do. Connect to the primary, and not through a transaction pooler: the lock belongs to the session.

Relays and consumers of the previous release may run during and after it; then replace them. A migration waits at most
1.5 s at a time for table locks, so that claims do not queue behind it for longer. If others hold the locks, it logs
who, pauses and retries, until --lock-wait.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return migrate(cmd.Context(), s, func(ctx context.Context, conn *pgx.Conn, state migrations.State) error {
				if err := migrations.Up(ctx, conn, patient(cmd, s, lockWait)); err != nil {
					return err
				}
				// Up does not change a newer schema.
				return printMigrated(cmd.OutOrStdout(), s.JSON, state, max(state.Current, state.Latest))
			})
		},
	}, cli.FlagDatabaseURL)
	addLockWait(cmd.Flags(), &lockWait)
	s.AddJSON(cmd)
	return cmd
}

// patient returns the options for changes of the tables.
func patient(cmd *cobra.Command, s *cli.Settings, lockWait time.Duration) migrations.Options {
	return migrations.Options{Schema: s.Schema, LockWaitMax: lockWait, Logger: s.Logger(cmd.ErrOrStderr())}
}

func addLockWait(flags *pflag.FlagSet, target *time.Duration) {
	cli.AddDuration(flags, target, "lock-wait", 5*time.Minute, time.Second, 24*time.Hour, "give up if other transactions hold locks for this long")
}

// migrate opens a connection and reads the version before work.
func migrate(ctx context.Context, s *cli.Settings, work func(context.Context, *pgx.Conn, migrations.State) error) error {
	conn, err := s.Connect(ctx)
	if err != nil {
		return err
	}
	defer cli.HangUp(ctx, conn)
	state, err := migrations.Status(ctx, conn, migrations.Options{Schema: s.Schema})
	if err != nil {
		return err
	}
	return work(ctx, conn, state)
}

func newMigrateDown(s *cli.Settings) *cobra.Command {
	var yes bool
	var lockWait time.Duration
	to := -1
	cmd := cli.Needs(&cobra.Command{
		Use:   "down --to VERSION --yes",
		Short: "Go back to an older version; data that it does not know is lost",
		Long: `Go back to an older version; 0 removes all tables. Their data is lost: unpublished outbox rows, claims (redelivered
messages take effect again) and positions. Without --yes it only lists the tables that hold rows. It waits for locks as "up" does.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return migrate(cmd.Context(), s, func(ctx context.Context, conn *pgx.Conn, state migrations.State) error {
				switch {
				case to < 0:
					return usageError{errors.New("--to is missing: want the version to go back to, 0 to remove everything")}
				case to > state.Current:
					return usageError{fmt.Errorf("--to %d: the database has version %d; \"outbox-relay migrate up\" goes forward", to, state.Current)}
				case to < state.Current && !yes:
					var holds string
					if err := conn.QueryRow(ctx, holdsSQL, s.Schema).Scan(&holds); err != nil {
						return err
					}
					return usageError{fmt.Errorf("migrate down from version %d to %d would lose what the removed tables hold (without claims, redelivered messages take effect again); "+
						"the schema has %s; repeat it with --yes if that is meant", state.Current, to, holds)}
				}
				if to < state.Current {
					if err := migrations.To(ctx, conn, patient(cmd, s, lockWait), to); err != nil {
						return err
					}
				}
				return printMigrated(cmd.OutOrStdout(), s.JSON, state, to)
			})
		},
	}, cli.FlagDatabaseURL)
	addVersionFlag(cmd.Flags(), &to, "to", 0, "version to go back to; 0 removes everything")
	addLockWait(cmd.Flags(), &lockWait)
	cli.AddBool(cmd.Flags(), &yes, cli.FlagYes, "yes, lose what the removed tables hold")
	s.AddJSON(cmd)
	return cmd
}

const holdsSQL = `-- migrate.holds
SELECT coalesce(pg_catalog.string_agg(pg_catalog.format('%s (%s)', name, pg_catalog.pg_size_pretty(bytes)), ', ' ORDER BY bytes DESC), 'no rows') FROM (
  SELECT coalesce(pg_partition_root(oid::regclass), oid::regclass) AS name, pg_catalog.sum(pg_table_size(oid::regclass)) AS bytes FROM pg_class
  WHERE relnamespace = $1::text::regnamespace::oid AND relkind = 'r' GROUP BY 1 HAVING pg_catalog.sum(pg_relation_size(oid::regclass)) > 0::numeric) AS tables`

// addVersionFlag adds a flag that has no default: the target keeps its value unless it is given.
func addVersionFlag(flags *pflag.FlagSet, target *int, name string, lowest int, usage string) {
	cli.AddOption(flags, name, "version", "", usage, func(text string) error {
		all, err := migrations.All(migrations.Options{})
		if err != nil {
			return err
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < lowest || n > len(all) {
			return fmt.Errorf("want a version, %d to %d", lowest, len(all))
		}
		*target = n
		return nil
	})
}

func newMigrateStatus(s *cli.Settings) *cobra.Command {
	cmd := cli.Needs(&cobra.Command{
		Use:   "status",
		Short: "Compare the tables' version with this program's",
		Long: `Compare the tables' version with this program's. Exit status 1 if this program does not work with the tables. A newer
version is compatible if its release says so.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return migrate(cmd.Context(), s, func(_ context.Context, _ *pgx.Conn, state migrations.State) error {
				return printSchemaState(cmd.OutOrStdout(), state, s.JSON)
			})
		},
	}, cli.FlagDatabaseURL)
	s.AddJSON(cmd)
	return cmd
}

func printSchemaState(out io.Writer, state migrations.State, asJSON bool) error {
	name, remedy := "current", "current"
	switch {
	case state.Current == 0:
		name, remedy = "missing", "not installed: run \"outbox-relay migrate up\""
	case state.Current < state.Latest:
		name, remedy = "old", "too old: run \"outbox-relay migrate up\""
	case state.Compatible():
		name, remedy = "compatible", "newer, and this program works with it"
	case state.Current > state.Latest:
		name, remedy = "new", "too new: update this program"
	}
	text := terminal.Fill("schema %s: version %d, this program has %d: %s\n", state.Schema, state.Current, state.Latest, remedy)
	printed := struct {
		Schema  string `json:"schema"`
		Current int    `json:"current"`
		Latest  int    `json:"latest"`
		State   string `json:"state"`
	}{state.Schema, state.Current, state.Latest, name}
	return answer(out, asJSON, printed, text, name == "current" || name == "compatible")
}

func newMigrateRoles(s *cli.Settings) *cobra.Command {
	var prefix string
	var apply bool
	cmd := &cobra.Command{
		Use:   "roles",
		Short: "Print, or apply, the SQL of least-privilege roles",
		Long: `Print, or with --apply execute, the SQL of five group roles with the least rights:

  PREFIX_publisher  insert into the outbox, without reading it
  PREFIX_relay      "outbox-relay run", status
  PREFIX_consumer   consumers, and what their handlers publish
  PREFIX_endpoint   services with idempotency keys, and what their handlers publish
  PREFIX_operator   every command that reads, parked, dead, keys

They cannot log in: make each program's own role a member.

  outbox-relay migrate roles | psql -v ON_ERROR_STOP=1
  psql -c 'CREATE ROLE relay_eu LOGIN PASSWORD …; GRANT effectonce_relay TO relay_eu'

Run it after each "migrate up", as the owner of the tables, with CREATEROLE unless the roles exist. It is one
transaction. Roles belong to the whole database cluster: use one prefix per database.

Existing roles keep their members and their LOGIN attribute. A role is refused that is SUPERUSER, CREATEROLE,
BYPASSRLS or REPLICATION, that owns the schema, or that is a member of such a role: its members would gain those
rights.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			sql, err := migrations.Roles(migrations.Options{Schema: s.Schema}, prefix)
			if err != nil {
				return err
			}
			sql = begin + sql + "\nCOMMIT;\n"
			if !apply {
				return terminal.Write(cmd.OutOrStdout(), sql)
			}
			return applyRoles(cmd.Context(), s, sql, cmp.Or(prefix, s.Schema), cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	cli.AddOption(flags, "prefix", "string", "", "prefix of the roles' names; default: the schema's name", func(text string) error {
		if _, err := migrations.Roles(migrations.Options{}, text); err != nil {
			return errors.New("want at most 49 lower-case letters, digits and underscores, not starting with a digit or pg_")
		}
		prefix = text
		return nil
	})
	cli.AddBool(flags, &apply, "apply", "execute the SQL in the database")
	s.AddJSON(cmd)
	cli.CommandLineOnly(flags, "apply")
	s.Check(cmd, func() error {
		switch {
		case apply && !s.HasDatabase():
			return fmt.Errorf("--%s is missing: --apply needs it", cli.FlagDatabaseURL)
		case s.JSON && !apply:
			return errors.New("--json: without --apply the output is SQL; give --apply too")
		}
		return nil
	})
	return cmd
}

// applyRoles sends the SQL that would be printed, so that both do the same. If a statement fails,
// closing the connection ends the transaction.
func applyRoles(ctx context.Context, s *cli.Settings, sql, prefix string, out io.Writer) error {
	return s.WithTables(ctx, true, func(ctx context.Context, conn *pgx.Conn) error {
		if err := migrations.CheckOwner(ctx, conn, migrations.Options{Schema: s.Schema}); err != nil {
			return err
		}
		if err := execAll(ctx, conn, sql); err != nil {
			return err
		}
		return say(out, s.JSON, map[string]string{"schema": s.Schema, "prefix": prefix},
			"schema %[1]s: rights of %[2]s_publisher, %[2]s_relay, %[2]s_consumer, %[2]s_endpoint, %[2]s_operator\n", s.Schema, prefix)
	})
}

func execAll(ctx context.Context, conn *pgx.Conn, sql string) error {
	_, err := conn.PgConn().Exec(ctx, sql).ReadAll()
	var pgErr *pgconn.PgError
	if pgerr.Is(err, pgerr.InsufficientPrivilege) {
		return fmt.Errorf("create the roles (as the owner of the tables, with CREATEROLE unless the roles exist): %w", err)
	}
	if errors.As(err, &pgErr) && pgErr.Hint != "" {
		return fmt.Errorf("create the roles: %w. %s", err, pgErr.Hint)
	}
	if err != nil {
		return fmt.Errorf("create the roles: %w", err)
	}
	return nil
}

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
