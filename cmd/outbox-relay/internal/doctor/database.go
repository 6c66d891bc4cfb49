package doctor

import (
	"context"
	"errors"
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
	if len(found) == 0 {
		found = append(found, ok("durability", "fsync is on, synchronous_commit is %s", commit))
	}
	return found
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

// right is one right that a role needs. If a privilege is limited to some columns, they follow it
// in parentheses: SELECT(one two).
type right struct{ kind, name, privileges string }

// relayRights is all that the relay's role needs. The role that publishes needs USAGE on the schema
// and INSERT on outbox. migrations/roles.sql grants the same, and what statusRights lists.
func relayRights(schema string) []right {
	return []right{
		{"schema", schema, "USAGE"},
		{"table", "schema_version", "SELECT"},
		{"table", "schema_compatibility", "SELECT"},
		{"table", "outbox", "SELECT,INSERT,UPDATE"}, // UPDATE: after a restore into another cluster; INSERT: messages for later
		{"sequence", "outbox_seq_seq", "SELECT"},
		{"sequence", "outbox_slot", "SELECT,UPDATE"},
		{"function", "outbox_sequence_state()", "EXECUTE"},
		{"table", "outbox_0", "SELECT,TRUNCATE"},
		{"table", "outbox_1", "SELECT,TRUNCATE"},
		{"table", "outbox_2", "SELECT,TRUNCATE"},
		{"table", "outbox_3", "SELECT,TRUNCATE"},
		{"table", "outbox_slots", "SELECT,UPDATE"},
		{"table", "outbox_locks", "SELECT,UPDATE"},
		{"table", "outbox_ticks", "SELECT,INSERT,DELETE"},
		{"table", "outbox_relays", "SELECT,INSERT,UPDATE"},
		{"table", "outbox_replicas", "SELECT,INSERT,UPDATE,DELETE"},
		{"table", "outbox_progress", "SELECT,INSERT,UPDATE"},
		{"table", "outbox_advances", "SELECT,INSERT,DELETE"},
		{"table", "outbox_progress_now", "SELECT"},
		{"table", "outbox_dead", "SELECT,INSERT,UPDATE,DELETE"},
		{"table", "outbox_paused", "SELECT"},
		{"table", "outbox_backlog", "SELECT"},
		{"table", "outbox_scheduled", "SELECT,UPDATE,DELETE"}, // UPDATE: to lock rows
	}
}

// statusRights is what ReadStatus, the relay's metrics need besides. They may not
// read the content of parked messages.
func statusRights() []right {
	return []right{
		{"table", "consumers", "SELECT"},
		{"table", "consumer_positions", "SELECT"},
		{"table", "consumer_topics", "SELECT"},
		{"table", "consumer_pauses", "SELECT"},
		{"table", "parked_messages", "SELECT(consumer topic partition key reason state parked_at)"},
		{"table", "maintenance", "SELECT"},
		{"table", "idempotency_keys", "SELECT(state created_at retry_at locked_until expires_at)"},
	}
}

// operatorRights is all that the commands of an operator need: read everything, act on what waits,
// and publish again. The operator role in migrations/roles.sql has the same rights.
func operatorRights(schema string) []right {
	rights := []right{
		{"schema", schema, "USAGE"},
		{"sequence", "outbox_seq_seq", "SELECT"},
		{"sequence", "outbox_slot", "SELECT"},
		{"function", "outbox_sequence_state()", "EXECUTE"},
		{"function", "repair_outbox_sequences()", "EXECUTE"},
		{"table", "outbox", "SELECT,INSERT(id topic key payload headers created_at)"},
		{"table", "parked_messages", "SELECT,UPDATE,DELETE"},
		{"table", "outbox_dead", "SELECT,UPDATE(state headers payload)"},
		{"table", "outbox_paused", "SELECT,INSERT,UPDATE,DELETE"},
		{"table", "outbox_relays", "SELECT,UPDATE(shards),DELETE"},
		{"table", "outbox_progress", "SELECT,INSERT,UPDATE(epoch),DELETE"},
		{"table", "outbox_advances", "SELECT,INSERT,DELETE"},
		{"table", "outbox_progress_now", "SELECT"},
		{"table", "outbox_replicas", "SELECT,DELETE"},
		{"table", "operator_actions", "SELECT,INSERT(who what why subject stated)"},
		{"table", "consumer_pauses", "SELECT,INSERT,UPDATE,DELETE"},
		{"table", "consumer_positions", "SELECT,UPDATE(resume_at)"},
		{"table", "consumers", "SELECT,UPDATE(id_rule)"},
		{"table", "idempotency_keys", "SELECT,DELETE,UPDATE(state lock_token attempts calling calling_since called phase_since locked_until retry_at error status headers body " +
			"body_dropped sealed finished_at expires_at)"},
	}
	for _, table := range []string{
		"schema_version", "schema_compatibility", "outbox_0", "outbox_1", "outbox_2", "outbox_3", "outbox_slots", "outbox_locks", "outbox_ticks",
		"outbox_scheduled", "consumer_topics", "processed_messages", "processed_forever", "maintenance", "fences", "pending_requests",
		"outbox_backlog",
	} {
		rights = append(rights, right{"table", table, "SELECT"})
	}
	return rights
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
	var lacking [3][]string
	for i, needed := range [][]right{relayRights(schema), statusRights(), operatorRights(schema)} {
		var err error
		if lacking[i], err = grants(ctx, db, schema, needed); err != nil {
			return broken("rights", err)
		}
	}
	relay, status, operators := lacking[0], lacking[1], lacking[2]
	switch {
	case len(relay) > 0 && len(operators) == 0:
		return []Finding{ok("rights", "the role is an operator's: it may read everything and act on what waits; it may not relay")}
	case len(relay) > 0:
		return []Finding{fail("rights", "as the owner of the schema: "+strings.Join(relay, "; "), "the role lacks rights that the relay needs")}
	case len(status) > 0:
		return []Finding{warn("rights", "as the owner of the schema: "+strings.Join(status, "; "), "the role may relay, but not run \"outbox-relay status\"")}
	case len(operators) > 0:
		// A relay's role should not have them.
		return []Finding{ok("rights", "the role may relay; an operator's role also needs, for \"outbox-relay parked\" and similar commands: %s", strings.Join(operators, "; "))}
	}
	return []Finding{ok("rights", "the role has every right that it needs")}
}

// grants returns the statements that would grant the rights that the role lacks.
func grants(ctx context.Context, db operator.Querier, schema string, needed []right) ([]string, error) {
	var kinds, names, privileges, columns []string
	for _, r := range needed {
		for privilege := range strings.SplitSeq(r.privileges, ",") {
			privilege, some, _ := strings.Cut(strings.TrimSuffix(privilege, ")"), "(")
			kinds, names, privileges, columns = append(kinds, r.kind), append(names, r.name), append(privileges, privilege), append(columns, some)
		}
	}
	rows, err := db.Query(ctx, rightsSQL, schema, kinds, names, privileges, columns)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
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
