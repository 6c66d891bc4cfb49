package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/migrations"
)

func newMigrateRoles(s *settings) *cobra.Command {
	var prefix string
	var apply, asJSON bool
	cmd := &cobra.Command{
		Use:   "roles",
		Short: "Print, or apply, the SQL of roles with the least rights",
		Long: `Print the SQL of five group roles that may do what their part needs, and nothing else:

  PREFIX_publisher  inserts into the outbox, and does not read it
  PREFIX_relay      "outbox-relay run", status
  PREFIX_consumer   consumers, and what their handlers publish
  PREFIX_endpoint   services with idempotency keys, and what their handlers publish
  PREFIX_operator   every command that looks, parked, dead, keys

They cannot log in. Make a role for each program a member:

  outbox-relay migrate roles | psql -v ON_ERROR_STOP=1
  outbox-relay migrate roles --prefix shop --apply
  psql -c 'CREATE ROLE relay_eu LOGIN PASSWORD …; GRANT effectonce_relay TO relay_eu'

It is one transaction and may be repeated at any time; do so after each "migrate up". Run it as the owner
of the tables, with CREATEROLE unless the roles are there. Roles belong to the whole cluster of databases:
give each database that shares it a prefix of its own.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			sql, err := migrations.Roles(s.options(), prefix)
			if err != nil {
				return err
			}
			sql = locks + sql + "\nCOMMIT;\n"
			if !apply {
				_, err = io.WriteString(cmd.OutOrStdout(), sql)
				return err
			}
			if prefix == "" {
				prefix = s.schema
			}
			return s.applyRoles(cmd.Context(), sql, prefixed{s.schema, prefix}, cmd.OutOrStdout(), asJSON)
		},
	}
	flags := cmd.Flags()
	addOption(flags, "prefix", "string", "", "how the names of the roles begin; default: the schema's name", func(text string) error {
		if _, err := migrations.Roles(migrations.Options{}, text); err != nil {
			return errors.New("want at most 49 lower-case letters, digits and underscores, not starting with a digit or pg_")
		}
		prefix = text
		return nil
	})
	addBool(flags, &apply, "apply", "apply it to the database")
	addJSON(cmd, &asJSON)
	commandLineOnly(flags, "apply")
	s.checks[cmd] = func() error {
		switch {
		case apply && s.pool == nil:
			return fmt.Errorf("--%s is missing: --apply needs it", flagDatabaseURL)
		case asJSON && !apply:
			return errors.New("--json: what is printed is SQL; give --apply, too")
		}
		return nil
	}
	return cmd
}

// prefixed is what "migrate roles --apply" prints.
type prefixed struct {
	Schema string `json:"schema"`
	Prefix string `json:"prefix"`
}

// applyRoles sends what would be printed, so that both do the same. The connection ends afterwards, and with it
// the transaction where a statement failed.
func (s *settings) applyRoles(ctx context.Context, sql string, p prefixed, out io.Writer, asJSON bool) error {
	conn, err := s.connectWriting(ctx)
	if err != nil {
		return err
	}
	defer hangUp(ctx, conn)
	if err := migrations.Check(ctx, conn, s.options()); err != nil {
		return err
	}
	if err := execAll(ctx, conn, sql); err != nil {
		return err
	}
	if asJSON {
		return printJSON(out, p)
	}
	roles := []string{p.Prefix + "_publisher", p.Prefix + "_relay", p.Prefix + "_consumer", p.Prefix + "_endpoint", p.Prefix + "_operator"}
	_, err = fmt.Fprintf(out, "schema %s: rights of %s\n", p.Schema, strings.Join(roles, ", "))
	return err
}

func execAll(ctx context.Context, conn *pgx.Conn, sql string) error {
	_, err := conn.PgConn().Exec(ctx, sql).ReadAll()
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "42501" {
		return fmt.Errorf("bring the roles (as the owner of the tables, with CREATEROLE unless the roles are there): %w", err)
	}
	if err != nil {
		return fmt.Errorf("bring the roles: %w", err)
	}
	return nil
}
