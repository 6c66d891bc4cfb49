package doctor_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Property: a session that keeps published rows from being removed, as pg_dump does, is named by
// doctor and status once its transaction is old, also for a role that may not see how old it is; a
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
	check := func(db operator.Querier, keep time.Duration) []doctor.Finding {
		return doctor.Slots(t.Context(), db, "effectonce", keep)
	}
	exec(t, dump, "SET application_name = 'pg_dump'; BEGIN ISOLATION LEVEL REPEATABLE READ; LOCK TABLE effectonce.outbox_0 IN ACCESS SHARE MODE")
	later := anHourLater(t, address)
	require.Equal(t, doctor.OK, only(t, check(later, time.Hour)).Severity, "new rows go there")
	exec(t, dump, "LOCK TABLE effectonce.outbox_2 IN ACCESS SHARE MODE")
	require.Equal(t, doctor.OK, only(t, check(conn, time.Hour)).Severity, "it is young")
	session := fmt.Sprintf("session %d (pg_dump, role ", dump.PgConn().PID())
	for name, found := range map[string][]doctor.Finding{"its age is seen": check(later, 3*time.Hour), "its age is hidden": check(login, 10*time.Minute)} {
		f := only(t, found)
		assert.Equal(t, doctor.Warn, f.Severity, name)
		assert.Contains(t, f.Message, session, name)
		assert.Contains(t, f.Message, "holds a lock on slots [2] of the outbox (0 MiB) for ", name)
		harmless(t, f)
		exec(t, conn, remedy(f))
	}
	require.Equal(t, doctor.OK, only(t, check(login, time.Hour)).Severity, "the slot is not overdue")
	status := readStatus(t, later, doctor.StatusOptions{})
	require.Len(t, status.SlotHolders, 1)
	assert.Equal(t, []int16{2}, status.SlotHolders[0].Slots)
	assert.Contains(t, fmt.Sprint(status.Notes), session)
	exec(t, dump, "COMMIT")
	require.Equal(t, doctor.OK, only(t, check(later, 3*time.Hour)).Severity)
}

// Property: an outbox beyond a limit is a warning that names both, and without limits only a
// number.
func TestOutboxBeyondItsLimitsIsFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	check := func(limits doctor.Limits) []doctor.Finding {
		return doctor.BacklogLimits(t.Context(), conn, "effectonce", limits)
	}
	tight := doctor.Limits{Age: time.Minute}
	require.Equal(t, doctor.OK, only(t, check(tight)).Severity)
	exec(t, conn, "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', clock_timestamp() - interval '2 minutes')")
	f := only(t, check(tight))
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Contains(t, f.Message, "the oldest row has waited for 2m")
	assert.Contains(t, f.Message, "the limit is 1m: about 1 row not published")
	require.Equal(t, doctor.OK, only(t, check(doctor.Limits{Age: time.Hour, Bytes: 1 << 30})).Severity)
	require.Len(t, check(doctor.Limits{Age: time.Minute, Bytes: 1}), 2)
	assert.Contains(t, only(t, check(doctor.Limits{})).Message, "about 1 row waiting, the oldest for 2m")
}
