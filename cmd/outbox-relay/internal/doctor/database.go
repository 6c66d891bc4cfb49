package doctor

import (
	"cmp"
	"context"
	"errors"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// Server versions that are tested. Newer ones probably work.
const versionMin, versionMax = 140_000, 190_000

// Server checks the server's version, and that it accepts writes.
func Server(ctx context.Context, db operator.Querier) []Finding {
	var number int
	var version string
	var standby, readOnly bool
	if err := db.QueryRow(ctx, serverSQL).Scan(&number, &version, &standby, &readOnly); err != nil {
		return broken("server", err)
	}
	var found []Finding
	switch {
	case number < versionMin:
		found = append(found, fail("server", "upgrade to PostgreSQL 14 or later", "PostgreSQL %s is too old", version))
	case number >= versionMax:
		found = append(found, warn("server", "run the tests of this release against it before you rely on it", "PostgreSQL %s is newer than what was tested (14 to 18)", version))
	default:
		found = append(found, ok("server", "PostgreSQL %s", version))
	}
	switch {
	case standby:
		found = append(found, fail("writable", "use the primary in the database URL", "the database is a standby"))
	case readOnly:
		found = append(found, fail("writable", "ALTER DATABASE … or ALTER ROLE … RESET default_transaction_read_only", "transactions are read-only (default_transaction_read_only is on)"))
	default:
		found = append(found, ok("writable", "the database is a primary and accepts writes"))
	}
	return found
}

// Durability checks that a commit survives a crash: exactly-once depends on it.
func Durability(ctx context.Context, db operator.Querier) []Finding {
	var fsync, fullPages bool
	var commit string
	if err := db.QueryRow(ctx, durabilitySQL).Scan(&fsync, &fullPages, &commit); err != nil {
		return broken("durability", err)
	}
	var found []Finding
	if !fsync || !fullPages {
		found = append(found, fail("durability", "set fsync and full_page_writes to on and restart PostgreSQL (off is only for databases whose data may be lost)",
			"fsync is %s, full_page_writes is %s: a crash of the machine may lose or corrupt committed data", onOff(fsync), onOff(fullPages)))
	}
	if commit == "off" {
		found = append(found, warn("durability", "set synchronous_commit to on for the roles that publish and consume",
			"synchronous_commit is off: a crash may lose the last commits, each with its effects and claims"))
	}
	return orElse(found, ok("durability", "fsync is on, synchronous_commit is %s", commit))
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// Schema checks that this program works with the tables.
func Schema(ctx context.Context, db operator.Querier, schema string) []Finding {
	opts := migrations.Options{Schema: schema}
	err := migrations.Check(ctx, db, opts)
	switch {
	case errors.Is(err, migrations.ErrTooOld):
		return []Finding{fail("schema", "outbox-relay migrate up && outbox-relay migrate roles --apply   # as the owner of the tables", "%v", err)}
	case errors.Is(err, migrations.ErrTooNew):
		return []Finding{fail("schema", "update this program", "%v", err)}
	case err != nil:
		return broken("schema", err)
	}
	state, err := migrations.Status(ctx, db, opts)
	if err != nil {
		return broken("schema", err)
	}
	if state.Compatible() {
		return []Finding{warn("schema", "update this program when you can", "schema %s has version %d, this program knows %d and works with it",
			schema, state.Current, state.Latest)}
	}
	return []Finding{ok("schema", "schema %s has version %d", schema, state.Current)}
}

// right is one right that a role needs.
type right struct{ kind, name, privilege, columns string }

// The parts of a GRANT of the roles' SQL: privileges, kind of object, objects, roles; a privilege with
// its columns; an object.
var (
	grantOf     = regexp.MustCompile(`(?ms)^GRANT (.+?) ON (SCHEMA|SEQUENCE|FUNCTION)? ?(.+?) TO ([^;]+);`)
	privilegeOf = regexp.MustCompile(`([A-Z]+)(?: \(([^)]+)\))?`)
	objectOf    = regexp.MustCompile(migrations.DefaultSchema + `\.(\w+)`)
)

// roleRights returns the rights of a group role, from the SQL that grants them.
func roleRights(schema, part string) (all []right, err error) {
	sql, err := migrations.Roles(migrations.Options{}, "")
	for _, grant := range grantOf.FindAllStringSubmatch(sql, -1) {
		if !strings.Contains(grant[4], "_"+part) {
			continue
		}
		objects := objectOf.FindAllStringSubmatch(grant[3], -1)
		if grant[2] == "SCHEMA" {
			objects = [][]string{{"", schema}}
		}
		for _, object := range objects {
			for _, p := range privilegeOf.FindAllStringSubmatch(grant[1], -1) {
				all = append(all, right{cmp.Or(strings.ToLower(grant[2]), "table"), object[1], p[1], strings.Join(strings.Fields(strings.ReplaceAll(p[2], ",", " ")), " ")})
			}
		}
	}
	return all, err
}

// Rights checks what the connected role may do. It returns no finding if the schema does not exist.
func Rights(ctx context.Context, db operator.Querier, schema string) []Finding {
	var exists bool
	if err := db.QueryRow(ctx, schemaExistsSQL, schema).Scan(&exists); err != nil {
		return broken("rights", err)
	}
	if !exists {
		return nil
	}
	relay, err := grants(ctx, db, schema, "relay")
	operators, operatorErr := grants(ctx, db, schema, "operator")
	if err := errors.Join(err, operatorErr); err != nil {
		return broken("rights", err)
	}
	switch {
	case len(relay) > 0 && len(operators) == 0:
		return []Finding{ok("rights", "the role is an operator's: it may read everything and act on what waits; it may not relay")}
	case len(relay) > 0:
		return []Finding{fail("rights", "as the owner of the schema: "+strings.Join(relay, "; "), "the role lacks rights that the relay needs")}
	case len(operators) > 0:
		// A relay's role should not have them.
		return []Finding{ok("rights", "the role may relay; an operator's role also needs, for \"outbox-relay parked\" and similar commands: %s", strings.Join(operators, "; "))}
	}
	return []Finding{ok("rights", "the role has every right that it needs")}
}

// grants returns the statements that would grant the rights of a group role that the role lacks.
func grants(ctx context.Context, db operator.Querier, schema, part string) ([]string, error) {
	needed, err := roleRights(schema, part)
	if err != nil {
		return nil, err
	}
	var kinds, names, privileges, columns []string
	for _, r := range needed {
		kinds, names, privileges, columns = append(kinds, r.kind), append(names, r.name), append(privileges, r.privilege), append(columns, r.columns)
	}
	return operator.Rows(ctx, db, "compare rights", schema, rightsSQL, pgx.RowTo[string], schema, kinds, names, privileges, columns)
}

// Sequence checks that seq is assigned in order. With a cache each session would have its own
// range.
func Sequence(ctx context.Context, db operator.Querier, schema string) []Finding {
	var cache int64
	if err := db.QueryRow(ctx, inSchema(sequenceSQL, schema)).Scan(&cache); err != nil {
		return broken("sequence", err)
	}
	if cache != 1 {
		return []Finding{fail("sequence", "ALTER SEQUENCE "+pgx.Identifier{schema, "outbox_seq_seq"}.Sanitize()+" CACHE 1",
			"outbox.seq has a sequence cache of %d: messages of a key may be published out of order", cache)}
	}
	return []Finding{ok("sequence", "outbox.seq is handed out in order")}
}
