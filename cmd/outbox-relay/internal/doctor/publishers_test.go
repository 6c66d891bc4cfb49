package doctor_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Property: lists that came with a copy of the tables, without their triggers, are a failure until
// the roles are applied again; lists that limit no role are a warning. Row S7 of guarantees.md.
func TestPublishersListsAreChecked(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn, prefix := connect(t, address), pgtest.RolePrefix(t, address)
	sql, err := migrations.Roles(migrations.Options{}, prefix)
	require.NoError(t, err)
	exec(t, conn, sql)
	check := func(severity doctor.Severity, message string) {
		t.Helper()
		f := only(t, doctor.Publishers(t.Context(), conn, "effectonce"))
		assert.Equal(t, severity, f.Severity)
		assert.Contains(t, f.Message, message)
	}
	check(doctor.OK, "no role is limited to topics")
	// As a subscription does it.
	exec(t, conn, "SET session_replication_role = replica; INSERT INTO effectonce.outbox_publishers VALUES ('"+prefix+"_publisher', '{orders}'); RESET session_replication_role")
	publisher := connect(t, pgtest.Login(t, address, prefix, "publisher"))
	assert.Empty(t, doctor.Publishers(t.Context(), publisher, "effectonce"), "not its to see")
	check(doctor.Fail, "effectonce.outbox_scheduled: any publisher")
	exec(t, conn, sql)
	check(doctor.OK, "1 role limited to listed topics")
	_, err = publisher.Exec(t.Context(), "INSERT INTO effectonce.outbox (topic) VALUES ('payments')")
	require.ErrorContains(t, err, "may not publish to topic payments")

	exec(t, conn, "ALTER TABLE effectonce.outbox_2 DISABLE TRIGGER outbox_topic_allowed")
	check(doctor.Fail, "inserts into effectonce.outbox_2:")
	exec(t, conn, "ALTER TABLE effectonce.outbox_2 ENABLE TRIGGER outbox_topic_allowed; GRANT UPDATE ON effectonce.outbox TO "+prefix+"_publisher")
	check(doctor.Warn, "do not limit roles that may update the outbox: "+prefix+"_publisher")
	exec(t, conn, sql)
	exec(t, conn, "ALTER ROLE "+prefix+"_publisher RENAME TO "+prefix+"_renamed")
	check(doctor.Warn, "name roles that do not exist, and so limit no role: "+prefix+"_publisher")
}
