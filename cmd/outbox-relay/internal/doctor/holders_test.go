package doctor_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
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
	require.Eventually(t, func() bool { return doctor.OpenTransactions(t.Context(), later)[0].Severity == doctor.OK }, awaitMax, awaitEvery)
}

// A replication slot that no process reads keeps WAL indefinitely; one whose reader is far behind
// keeps dead rows. Both are named. The remedy does not drop the slot, since its reader would miss
// what was written.
func TestReplicationSlotsAreFound(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Cluster(t, nil)
	conn := connect(t, cluster.URL)
	check := func() []doctor.Finding { return doctor.ReplicationSlots(t.Context(), conn) }
	require.Equal(t, doctor.OK, only(t, check()).Severity)
	exec(t, conn, "SELECT pg_create_physical_replication_slot('it_is_gone', true)")
	f := only(t, check())
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Contains(t, f.Message, "no process reads replication slot it_is_gone")
	harmless(t, f)
	exec(t, conn, remedy(f))
	require.Equal(t, f, only(t, check()))
	exec(t, conn, "SELECT pg_drop_replication_slot('it_is_gone')")
	require.Equal(t, doctor.OK, only(t, check()).Severity)

	exec(t, conn, `CREATE SCHEMA seen; CREATE VIEW seen.pg_replication_slots AS
		SELECT 'busy'::name AS slot_name, true AS active, '3'::xid AS xmin, NULL::xid AS catalog_xmin, NULL::pg_lsn AS restart_lsn, false AS temporary;
		CREATE FUNCTION seen.age(xid) RETURNS int LANGUAGE sql RETURN 10000000`)
	exec(t, conn, "SET search_path = seen, pg_catalog")
	require.Equal(t, doctor.OK, only(t, check()).Severity)
	exec(t, conn, "CREATE OR REPLACE FUNCTION seen.age(xid) RETURNS int LANGUAGE sql RETURN 10000001")
	assert.Contains(t, only(t, check()).Message, "replication slot busy is 10000001 transactions behind")
}

// Autovacuum that is off, for one table or all, and a table whose dead rows accumulate, are
// warnings; the remedies fix them.
func TestAutovacuumIsChecked(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Cluster(t, nil)
	pgtest.Migrate(t, cluster.URL)
	conn, looking := connect(t, cluster.URL), connect(t, cluster.URL)
	check := func() []doctor.Finding { return doctor.Autovacuum(t.Context(), looking, "effectonce") }
	require.Equal(t, doctor.OK, only(t, check()).Severity)

	exec(t, conn, "ALTER TABLE effectonce.fences SET (autovacuum_enabled = off)")
	off := only(t, check())
	assert.Contains(t, off.Message, "autovacuum is off for table fences")
	exec(t, conn, "INSERT INTO effectonce.fences (scope, resource, version) SELECT 's', n::text, 1 FROM generate_series(1, 20000) n")
	exec(t, conn, "DELETE FROM effectonce.fences")
	require.Eventually(t, func() bool { return len(check()) == 2 }, awaitMax, awaitEvery, "statistics arrive a little later")
	starved := check()[1]
	assert.Equal(t, doctor.Warn, starved.Severity)
	assert.Contains(t, starved.Message, "table fences has 20000 dead rows and was never vacuumed")
	exec(t, conn, remedy(starved))
	exec(t, conn, remedy(off))
	require.Eventually(t, func() bool { return check()[0].Severity == doctor.OK }, awaitMax, awaitEvery)

	exec(t, conn, "ALTER SYSTEM SET autovacuum = off")
	exec(t, conn, "SELECT pg_reload_conf()")
	require.Eventually(t, func() bool { return check()[0].Severity == doctor.Warn }, awaitMax, awaitEvery)
	server := only(t, check())
	assert.Contains(t, server.Message, "autovacuum is off")
	for sql := range strings.SplitSeq(strings.TrimSuffix(server.Remedy, ";"), ";") {
		exec(t, conn, sql)
	}
	require.Eventually(t, func() bool { return check()[0].Severity == doctor.OK }, awaitMax, awaitEvery)
}

// A database whose clock is not this machine's is a warning; nothing depends on it at once.
func TestClocksAreCompared(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	require.Equal(t, doctor.OK, only(t, doctor.Clock(t.Context(), connect(t, address))).Severity)
	f := only(t, doctor.Clock(t.Context(), anHourLater(t, address)))
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Regexp(t, `differ by about (1h|59m5\ds):`, f.Message)
	assert.Contains(t, f.Remedy, "chronyc tracking")
}
