package consumer_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// Property: after a crash only as many messages are tried alone as the last holder may have been
// handling, however they are distributed over transactions.
func TestSuspectsEnd(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	stop := h.run(consumer.Each(effect), nil)
	h.produce("first")
	h.untilHandled(1, stop)
	h.exec(`UPDATE effectonce.consumer_positions SET released = false, held_offset = next_offset`)
	var crashed atomic.Int32
	stop = h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.Hooks.Parked = func(p consumer.Parked) {
			if p.Reason == "crashed" {
				crashed.Add(1)
			}
		}
	})
	n := 1
	for _, count := range []int{10, 16, 20, 20} {
		h.produce(numbered(count)...)
		n += count
		h.waitHandled(n)
	}
	h.untilEffects(n, stop)
	require.LessOrEqual(t, crashed.Load(), int32(32))
}

// Property: parked messages whose attempts take longer than the pauses between them do not keep
// others of their partition waiting.
func TestRetriesDoNotStarveTheirPartition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.tune = func(c *consumer.Consumer) { consumer.WatchEvery(c, 20*time.Millisecond) }
	var slow atomic.Int32
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !strings.HasSuffix(string(msg.Value), "bad") {
			return effect(ctx, tx, msg)
		}
		if slow.Load() == 0 {
			return consumer.Permanent(errBad)
		}
		slow.Add(1)
		_, err := tx.Exec(ctx, `SELECT pg_sleep(0.1)`)
		return errors.Join(errBad, err)
	}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax, c.RetryMax = 1000, 1, 100*time.Millisecond })
	h.produceKeyed("a:bad", "b:bad", "c:bad", "d:bad")
	h.waitParked("permanent", "permanent", "permanent", "permanent")
	slow.Store(1)
	h.retry()
	h.wait("retries", func() bool { return slow.Load() > 8 })
	h.produceKeyed("x:1")
	h.untilEffects(1, stop)
}

// Property: a message that the database cannot store holds up neither the others of its transaction
// nor its lane, and is named.
func TestUnstorableMessageHoldsUpOnlyItself(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF NEW.key = 'a' THEN RAISE check_violation; END IF; RETURN NEW; END $$`)
	h.exec(`CREATE TRIGGER refuse BEFORE INSERT ON effectonce.parked_messages FOR EACH ROW EXECUTE FUNCTION refuse()`)
	h.produceKeyed(append([]string{"a:bad"}, versions(39, 1, 2)...)...)
	var fixed atomic.Bool
	c, stop := h.start(failing(&fixed), parallel(consumer.OrderByKey))
	h.waitEffects(39)
	require.Contains(t, h.waitState(c, consumer.StateBlocked).Err, "23514")
	h.exec(`DROP TRIGGER refuse ON effectonce.parked_messages`)
	h.waitParked("permanent")
	require.NoError(t, stop())
}

// Property: the state of a partition ends with its reason: a failure of a message that another lane
// handled later, or of the position behind control records that a message moved later.
func TestStateOutlivesNoReason(t *testing.T) {
	t.Parallel()
	each(t, orders, func(t *testing.T, h *harness, _ string, order func(*consumer.Config)) {
		t.Helper()
		h.tune = func(c *consumer.Consumer) { consumer.IdleEvery(c, 300*time.Millisecond) }
		var failed atomic.Int32
		c, stop := h.start(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if failed.Add(1) == 1 {
				return errBad
			}
			return effect(ctx, tx, msg)
		}), order)
		running := func() bool {
			found := c.Status().Partitions[0]
			return found.State == consumer.StateRunning && found.Err == ""
		}
		h.produceKeyed("a:1")
		h.waitEffects(1)
		h.wait("running", running)
		h.exec(`ALTER FUNCTION effectonce.advance_position RENAME TO away`)
		h.transaction(kgo.TryAbort, "k:x")
		h.waitState(c, consumer.StateWaitingForDatabase)
		h.produceKeyed("a:2")
		h.exec(`ALTER FUNCTION effectonce.away RENAME TO advance_position`)
		h.wait("position", func() bool { return h.position() >= 4 })
		h.waitEffects(2)
		h.wait("running", running)
		require.NoError(t, stop())
	})
}

// Property: a message that blocks its key is logged once (in 30 s), and not as over, however many others
// its lanes handle; the state of the partition is the worst of its lanes, and the reason stays in the
// database.
func TestBlockedMessageIsLoggedOnce(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var fixed atomic.Bool
	begun := time.Now()
	c, stop := h.start(failing(&fixed), func(c *consumer.Config) {
		parallel(consumer.OrderByKey)(c)
		block(c)
		c.HandlerTimeout, c.RetryMax = time.Minute, time.Minute
	})
	h.produceKeyed(append([]string{"a:bad"}, versions(100, 1, 2)...)...)
	h.waitEffects(100)
	h.waitState(c, consumer.StateBlocked)
	h.produceKeyed(versions(16, 2, 3)...)
	h.waitEffects(116)
	require.Equal(t, consumer.StateBlocked, c.Status().Partitions[0].State)
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%blocks its partition%no such account%'`))
	require.Zero(t, h.logged("works again"))
	require.LessOrEqual(t, h.logged(`msg="message fails and blocks`), 1+int(time.Since(begun)/(30*time.Second)), "at most every 30 s")
	fixed.Store(true)
	h.waitState(c, consumer.StateRunning)
	h.waitEffects(117)
	h.wait("the end in the log", func() bool { return h.logged("works again") == 1 })
	require.NoError(t, stop())
}

// Property: Deliver handles records in the given order, behind parked messages that are due.
func TestDeliverKeepsTheGivenOrder(t *testing.T) {
	t.Parallel()
	each(t, orders, func(t *testing.T, h *harness, _ string, order func(*consumer.Config)) {
		t.Helper()
		var fixed atomic.Bool
		c := h.make(failing(&fixed), order)
		deliver := func(first int64, values ...string) consumer.Delivered {
			var records []*kgo.Record
			for i, value := range values {
				records = append(records, &kgo.Record{Topic: h.topic, Offset: first - int64(i), Key: []byte("a"), Value: []byte(value), Timestamp: time.Now()})
			}
			sum, err := c.Deliver(t.Context(), records...)
			require.NoError(t, err)
			return sum
		}
		require.Equal(t, consumer.Delivered{Parked: 1}, deliver(9, "a:bad"))
		fixed.Store(true)
		h.retry()
		require.Equal(t, consumer.Delivered{Fresh: 4}, deliver(8, "2", "1", "3"))
		require.Equal(t, []string{"a:bad", "2", "1", "3"}, h.values())
	})
}

// Property: a stop between the acquisition of a partition and its first message is no crash.
func TestStopWhileAcquiringIsClean(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := h.make(consumer.Each(effect), func(c *consumer.Config) {
		c.Logger = slog.New(stopper{c.Logger.Handler(), cancel, make(chan struct{})})
	})
	require.NoError(t, c.Run(ctx))
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE epoch = 1 AND released`))
}

// stopper ends a context when a partition is assigned, and keeps the assignment until the stop has
// begun.
type stopper struct {
	slog.Handler

	cancel   func()
	draining chan struct{}
}

func (s stopper) Handle(ctx context.Context, record slog.Record) error {
	switch {
	case record.Message == "partition assigned":
		s.cancel()
		<-s.draining
	case strings.HasPrefix(record.Message, "draining"):
		close(s.draining)
	}
	return s.Handler.Handle(ctx, record)
}
