package doctor_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Property: a session that keeps published rows from being removed, as pg_dump does, is named by
// the status once its transaction is old, also for a role that may not see how old it is; a
// short one is not, nor one on the slot that is filled.
func TestHolderOfASlotIsNamed(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn, dump := connect(t, address), connect(t, address)
	prefix := pgtest.RolePrefix(t, address)
	sql, err := migrations.Roles(migrations.Options{}, prefix)
	require.NoError(t, err)
	exec(t, conn, sql)
	login, err := pgx.Connect(t.Context(), pgtest.Login(t, address, prefix, "operator"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = login.Close(context.WithoutCancel(t.Context())) })
	exec(t, conn, "INSERT INTO effectonce.outbox (topic, slot) VALUES ('t', 2)")
	exec(t, conn, "UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - interval '30 minutes' WHERE slot = 2")
	notes := func(db operator.Querier) []string {
		status, err := doctor.ReadStatus(t.Context(), db, "effectonce", doctor.StatusOptions{})
		require.NoError(t, err)
		return status.Notes
	}
	exec(t, dump, "SET application_name = 'pg_dump'; BEGIN ISOLATION LEVEL REPEATABLE READ; LOCK TABLE effectonce.outbox_0 IN ACCESS SHARE MODE")
	later := anHourLater(t, address)
	require.Empty(t, notes(later), "new rows go there")
	exec(t, dump, "LOCK TABLE effectonce.outbox_2 IN ACCESS SHARE MODE")
	require.Empty(t, notes(conn), "it is young")
	session := fmt.Sprintf("session %d (pg_dump, role ", dump.PgConn().PID())
	for name, db := range map[string]operator.Querier{"its age is seen": later, "its age is hidden": login} {
		found := strings.Join(notes(db), "\n")
		assert.Contains(t, found, session, name)
		assert.Contains(t, found, "holds a lock on slots [2] of the outbox (0 MiB) for ", name)
	}
	exec(t, conn, "UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() - interval '10 minutes' WHERE slot = 2")
	assert.NotContains(t, strings.Join(notes(login), "\n"), session, "the slot is not overdue")
	exec(t, dump, "COMMIT")
	require.Empty(t, notes(later))
}
