package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
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
	if err := db.QueryRow(ctx, migrations.InSchema(sequenceSQL, schema)).Scan(&cache); err != nil {
		return broken("sequence", err)
	}
	if cache != 1 {
		return []Finding{fail("sequence", "ALTER SEQUENCE "+pgx.Identifier{schema, "outbox_seq_seq"}.Sanitize()+" CACHE 1",
			"outbox.seq has a sequence cache of %d: messages of a key may be published out of order", cache)}
	}
	return []Finding{ok("sequence", "outbox.seq is handed out in order")}
}

// Limits on what blocks others. Transactions that write to an outbox are short; a busy server
// starts xminAgeMax transactions within hours.
const (
	openMax    = 10 * time.Minute
	xminAgeMax = 10_000_000
)

// OpenTransactions finds transactions that have been open for too long. Those that write keep the
// relay's floor and their slot of the outbox; all of them keep vacuum from removing dead rows.
func OpenTransactions(ctx context.Context, db operator.Querier) []Finding {
	const check = "transactions"
	var found []Finding
	oldest := ""
	var what, remedy string
	var seconds float64
	var writes bool
	err := operator.Each(ctx, db, "read open transactions", migrations.DefaultSchema, openSQL, nil, []any{&what, &remedy, &seconds, &writes}, func() error {
		open := age(seconds)
		if oldest == "" && writes {
			oldest = fmt.Sprintf("the oldest transaction that writes has been open for %s: %s; it does not stall the relay, but rows above its floor are kept", human.Duration(open), what)
		}
		switch {
		case open < openMax:
		case writes:
			found = append(found, warn(check, remedy, "%s has written and has been open for %v: its rows are not published before it commits, its slot of the outbox is not truncated, and vacuum removes no row that died since", what, open))
		default:
			found = append(found, warn(check, remedy, "%s has held a snapshot for %v: vacuum removes no row that died since, and slots of the outbox that it has read (as pg_dump does) are not truncated", what, open))
		}
		return nil
	})
	switch {
	case err != nil:
		return broken(check, err)
	case len(found) > 0:
		return found
	case oldest != "":
		return []Finding{ok(check, "%s", oldest)}
	}
	return []Finding{ok(check, "no open transaction that writes (as far as this role may see)")}
}

// ReplicationSlots finds slots that no process reads, or whose reader is far behind. They keep dead
// rows and, indefinitely, WAL.
func ReplicationSlots(ctx context.Context, db operator.Querier) []Finding {
	const check = "replication"
	var found []Finding
	var what, remedy string
	var active bool
	var behind, wal int64
	err := operator.Each(ctx, db, "read what holds dead rows back", migrations.DefaultSchema, holdersSQL, nil, []any{&what, &remedy, &active, &behind, &wal}, func() error {
		switch {
		case !active:
			found = append(found, warn(check, remedy, "no process reads %s: it keeps the dead rows of the last %s and %d MiB of WAL", what, human.Count(behind, "transaction"), wal>>20))
		case behind > xminAgeMax:
			found = append(found, warn(check, remedy, "%s is %s behind: vacuum keeps dead rows for it", what, human.Count(behind, "transaction")))
		}
		return nil
	})
	if err != nil {
		return broken(check, err)
	}
	return orElse(found, ok(check, "no replication slot and no standby holds dead rows back"))
}

// Pooler finds out what is between this program and PostgreSQL. A pooler gives its clients cancel
// keys of its own, so the process ID that the client was given is not the one of the backend that
// answers. connect opens a connection of its own, because a pooler in statement mode closes the
// connection at the first BEGIN.
func Pooler(ctx context.Context, connect func(context.Context) (*pgx.Conn, error)) []Finding {
	const check = "pooler"
	conn, err := connect(ctx)
	if err != nil {
		return broken(check, cmp.Or(ctx.Err(), err))
	}
	defer cli.HangUp(ctx, conn)
	first, transactions, err := askBackend(ctx, conn)
	switch {
	case err != nil:
		return broken(check, err)
	case !transactions:
		return []Finding{fail(check, "in pgbouncer.ini: pool_mode = transaction   # for this database and user; then RELOAD",
			"the connection goes through a pooler in statement mode: nothing here works without transactions")}
	case first == conn.PgConn().PID():
		return []Finding{ok(check, "the connection goes to PostgreSQL directly")}
	}
	return []Finding{ok(check, "the connection goes through a pooler; the relay works with it, \"outbox-relay migrate\" needs a direct connection to PostgreSQL: see docs/how-to/pgbouncer.md")}
}

// askBackend returns the PID of the backend that answers in a transaction, and whether transactions
// are possible.
func askBackend(ctx context.Context, conn *pgx.Conn) (pid uint32, transactions bool, err error) {
	tx, err := conn.Begin(ctx)
	var refused *pgconn.PgError
	if errors.As(err, &refused) && strings.Contains(refused.Message, "statement pooling") {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("begin a transaction: %w", err)
	}
	if err := tx.QueryRow(ctx, backendSQL).Scan(&pid); err != nil {
		return 0, false, fmt.Errorf("ask for the backend's PID: %w", err)
	}
	return pid, true, tx.Rollback(ctx)
}
