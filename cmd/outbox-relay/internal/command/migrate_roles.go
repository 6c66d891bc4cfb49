package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

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
	conn, err := s.ConnectWriting(ctx)
	if err != nil {
		return err
	}
	defer cli.HangUp(ctx, conn)
	if err := migrations.Check(ctx, conn, migrations.Options{Schema: s.Schema}); err != nil {
		return err
	}
	if err := migrations.CheckOwner(ctx, conn, migrations.Options{Schema: s.Schema}); err != nil {
		return err
	}
	if err := execAll(ctx, conn, sql); err != nil {
		return err
	}
	return say(out, s.JSON, map[string]string{"schema": s.Schema, "prefix": prefix}, "schema %[1]s: rights of %[2]s_publisher, %[2]s_relay, %[2]s_consumer, %[2]s_endpoint, %[2]s_operator\n", s.Schema, prefix)
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
