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
	look := func() doctor.Finding { return only(t, doctor.Publishers(t.Context(), conn, "effectonce")) }
	assert.Equal(t, "no role is limited to topics", look().Message)

	// As a subscription does it.
	exec(t, conn, "SET session_replication_role = replica")
	exec(t, conn, "INSERT INTO effectonce.outbox_publishers VALUES ('"+prefix+"_publisher', '{orders}')")
	exec(t, conn, "RESET session_replication_role")
	publisher := connect(t, pgtest.Login(t, address, prefix, "publisher"))
	assert.Empty(t, doctor.Publishers(t.Context(), publisher, "effectonce"), "not its to see")
	f := look()
	assert.Equal(t, doctor.Fail, f.Severity)
	assert.Contains(t, f.Message, "effectonce.outbox, effectonce.outbox_0,")
	assert.Contains(t, f.Message, "effectonce.outbox_scheduled: any publisher")
	exec(t, conn, sql)
	assert.Equal(t, doctor.OK, look().Severity)
	assert.Equal(t, "1 role limited to listed topics", only(t, doctor.Publishers(t.Context(), publisher, "effectonce")).Message)
	_, err = publisher.Exec(t.Context(), "INSERT INTO effectonce.outbox (topic) VALUES ('payments')")
	require.ErrorContains(t, err, "may not publish to topic payments")

	exec(t, conn, "ALTER TABLE effectonce.outbox_2 DISABLE TRIGGER outbox_topic_allowed")
	assert.Contains(t, look().Message, "inserts into effectonce.outbox_2:")
	exec(t, conn, "ALTER TABLE effectonce.outbox_2 ENABLE TRIGGER outbox_topic_allowed")
	exec(t, conn, "GRANT UPDATE ON effectonce.outbox TO "+prefix+"_publisher")
	f = look()
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Contains(t, f.Message, "do not limit roles that may update the outbox: "+prefix+"_publisher")
	exec(t, conn, sql)
	exec(t, conn, "ALTER ROLE "+prefix+"_publisher RENAME TO "+prefix+"_renamed")
	f = look()
	assert.Equal(t, doctor.Warn, f.Severity)
	assert.Contains(t, f.Message, "name roles that do not exist, and so limit no role: "+prefix+"_publisher")
}
