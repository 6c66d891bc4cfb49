package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

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
	var apply, asJSON bool
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

Existing roles keep their members and their LOGIN attribute; --apply reports both. It refuses a role that is
SUPERUSER, CREATEROLE, BYPASSRLS or REPLICATION, that owns the schema, or that is a member of such a role: its
members would gain those rights.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			sql, err := migrations.Roles(migrations.Options{Schema: s.Schema}, prefix)
			if err != nil {
				return err
			}
			sql = begin + sql + "\nCOMMIT;\n"
			if !apply {
				_, err = io.WriteString(cmd.OutOrStdout(), sql)
				return err
			}
			if prefix == "" {
				prefix = s.Schema
			}
			return applyRoles(cmd.Context(), s, sql, prefixed{Schema: s.Schema, Prefix: prefix}, cmd.OutOrStdout(), asJSON)
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
	cli.AddJSON(cmd, &asJSON)
	cli.CommandLineOnly(flags, "apply")
	s.Check(cmd, func() error {
		switch {
		case apply && !s.HasDatabase():
			return fmt.Errorf("--%s is missing: --apply needs it", cli.FlagDatabaseURL)
		case asJSON && !apply:
			return errors.New("--json: without --apply the output is SQL; give --apply too")
		}
		return nil
	})
	return cmd
}

// prefixed is what "migrate roles --apply" prints.
type prefixed struct {
	Schema string      `json:"schema"`
	Prefix string      `json:"prefix"`
	Roles  []groupRole `json:"roles"`
}

func (p *prefixed) print(out io.Writer, names []string) error {
	text := terminal.Fill("schema %s: rights of %s\n", p.Schema, strings.Join(names, ", "))
	for _, r := range p.Roles {
		if r.worthSaying() {
			text += r.String() + "\n"
		}
	}
	_, err := io.WriteString(out, text)
	return err
}

// applyRoles sends the SQL that would be printed, so that both do the same. If a statement fails,
// closing the connection ends the transaction. applyRoles lists existing roles before, and reads
// attributes after, so the report also covers a role that another session creates in between.
func applyRoles(ctx context.Context, s *cli.Settings, sql string, p prefixed, out io.Writer, asJSON bool) error {
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
	names := []string{p.Prefix + "_publisher", p.Prefix + "_relay", p.Prefix + "_consumer", p.Prefix + "_endpoint", p.Prefix + "_operator"}
	before, err := readGroupRoles(ctx, conn, names)
	if err != nil {
		return err
	}
	if err := execAll(ctx, conn, sql); err != nil {
		return err
	}
	if p.Roles, err = readGroupRoles(ctx, conn, names); err != nil {
		return err
	}
	adopt(p.Roles, before)
	if asJSON {
		return terminal.PrintJSON(out, p)
	}
	return p.print(out, names)
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

// groupRolesSQL reads the roles of $1 that exist, in the order of $1. From PostgreSQL 16 on, a role
// that creates another one without being a superuser becomes a member of it: one that may grant the
// role, but does not inherit its rights and cannot SET ROLE to it. That is grants_only.
const groupRolesSQL = `-- outbox-relay.group_roles
WITH RECURSIVE membership AS (
  SELECT m.roleid, m.member, coalesce(pg_catalog.jsonb_extract_path_text(pg_catalog.to_jsonb(m), 'inherit_option')::bool, true)
    OR coalesce(pg_catalog.jsonb_extract_path_text(pg_catalog.to_jsonb(m), 'set_option')::bool, true) AS used
  FROM pg_catalog.pg_auth_members m
), wanted AS (
  SELECT r.oid, r.rolname, r.rolcanlogin, r.rolcreatedb, n.place
  FROM pg_catalog.unnest($1::name[]) WITH ORDINALITY AS n (name, place) JOIN pg_catalog.pg_roles r ON r.rolname = n.name
), below AS (
  SELECT w.oid AS top, m.member, m.used FROM wanted w JOIN membership m ON m.roleid = w.oid
  UNION
  SELECT b.top, m.member, m.used FROM below b JOIN membership m ON m.roleid = b.member WHERE b.used
), above AS (
  SELECT w.oid AS bottom, m.roleid FROM wanted w JOIN membership m ON m.member = w.oid WHERE m.used
  UNION
  SELECT a.bottom, m.roleid FROM above a JOIN membership m ON m.member = a.roleid WHERE m.used
), members AS (
  SELECT b.top, r.rolname, r.rolcanlogin, NOT pg_catalog.bool_or(b.used) AS grants_only
  FROM below b JOIN pg_catalog.pg_roles r ON r.oid = b.member GROUP BY b.top, r.rolname, r.rolcanlogin
)
SELECT w.rolname::text, w.rolcanlogin, w.rolcreatedb,
  ARRAY(SELECT r.rolname::text FROM above a JOIN pg_catalog.pg_roles r ON r.oid = a.roleid WHERE a.bottom = w.oid ORDER BY r.rolname),
  ARRAY(SELECT m.rolname::text FROM members m WHERE m.top = w.oid ORDER BY m.rolname),
  ARRAY(SELECT m.rolcanlogin FROM members m WHERE m.top = w.oid ORDER BY m.rolname),
  ARRAY(SELECT m.grants_only FROM members m WHERE m.top = w.oid ORDER BY m.rolname)
FROM wanted w ORDER BY w.place`

// groupRole is a role of "migrate roles", after they were applied.
type groupRole struct {
	Role     string        `json:"role"`
	Adopted  bool          `json:"adopted"` // it existed before
	CanLogIn bool          `json:"can_log_in"`
	CreateDB bool          `json:"create_db"`
	MemberOf []string      `json:"member_of"` // also indirectly, through other roles
	Members  []groupMember `json:"members"`   // also indirectly, through other roles
}

type groupMember struct {
	Role       string `json:"role"`
	CanLogIn   bool   `json:"can_log_in"`
	GrantsOnly bool   `json:"grants_only"` // it may add members, and has none of the role's rights
}

func readGroupRoles(ctx context.Context, conn *pgx.Conn, names []string) ([]groupRole, error) {
	rows, err := conn.Query(ctx, groupRolesSQL, names)
	if err != nil {
		return nil, fmt.Errorf("read the roles: %w", err)
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r groupRole, err error) {
		var members []string
		var logins, grantsOnly []bool
		if err := row.Scan(&r.Role, &r.CanLogIn, &r.CreateDB, &r.MemberOf, &members, &logins, &grantsOnly); err != nil {
			return r, err
		}
		r.Members = make([]groupMember, len(members))
		for i, name := range members {
			r.Members[i] = groupMember{name, logins[i], grantsOnly[i]}
		}
		return r, nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the roles: %w", err)
	}
	return found, nil
}

// adopt marks the roles that existed before.
func adopt(roles, before []groupRole) {
	for i := range roles {
		roles[i].Adopted = slices.ContainsFunc(before, func(b groupRole) bool { return b.Role == roles[i].Role })
	}
}

// worthSaying reports whether the role existed before, or got members while it was created.
func (r *groupRole) worthSaying() bool {
	return r.Adopted || r.CanLogIn || len(r.MemberOf) > 0 || slices.ContainsFunc(r.Members, func(m groupMember) bool { return !m.GrantsOnly })
}

func (r *groupRole) String() string {
	var text strings.Builder
	text.WriteString("role " + terminal.Plain(r.Role))
	if r.Adopted {
		text.WriteString(" existed before: it ")
	} else {
		text.WriteString(" is new: it ")
	}
	if r.CanLogIn {
		text.WriteString("can log in")
	} else {
		text.WriteString("cannot log in")
	}
	if r.CreateDB {
		text.WriteString(" and has CREATEDB")
	}
	text.WriteString("; members: ")
	for i, m := range r.Members {
		if i > 0 {
			text.WriteString(", ")
		}
		text.WriteString(terminal.Plain(m.Role))
		switch {
		case m.GrantsOnly:
			text.WriteString(" (may only grant it)")
		case m.CanLogIn:
			text.WriteString(" (can log in)")
		}
	}
	if len(r.Members) == 0 {
		text.WriteString("none")
	}
	for i, name := range r.MemberOf {
		if i == 0 {
			text.WriteString("; it is a member of ")
		} else {
			text.WriteString(", ")
		}
		text.WriteString(terminal.Plain(name))
	}
	return text.String()
}
