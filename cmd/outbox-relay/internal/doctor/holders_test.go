package doctor_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// anHourLater lets the doctor's own session see a clock that is an hour ahead: what is open now is
// old then.
func anHourLater(t *testing.T, address string) *pgx.Conn {
	t.Helper()
	conn := connect(t, address)
	exec(t, conn, `CREATE SCHEMA IF NOT EXISTS skewed;
		CREATE OR REPLACE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql RETURN pg_catalog.clock_timestamp() + interval '1 hour'`)
	exec(t, conn, "SET search_path = skewed, pg_catalog")
	return conn
}

// remedy returns the statement of a finding, without the remark behind it.
func remedy(f doctor.Finding) string {
	sql, _, _ := strings.Cut(f.Remedy, ";")
	return sql
}

// Rows O4 and O20 of guarantees.md: a transaction that is open for long, and one that was prepared
// and forgotten, are warnings. The remedy ends the first; how the second has to end is its
// coordinator's to say. A cluster of its own: transactions of other tests would be seen.
func TestLongTransactionsAreFound(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Cluster(t, map[string]string{"max_prepared_transactions": "5", "autovacuum": "off"})
	pgtest.Migrate(t, cluster.URL)
	later := anHourLater(t, cluster.URL)
	require.Equal(t, doctor.OK, only(t, doctor.OpenTransactions(t.Context(), later)).Severity)

	writer, reader := connect(t, cluster.URL), connect(t, cluster.URL)
	exec(t, writer, "BEGIN; SET LOCAL application_name = 'month-end'; SELECT pg_current_xact_id()")
	exec(t, reader, "BEGIN ISOLATION LEVEL REPEATABLE READ")
	exec(t, reader, "SELECT 1 FROM effectonce.outbox")
	exec(t, connect(t, cluster.URL), "BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'it''s forgotten'")
	assert.Equal(t, doctor.OK, only(t, doctor.OpenTransactions(t.Context(), connect(t, cluster.URL))).Severity, "they are young")

	found := doctor.OpenTransactions(t.Context(), later)
	require.Len(t, found, 3)
	for i, text := range []string{"month-end", "has held a snapshot", "prepared transaction it's forgotten"} {
		assert.Equal(t, doctor.Warn, found[i].Severity)
		assert.Contains(t, found[i].Message, text)
		exec(t, connect(t, cluster.URL), remedy(found[i]))
		harmless(t, found[i])
	}
	exec(t, connect(t, cluster.URL), "ROLLBACK PREPARED 'it''s forgotten'")
	testwait.True(t, "no transaction is open", func() bool { return doctor.OpenTransactions(t.Context(), later)[0].Severity == doctor.OK })
}

// A replication slot that no process reads keeps WAL indefinitely; one whose reader is far behind
// keeps dead rows. Both are named. The remedy does not drop the slot, since its reader would miss
// what was written.
func TestReplicationSlotsAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	check := func() []doctor.Finding { return doctor.ReplicationSlots(t.Context(), conn) }
	slots := func(active bool, age int) {
		exec(t, conn, fmt.Sprintf(`CREATE SCHEMA IF NOT EXISTS seen; CREATE OR REPLACE VIEW seen.pg_replication_slots AS
			SELECT 'it_is'::name AS slot_name, %t AS active, '3'::xid AS xmin, NULL::xid AS catalog_xmin, NULL::pg_lsn AS restart_lsn, false AS temporary;
			CREATE OR REPLACE FUNCTION seen.age(xid) RETURNS int LANGUAGE sql RETURN %d`, active, age))
	}
	slots(true, 10000000)
	exec(t, conn, "SET search_path = seen, pg_catalog")
	require.Equal(t, doctor.OK, only(t, check()).Severity)
	slots(true, 10000001)
	assert.Contains(t, only(t, check()).Message, "replication slot it_is is 10000001 transactions behind")
	slots(false, 1)
	f := only(t, check())
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Contains(t, f.Message, "no process reads replication slot it_is")
	harmless(t, f)
}
