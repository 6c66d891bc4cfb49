package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

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
