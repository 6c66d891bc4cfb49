package migrations

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// ErrNotOurs is returned by Up, To and CheckOwner: the schema, or something in it, belongs to a
// role that is neither the current one nor a superuser, another role may create objects in it, a
// trigger, rule, default, check, index or policy of a table uses a function, operator or type of
// such a role, or the schema contains objects before the first migration. Nor may the version
// tables have triggers, rules or policies, or be anything but ordinary tables. Such objects run
// with the rights of the role that migrates. The check reads only the catalog, and nothing runs
// after it. Migrations that succeeded before it stay. Remedy: migrate as the owner of the schema
// ("role=OWNER" in the database URL does so), or review the objects, and then change their owner,
// or drop them.
//
// Status and Check, which roles without rights may call, do not look at owners. They return it if
// the version tables are not ordinary tables, or have row security.
var ErrNotOurs = errors.New("schema is not trusted")

const strangersMax = 5

// strangersSQL lists the objects that cannot be trusted. Trusted are the current role, superusers,
// who can do everything anyway, and the owner of the database if it is one of these. Membership
// does not count: a superuser is a member of every role. It reads only the catalog, since a view in
// place of a table would run its owner's functions. Which objects a migration makes is not compared
// by name, except at version 0, where only the version table may exist: later, any object of a
// trusted role is accepted.
//
// A migration writes to tables, and so runs their triggers, rules, defaults, checks, index
// expressions and policies. A role with the right TRIGGER on a table can add a trigger. The parts
// of the schema's tables are listed if they use a function, operator or type of another role. A
// function of a trusted role that itself calls such a function is not seen.
const strangersSQL = `-- migrations.strangers
WITH trusted AS (
  SELECT r.oid FROM pg_roles r WHERE r.rolsuper OR r.rolname = current_user
  UNION ALL
  SELECT r.oid FROM pg_roles r, pg_database d, pg_roles o
  WHERE r.rolname = 'pg_database_owner' AND d.datname = current_database() AND o.oid = d.datdba AND (o.rolsuper OR o.rolname = current_user)
), space AS (SELECT n.oid, n.nspowner, n.nspacl FROM pg_namespace n WHERE n.nspname = $1::text),
objects AS (
  SELECT 1 AS place, 'the schema' AS what, s.nspowner AS owner, true AS made FROM space s
  UNION ALL
  SELECT 2, 'relation ' || pg_catalog.quote_ident(c.relname), c.relowner, c.relname IN ('schema_version') FROM pg_class c, space s WHERE c.relnamespace = s.oid AND c.relkind <> 'i' AND c.relkind <> 'I'
  UNION ALL
  SELECT 3, 'function ' || pg_catalog.quote_ident(p.proname), p.proowner, false FROM pg_proc p, space s WHERE p.pronamespace = s.oid
  UNION ALL
  SELECT 4, 'type ' || pg_catalog.quote_ident(t.typname), t.typowner, t.typrelid <> 0 OR t.typelem <> 0 FROM pg_type t, space s WHERE t.typnamespace = s.oid
  UNION ALL
  SELECT 5, 'operator ' || o.oprname, o.oprowner, false FROM pg_operator o, space s WHERE o.oprnamespace = s.oid
), relations AS (SELECT c.oid FROM pg_class c, space s WHERE c.relnamespace = s.oid),
parts AS (
  SELECT 'pg_class'::regclass AS class, r.oid FROM relations r
  UNION ALL SELECT 'pg_trigger'::regclass, t.oid FROM pg_trigger t WHERE t.tgrelid IN (SELECT r.oid FROM relations r)
  UNION ALL SELECT 'pg_rewrite'::regclass, w.oid FROM pg_rewrite w WHERE w.ev_class IN (SELECT r.oid FROM relations r)
  UNION ALL SELECT 'pg_policy'::regclass, p.oid FROM pg_policy p WHERE p.polrelid IN (SELECT r.oid FROM relations r)
  UNION ALL SELECT 'pg_attrdef'::regclass, a.oid FROM pg_attrdef a WHERE a.adrelid IN (SELECT r.oid FROM relations r)
  UNION ALL SELECT 'pg_constraint'::regclass, k.oid FROM pg_constraint k, space s WHERE k.connamespace = s.oid
  UNION ALL SELECT 'pg_proc'::regclass, p.oid FROM pg_proc p, space s WHERE p.pronamespace = s.oid
)
SELECT found.text FROM (
  SELECT o.place, pg_catalog.format('%s belongs to role %s', o.what, pg_get_userbyid(o.owner)) AS text FROM objects o WHERE o.owner NOT IN (SELECT t.oid FROM trusted t)
  UNION ALL
  SELECT o.place, pg_catalog.format('%s is there, and no migration has made it', o.what) FROM objects o WHERE NOT o.made AND $2::int4 = 0
  UNION ALL
  SELECT 6, pg_catalog.format('relation %s is no ordinary table', c.relname)
  FROM space s JOIN pg_class c ON c.relnamespace = s.oid AND c.relname IN ('schema_version', 'schema_compatibility') AND c.relkind <> 'r'
  UNION ALL
  SELECT 6, pg_catalog.format('%s %s is on table %s', extra.kind, pg_catalog.quote_ident(extra.name), c.relname)
  FROM space s JOIN pg_class c ON c.relnamespace = s.oid AND c.relname IN ('schema_version', 'schema_compatibility') CROSS JOIN LATERAL (
    SELECT 'trigger' AS kind, t.tgname AS name FROM pg_trigger t WHERE t.tgrelid = c.oid
    UNION ALL SELECT 'rule', r.rulename FROM pg_rewrite r WHERE r.ev_class = c.oid
    UNION ALL SELECT 'policy', p.polname FROM pg_policy p WHERE p.polrelid = c.oid) extra
  UNION ALL
  SELECT 7, pg_catalog.format('%s may create objects in it', CASE a.grantee WHEN 0 THEN 'everybody' ELSE 'role ' || pg_get_userbyid(a.grantee) END)
  FROM space s CROSS JOIN LATERAL aclexplode(s.nspacl) a
  WHERE a.privilege_type = 'CREATE' AND a.grantee <> s.nspowner AND a.grantee NOT IN (SELECT t.oid FROM trusted t)
  UNION
  SELECT 8, pg_catalog.format('%s uses %s of role %s', pg_describe_object(d.classid, d.objid, 0), pg_describe_object(d.refclassid, d.refobjid, 0), pg_get_userbyid(used.owner))
  FROM parts JOIN pg_depend d ON d.classid = parts.class AND d.objid = parts.oid CROSS JOIN LATERAL (
    SELECT p.proowner AS owner FROM pg_proc p WHERE d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
    UNION ALL SELECT o.oprowner FROM pg_operator o WHERE d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
    UNION ALL SELECT p.proowner FROM pg_operator o JOIN pg_proc p ON p.oid = o.oprcode WHERE d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
    UNION ALL SELECT t.typowner FROM pg_type t WHERE d.refclassid = 'pg_type'::regclass AND t.oid = d.refobjid
    UNION ALL SELECT c.relowner FROM pg_class c WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass AND c.oid = d.refobjid) used
  WHERE used.owner NOT IN (SELECT t.oid FROM trusted t)
) found ORDER BY found.place, found.text`

// queries is a connection or a transaction.
type queries interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// trusted returns ErrNotOurs with a list of the problems. version is that of the schema; at 0 only
// the version table may exist. The caller has set a safe search path.
func trusted(ctx context.Context, db queries, schema string, version int) error {
	rows, err := db.Query(ctx, strangersSQL, schema, version)
	if err != nil {
		return fmt.Errorf("check the owners in schema %s: %w", schema, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("check the owners in schema %s: %w", schema, err)
	}
	if len(found) == 0 {
		return nil
	}
	if more := len(found) - strangersMax; more > 0 {
		found = append(found[:strangersMax], fmt.Sprintf("and %d more", more))
	}
	return fmt.Errorf("%w: schema %s: %s. Such objects would run with the rights of this role. Connect as the owner (role=OWNER in the URL), "+
		"or review these objects, and then transfer them to this role (ALTER … OWNER TO, REVOKE CREATE ON SCHEMA, REVOKE TRIGGER ON TABLE) or drop them", ErrNotOurs, schema, strings.Join(found, "; "))
}

// CheckOwner returns ErrNotOurs if a statement of conn's role that changes the schema could run
// code of another role. Up and To do this check themselves. It restores the connection's search
// path.
func CheckOwner(ctx context.Context, conn *pgx.Conn, opts Options) error {
	schema, err := opts.Resolve()
	if err != nil {
		return err
	}
	restore, err := safePath(ctx, conn)
	if err != nil {
		return err
	}
	defer restore()
	return trusted(ctx, conn, schema, -1)
}
