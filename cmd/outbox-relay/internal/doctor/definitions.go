package doctor

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/migrations"
)

// definition is an object of the schema that decides what its tables accept and what runs there.
type definition struct{ Kind, Name, Text string }

// releaseText has the digest, kind and name of each result of definitionsSQL after the migrations
// of this release. TestDefinitions writes it.
//
//go:embed definitions.txt
var releaseText string

// digest is the SHA-256 of the text as the default schema has it. Functions have the schema's name
// as the migrations wrote it, in quotes; elsewhere PostgreSQL prints quotes only where it has to. (A
// schema that is called as an alias in a view, such as p, looks changed.)
func (d definition) digest(schema string) string {
	const plain = migrations.DefaultSchema + "."
	text := strings.ReplaceAll(d.Text, `"`+schema+`".`, plain)
	if d.Kind != "body" {
		text = regexp.MustCompile(`(^|[^\w."])`+regexp.QuoteMeta(schema)+`\.`).ReplaceAllString(text, "${1}"+plain)
	}
	return fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
}

const definitionsShown = 5

// Definitions compares functions, triggers, constraints, columns, views, policies and indexes with
// those of this release. It also looks for objects that no release made: they would run with the
// rights of every role that uses the tables. Additional indexes that are not unique are allowed.
func Definitions(ctx context.Context, db operator.Querier, schema string) []Finding {
	const check = "definitions"
	state, err := migrations.Status(ctx, db, migrations.Options{Schema: schema})
	if err != nil {
		return broken(check, err)
	}
	if state.Current != state.Latest {
		return []Finding{ok(check, "not compared: the schema has version %d, this program knows the definitions of version %d", state.Current, state.Latest)}
	}
	stored, owner, err := readDefinitions(ctx, db, schema)
	if err != nil {
		return broken(check, err)
	}
	wrong, unknown := compareDefinitions(stored, schema)
	strangers, err := operator.Rows(ctx, db, "read owners", schema, strangeOwnersSQL, pgx.RowTo[string], schema)
	if err != nil {
		return broken(check, err)
	}
	const remedy = `find out who changed it; docs/security.md, "Definitions", says how to compare them and how to restore the release's`
	var found []Finding
	if len(wrong) > 0 {
		found = append(found, fail(check, remedy, "differs from this release: %s", some(wrong)))
	}
	if len(strangers) > 0 {
		found = append(found, fail(check, "ALTER … OWNER TO the owner of the schema, once you know what it is and which role made it", "not owned by the schema's owner %s: %s", owner, some(strangers)))
	}
	if len(unknown) > 0 {
		found = append(found, warn(check, remedy, "not from any release, and may run with the rights of every role that uses the tables: %s", some(unknown)))
	}
	return orElse(found, ok(check, "%d definitions match this release; role %s owns them", len(stored), owner))
}

func some(names []string) string {
	if more := len(names) - definitionsShown; more > 0 {
		names = append(names[:definitionsShown:definitionsShown], fmt.Sprintf("and %d more", more))
	}
	return terminal.Clip(strings.Join(names, ", "), 300)
}

func readDefinitions(ctx context.Context, db operator.Querier, schema string) (stored []definition, owner string, err error) {
	if err := db.QueryRow(ctx, schemaOwnerSQL, schema).Scan(&owner); err != nil {
		return nil, "", err
	}
	stored, err = operator.Rows(ctx, db, "read definitions", schema, definitionsSQL, pgx.RowToStructByPos[definition], schema)
	return stored, owner, err
}

// harmless reports whether a definition may exist besides those of the release: an index, or a
// policy that limits the topics of a publisher (docs/how-to/secure.md) and runs no function.
func (d definition) harmless() bool {
	switch d.Kind {
	case "index":
		return !strings.HasPrefix(d.Text, "CREATE UNIQUE ")
	case "policy":
		limits := strings.HasSuffix(d.Name, " on outbox") || strings.HasSuffix(d.Name, " on outbox_scheduled") && strings.HasPrefix(d.Text, "a false ")
		return limits && !call.MatchString(d.Text)
	}
	return false
}

// call matches a function's call, and an operator outside of pg_catalog, in an expression.
var call = regexp.MustCompile(`[\w"]\(`)

// topicsLimited is what the text of the relation outbox ends with if its owner limits publishers.
const topicsLimited = " ROW LEVEL SECURITY"

var outboxRelation = [2]string{"relation", "outbox"} //nolint:gochecknoglobals // only read

func compareDefinitions(stored []definition, schema string) (wrong, unknown []string) {
	left := map[[2]string]definition{}
	for _, d := range stored {
		left[[2]string{d.Kind, d.Name}] = d
	}
	for line := range strings.Lines(releaseText) {
		digest, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		kind, name, _ := strings.Cut(rest, " ")
		place := [2]string{kind, name}
		d, there := left[place]
		switch {
		case !there:
			wrong = append(wrong, fmt.Sprintf("%s %s is missing", kind, name))
		case d.digest(schema) != digest && (place != outboxRelation || definition{d.Kind, d.Name, strings.TrimSuffix(d.Text, topicsLimited)}.digest(schema) != digest):
			wrong = append(wrong, fmt.Sprintf("%s %s", kind, name))
		}
		delete(left, place)
	}
	for _, d := range stored {
		if _, extra := left[[2]string{d.Kind, d.Name}]; extra && !d.harmless() {
			unknown = append(unknown, fmt.Sprintf("%s %s", d.Kind, d.Name))
		}
	}
	return wrong, unknown
}

const schemaOwnerSQL = `-- doctor.schema_owner
SELECT pg_get_userbyid(nspowner)::text FROM pg_namespace WHERE nspname = $1::text`

// strangeOwnersSQL ignores superusers: they can do everything anyway.
const strangeOwnersSQL = `-- doctor.strange_owners
SELECT pg_catalog.format('%s (%s)', o.name, r.rolname) FROM pg_namespace n
JOIN LATERAL (SELECT 'relation ' || c.relname::text AS name, c.relowner AS owner FROM pg_class c WHERE c.relnamespace = n.oid
  UNION ALL SELECT 'function ' || p.proname::text, p.proowner FROM pg_proc p WHERE p.pronamespace = n.oid
  UNION ALL SELECT 'type ' || t.typname::text, t.typowner FROM pg_type t WHERE t.typnamespace = n.oid AND t.typrelid = 0::oid AND t.typelem = 0::oid
  UNION ALL SELECT 'operator ' || o.oprname::text, o.oprowner FROM pg_operator o WHERE o.oprnamespace = n.oid) o ON o.owner <> n.nspowner
JOIN pg_roles r ON r.oid = o.owner
WHERE n.nspname = $1::text AND NOT r.rolsuper ORDER BY 1`

// definitionsSQL leaves out partitions of claims, which come and go each day, but not what was
// attached to them.
const definitionsSQL = `-- doctor.definitions
-- Partitions have an identity of their own from PostgreSQL 17 on.
WITH space AS (SELECT n.oid FROM pg_namespace n WHERE n.nspname = $1::text),
relations AS (SELECT c.oid, c.relname, c.relkind, c.relrowsecurity, c.relforcerowsecurity, c.relpersistence, i.inhparent IS NOT NULL AS part, i.inhparent IS NULL OR p.relname <> 'processed_messages'::name AS lasts
  FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class p ON p.oid = i.inhparent
  WHERE c.relnamespace = (SELECT s.oid FROM space s) AND c.relkind NOT IN ('i'::"char", 'I'::"char", 'c'::"char")),
found AS (
  SELECT 'relation' AS kind, r.relname::text AS name, pg_catalog.concat_ws(' ', r.relkind::text, r.relpersistence::text,
    CASE WHEN r.relrowsecurity THEN 'ROW LEVEL SECURITY' END, CASE WHEN r.relforcerowsecurity THEN 'FORCE' END) AS text FROM relations r WHERE r.lasts
  UNION ALL
  SELECT 'column', r.relname::text || '.' || a.attname::text, pg_catalog.concat_ws(' ', format_type(a.atttypid, a.atttypmod), CASE WHEN a.attnotnull THEN 'NOT NULL' END,
      'DEFAULT ' || pg_get_expr(d.adbin, d.adrelid), CASE WHEN r.part THEN NULL ELSE nullif(a.attidentity::text, '') END, nullif(a.attgenerated::text, ''), 'COLLATE ' || (SELECT l.collname::text FROM pg_collation l WHERE l.oid = a.attcollation AND l.collname <> 'default'::name))
    FROM relations r JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
    WHERE r.lasts AND r.relkind <> 'S'::"char"
  UNION ALL
  SELECT 'constraint', r.relname::text || '.' || c.conname::text, pg_catalog.replace(pg_get_constraintdef(c.oid), ' NOT VALID', '') FROM relations r JOIN pg_constraint c ON c.conrelid = r.oid WHERE r.lasts AND c.contype NOT IN ('n'::"char", 't'::"char")
  UNION ALL
  SELECT 'index', x.relname::text, pg_get_indexdef(i.indexrelid) || CASE WHEN i.indisvalid THEN '' ELSE ' INVALID' END
    FROM relations r JOIN pg_index i ON i.indrelid = r.oid JOIN pg_class x ON x.oid = i.indexrelid WHERE r.lasts
  UNION ALL
  SELECT 'view', r.relname::text, pg_get_viewdef(r.oid) FROM relations r WHERE r.relkind IN ('v'::"char", 'm'::"char")
  UNION ALL
  SELECT 'trigger', t.tgname::text || ' on ' || r.relname::text, pg_get_triggerdef(t.oid) || CASE t.tgenabled WHEN 'O'::"char" THEN '' WHEN 'D'::"char" THEN ' DISABLED' ELSE ' ENABLED ' || t.tgenabled::text END
    FROM relations r JOIN pg_trigger t ON t.tgrelid = r.oid WHERE NOT t.tgisinternal
  UNION ALL
  SELECT 'rule', w.rulename::text || ' on ' || r.relname::text, pg_get_ruledef(w.oid) FROM relations r JOIN pg_rewrite w ON w.ev_class = r.oid WHERE w.rulename <> '_RETURN'::name
  UNION ALL
  SELECT 'policy', p.polname::text || ' on ' || r.relname::text, pg_catalog.concat_ws(' ', p.polcmd::text, p.polpermissive::text,
      ARRAY(SELECT CASE u.role WHEN 0::oid THEN 'public' ELSE pg_get_userbyid(u.role)::text END FROM pg_catalog.unnest(p.polroles) AS u (role) ORDER BY 1)::text,
      'USING ' || pg_get_expr(p.polqual, p.polrelid), 'WITH CHECK ' || pg_get_expr(p.polwithcheck, p.polrelid)) FROM relations r JOIN pg_policy p ON p.polrelid = r.oid
  UNION ALL
  SELECT 'function', f.name, pg_catalog.concat_ws(' ', f.prokind::text, pg_get_function_arguments(f.oid), 'RETURNS', pg_get_function_result(f.oid), l.lanname,
      f.provolatile::text, CASE WHEN f.proisstrict THEN 'STRICT' END, CASE WHEN f.prosecdef THEN 'SECURITY DEFINER' END, f.proparallel::text, f.proconfig::text)
    FROM (SELECT *, p.proname::text || '(' || pg_get_function_identity_arguments(p.oid) || ')' AS name FROM pg_proc p WHERE p.pronamespace = (SELECT s.oid FROM space s)) f JOIN pg_language l ON l.oid = f.prolang
  UNION ALL
  SELECT 'body', p.proname::text || '(' || pg_get_function_identity_arguments(p.oid) || ')', coalesce(pg_get_function_sqlbody(p.oid), p.prosrc) FROM pg_proc p WHERE p.pronamespace = (SELECT s.oid FROM space s)
  UNION ALL
  SELECT 'type', t.typname::text, pg_catalog.concat_ws(' ', t.typtype::text, format_type(t.typbasetype, t.typtypmod), CASE WHEN t.typnotnull THEN 'NOT NULL' END, 'DEFAULT ' || t.typdefault,
      (SELECT pg_catalog.string_agg(pg_get_constraintdef(c.oid), ' ' ORDER BY c.conname) FROM pg_constraint c WHERE c.contypid = t.oid AND c.contype = 'c'::"char"))
    FROM pg_type t WHERE t.typnamespace = (SELECT s.oid FROM space s) AND t.typrelid = 0::oid AND t.typelem = 0::oid
  UNION ALL
  SELECT 'operator', o.oprname::text || ' (' || format_type(o.oprleft, NULL::int4) || ', ' || format_type(o.oprright, NULL::int4) || ')', o.oprcode::text FROM pg_operator o WHERE o.oprnamespace = (SELECT s.oid FROM space s)
)
SELECT f.kind, f.name, f.text FROM found f ORDER BY f.kind COLLATE "C", f.name COLLATE "C"`
