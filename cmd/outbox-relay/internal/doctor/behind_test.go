package doctor_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: a consumer that is slow, or gone, is not well in status and doctor, with how late it
// is, whether a process holds its partitions and what to do; one at its end, one that an operator
// paused and one whose cause is stored are not said to be late.
func TestConsumersThatAreLateAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	check := func(limit time.Duration) []doctor.Finding {
		return doctor.Consuming(t.Context(), conn, "effectonce", limit)
	}
	exec(t, conn, registerSQL, "billing/orders", "billing", []string{"orders"}, "7 days")
	exec(t, conn, "UPDATE effectonce.consumers SET id_rule = 'standard'")
	exec(t, conn, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, owner, released, record_time, caught_up_at, updated_at) VALUES
		('billing', 'orders', 0, 7, 'host-1', false, clock_timestamp() - interval '10 minutes', NULL, clock_timestamp()),
		('billing', 'orders', 1, 7, 'host-1', true, clock_timestamp() - interval '2 days', clock_timestamp() - interval '20 minutes', clock_timestamp()),
		('billing', 'orders', 2, 7, 'host-1', false, clock_timestamp() - interval '2 days', clock_timestamp(), clock_timestamp())`)
	status := func() *doctor.Status { return readStatus(t, conn, doctor.StatusOptions{LagAgeMax: 5 * time.Minute}) }
	s := status()
	assert.Equal(t, []string{`consumer "billing/orders": 2 partitions behind, the oldest, orders/1, for 20m; 1 of them not held by any process: ` +
		`start a consumer of group billing, or find out why it does not get its partitions: "outbox-relay positions --group 'billing'"`}, s.Problems)
	f := only(t, check(5*time.Minute))
	assert.Equal(t, doctor.Fail, f.Severity)
	assert.Contains(t, f.Message, "consumer billing/orders: 2 partitions behind")
	harmless(t, f)

	exec(t, conn, "DELETE FROM effectonce.consumer_positions WHERE partition = 0")
	assert.Contains(t, status().Problems[0], "1 partition behind, the oldest, orders/1, for 20m, and no process holds it: start a consumer")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET released = false")
	assert.Contains(t, status().Problems[0], "for 20m, held by host-1: the consumer is slow, hangs or died: see its log, and the members")
	assert.True(t, readStatus(t, conn, doctor.StatusOptions{LagAgeMax: 30 * time.Minute}).Well)
	assert.True(t, readStatus(t, conn, doctor.StatusOptions{}).Well)
	require.Equal(t, doctor.OK, only(t, check(30*time.Minute)).Severity)

	exec(t, conn, "INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why) VALUES ('billing', 'orders', 'ana', 'INC-12')")
	assert.Empty(t, status().Problems, "an operator paused it")
	exec(t, conn, "DELETE FROM effectonce.consumer_pauses")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET trouble = 'offset out of range' WHERE partition = 1")
	require.Len(t, status().Problems, 1)
	assert.Contains(t, status().Problems[0], "orders/1 halted for")
}

// Property: rows that wait while no replica of their relay runs are a failure, with how many they
// are and for how long, and a warning where none has run yet; a replica that runs, or rows that
// have only just come, are neither.
func TestRowsThatNoReplicaPublishesAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	check := func() doctor.Finding { return only(t, doctor.Relays(t.Context(), conn, "effectonce", time.Minute)) }
	exec(t, conn, "INSERT INTO effectonce.outbox (topic, created_at) VALUES ('t', clock_timestamp() - interval '5 minutes'), ('t', clock_timestamp())")
	f := check()
	assert.Equal(t, []any{doctor.Warn, "no relay has run yet; waiting: 2 rows"}, []any{f.Severity, f.Message})
	exec(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1)")
	exec(t, conn, "INSERT INTO effectonce.outbox_progress (relay, shard, lease_until, epoch) VALUES ('default', 0, clock_timestamp() - interval '5 minutes', 1)")
	f = check()
	assert.Equal(t, []any{doctor.Fail, `no replica of relay "default" runs; waiting: 2 rows, the oldest for 5m`}, []any{f.Severity, f.Message})
	harmless(t, f)
	exec(t, conn, "UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp() + interval '1 hour'")
	assert.Equal(t, doctor.OK, check().Severity)
	exec(t, conn, "UPDATE effectonce.outbox_progress SET lease_until = NULL")
	exec(t, conn, "DELETE FROM effectonce.outbox WHERE created_at < clock_timestamp() - interval '1 minute'")
	assert.Equal(t, doctor.OK, check().Severity, "it is being restarted")
}
