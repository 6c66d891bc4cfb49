package consumer_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
)

// Property: a failover that loses the takeover of a partition, and what was handled since, is noticed
// even if no further message arrives.
func TestIdleConsumerNoticesALostTakeover(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	for i := range 10 {
		h.produceAs(fmt.Sprint(i), fmt.Sprint(i))
	}
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(10)
	h.exec(`WITH lost AS (DELETE FROM effects WHERE n > 4 RETURNING message_id), unclaimed AS (
		DELETE FROM effectonce.processed_messages WHERE message_id IN (SELECT message_id FROM lost))
		UPDATE effectonce.consumer_positions SET next_offset = 4, epoch = epoch - 1`)
	h.waitEffects(10)
	require.NoError(t, stop())
	require.Contains(t, h.log.String(), "lost commits")
}
