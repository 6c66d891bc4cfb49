package consumer_test

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
)

// Property: a retry of the first message of one key releases the messages behind it, and no message
// of another key. Row C17 of guarantees.md.
func TestRetryReleasesOneKey(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"each", "queued", "batch"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var fixed atomic.Bool
			handler := shapes(func(msg *consumer.Message) error {
				if strings.HasSuffix(string(msg.Value), "bad") && !fixed.Load() {
					return consumer.Permanent(errBad)
				}
				return nil
			})[name]
			h := newHarness(t, 1)
			h.produceKeyed("a:bad", "b:bad", "a:1", "b:1", "a:2")
			stop := h.run(handler, nil)
			h.wait("position", func() bool { return h.position() == 5 })
			fixed.Store(true)
			h.exec(`UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp() WHERE payload = 'a:bad'`)
			h.waitEffects(3)
			h.produceKeyed("a:3", "b:2")
			h.waitEffects(4)
			h.wait("position", func() bool { return h.position() == 7 })
			require.NoError(t, stop())
			require.Equal(t, []string{"a:bad", "a:1", "a:2", "a:3"}, h.values())
			require.Equal(t, []string{"b:bad permanent parked", "b:1 behind behind", "b:2 behind behind"}, h.parked())
		})
	}
}

// Property: a parked message that alone has more bytes than a release takes at once is released,
// and the messages behind it follow.
func TestReleaseOfALargeMessage(t *testing.T) {
	t.Parallel()
	const size = consumer.ReleaseBytesMax + 1
	var fixed atomic.Bool
	h := newHarness(t, 1)
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !fixed.Load() {
			return consumer.Permanent(errBad)
		}
		_, err := tx.Exec(ctx, `INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), strconv.Itoa(len(msg.Value)))
		return err
	}), nil)
	h.produceKeyed("a:bad", "a:1")
	h.wait("position", func() bool { return h.position() == 2 })
	h.exec(`UPDATE effectonce.parked_messages SET payload = convert_to(repeat('x', ` + strconv.Itoa(size) + `), 'UTF8') WHERE payload = 'a:bad'`)
	fixed.Store(true)
	h.retry()
	h.waitEffects(2)
	h.wait("nothing is parked", func() bool { return len(h.parked()) == 0 })
	require.NoError(t, stop())
	require.Equal(t, []string{strconv.Itoa(size), "3"}, h.values())
}

// Property: a released message is claimed again if its claim was forgotten: a redelivery that comes
// after it has no second effect. Row C15 of guarantees.md.
func TestReleasedMessageIsClaimedAgain(t *testing.T) {
	t.Parallel()
	var fixed atomic.Bool
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !fixed.Load() {
			return consumer.Permanent(errBad)
		}
		return effect(ctx, tx, msg)
	})
	h := newHarness(t, 1)
	stop := h.run(handler, nil)
	h.produceKeyed("a:bad")
	h.wait("position", func() bool { return h.position() == 1 })
	h.exec(`DELETE FROM effectonce.processed_messages`)
	fixed.Store(true)
	h.retry()
	h.waitEffects(1)
	require.NoError(t, stop())
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.processed_messages`))

	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 0`)
	stop = h.run(handler, nil)
	h.wait("position", func() bool { return h.position() == 1 })
	require.NoError(t, stop())
	require.Equal(t, []string{"a:bad"}, h.values())
}
