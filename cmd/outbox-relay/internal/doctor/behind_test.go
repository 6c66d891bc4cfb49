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
	f := only(t, doctor.Pipeline(t.Context(), conn, "effectonce", 5*time.Minute))
	assert.Equal(t, []any{doctor.Fail, s.Problems[0]}, []any{f.Severity, f.Message})
	harmless(t, f)

	exec(t, conn, "DELETE FROM effectonce.consumer_positions WHERE partition = 0")
	assert.Contains(t, status().Problems[0], "1 partition behind, the oldest, orders/1, for 20m, and no process holds it: start a consumer")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET released = false")
	assert.Contains(t, status().Problems[0], "for 20m, held by host-1: the consumer is slow, hangs or died: see its log, and the members")
	assert.True(t, readStatus(t, conn, doctor.StatusOptions{LagAgeMax: 30 * time.Minute}).Well)
	assert.True(t, readStatus(t, conn, doctor.StatusOptions{}).Well)

	exec(t, conn, "INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why) VALUES ('billing', 'orders', 'ana', 'INC-12')")
	assert.Empty(t, status().Problems, "an operator paused it")
	exec(t, conn, "DELETE FROM effectonce.consumer_pauses")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET trouble = 'offset out of range' WHERE partition = 1")
	require.Len(t, status().Problems, 1)
	assert.Contains(t, status().Problems[0], "orders/1 halted for")
}
