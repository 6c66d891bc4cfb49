package consumer_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
)

// waitState waits until partition 0 is in a state, and returns what the consumer says about it.
func (h *harness) waitState(c *consumer.Consumer, want consumer.PartitionState) (found consumer.PartitionStatus) {
	h.t.Helper()
	h.wait(string(want), func() bool {
		for _, p := range c.Status().Partitions {
			if p.Topic == h.topic && p.Partition == 0 && p.State == want {
				found = p
				return true
			}
		}
		return false
	})
	return found
}

// waitCaughtUp waits until partition 0 is handled up to its end.
func (h *harness) waitCaughtUp(c *consumer.Consumer) {
	h.t.Helper()
	h.wait("caught up", func() bool {
		status := c.Status()
		return len(status.Partitions) == 1 && status.Partitions[0].Lag == 0
	})
}

// Property: Status shows the state of a partition and its reason, for as long as it lasts: from before
// Run until after it.
func TestStatesOfAPartitionAreShown(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var broken, failed atomic.Bool
	started, hold := make(chan struct{}, 1), make(chan struct{})
	c := h.make(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		switch {
		case broken.Load():
			return errBad
		case string(msg.Value) == "slow":
			if !failed.Swap(true) {
				return errBad
			}
			started <- struct{}{}
			<-hold
		}
		return effect(ctx, tx, msg)
	}), func(cfg *consumer.Config) {
		cfg.OnFailure = consumer.OnFailureBlock
	})
	require.Equal(t, consumer.Status{Group: h.topic, Phase: consumer.PhaseStopped, Partitions: []consumer.PartitionStatus{}}, c.Status())
	cancel, stop := h.begin(t.Context(), c)
	h.produce("1")
	h.waitEffects(1)
	require.Empty(t, h.waitState(c, consumer.StateRunning).Err)

	broken.Store(true)
	h.produce("2")
	blocked := h.waitState(c, consumer.StateBlocked)
	require.Contains(t, blocked.Err, errBad.Error())
	require.WithinDuration(t, time.Now(), blocked.Since, time.Minute)
	broken.Store(false)
	require.Empty(t, h.waitState(c, consumer.StateRunning).Err)

	h.exec(`ALTER TABLE effectonce.consumer_positions RENAME TO gone`)
	h.produce("3")
	require.NotEmpty(t, h.waitState(c, consumer.StateWaitingForDatabase).Err)
	h.exec(`ALTER TABLE effectonce.gone RENAME TO consumer_positions`)
	require.Empty(t, h.waitState(c, consumer.StateRunning).Err)
	h.waitEffects(3)

	h.exec(`INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why) VALUES ('` + h.topic + `', '` + h.topic + `', 'test', 'test')`)
	h.waitState(c, consumer.StatePausedByOperator)
	h.exec(`DELETE FROM effectonce.consumer_pauses`)
	h.waitState(c, consumer.StateRunning)

	h.exec(`UPDATE effectonce.consumer_positions SET epoch = epoch + 1, owner = 'another'`)
	h.produce("4")
	require.NotEmpty(t, h.waitState(c, consumer.StateFenced).Err) // for a second at least
	h.waitEffects(4)
	h.waitState(c, consumer.StateRunning)

	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 100`)
	consumer.Retake(t.Context(), c, h.topic, 0)
	halted := h.waitState(c, consumer.StateHalted)
	require.Contains(t, halted.Err, "lost its end")
	require.EqualValues(t, 100, halted.Position)
	h.resumeAt(4)
	h.waitState(c, consumer.StateRunning)

	h.produce("slow")
	<-started // for the second time: the partition is blocked, and works again when it drains already
	cancel()
	h.waitState(c, consumer.StateDraining)
	require.Equal(t, consumer.PhaseDraining, c.Status().Phase)
	close(hold)
	require.NoError(t, stop())
	h.waitEffects(5)
	require.Equal(t, consumer.Status{Group: h.topic, Phase: consumer.PhaseStopped, Partitions: []consumer.PartitionStatus{}}, c.Status())
}

// Property: Status has the position, the lag and the epoch of a partition.
func TestStatusCountsWhatIsBehind(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	started, hold := make(chan struct{}, 1), make(chan struct{})
	c := h.make(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		switch string(msg.Value) {
		case "bad":
			return consumer.Permanent(errBad)
		case "slow":
			started <- struct{}{}
			<-hold
		}
		return effect(ctx, tx, msg)
	}), func(cfg *consumer.Config) { cfg.BatchMax = 1 })
	h.produce("1", "bad", "slow", "4", "5")
	_, stop := h.begin(t.Context(), c)
	<-started
	var p consumer.PartitionStatus
	h.wait("counted", func() bool {
		p = c.Status().Partitions[0]
		return h.number(`SELECT count(*) FROM effectonce.parked_messages`) == 1
	})
	require.EqualValues(t, 2, p.Position)
	require.EqualValues(t, 3, p.Lag)
	require.EqualValues(t, h.number(`SELECT epoch FROM effectonce.consumer_positions`), p.Epoch)
	close(hold)
	h.waitCaughtUp(c)
	require.EqualValues(t, 5, c.Status().Partitions[0].Position)
	h.produce("6", "7")
	h.wait("the rest", func() bool { return c.Status().Partitions[0].Position == 7 })
	h.waitCaughtUp(c)
	h.retry()
	h.wait("what fails again stays parked", func() bool {
		return h.logged("message cannot be handled and is parked") == 2
	})
	h.exec(`DELETE FROM effectonce.parked_messages`)
	require.NoError(t, stop())
}

// ask asks the readiness handler.
func ask(t *testing.T, c *consumer.Consumer) (code int, body map[string]any, text string) {
	t.Helper()
	recorder := httptest.NewRecorder()
	consumer.ReadyHandler(c).ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", nil))
	require.NoError(t, json.Unmarshal(recorder.Body.Bytes(), &body))
	return recorder.Code, body, recorder.Body.String()
}

// Property: a consumer is ready while it is in its group: not before, and not while it drains. A
// partition that halts is shown and makes it no less ready. No error's text is shown, which may
// have parts of payloads.
func TestReadyWhileInTheGroup(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 2)
	const secret = "card 4711"
	c := h.make(consumer.Each(func(_ context.Context, _ pgx.Tx, msg *consumer.Message) error {
		return errors.New("declined: " + string(msg.Value))
	}), block)
	code, body, _ := ask(t, c)
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Equal(t, "stopped", body["phase"])

	h.produce(secret)
	_, stop := h.begin(t.Context(), c)
	require.Contains(t, h.waitState(c, consumer.StateBlocked).Err, secret, "the test's own premise")
	code, body, text := ask(t, c)
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, true, body["ready"])
	require.NotContains(t, text, secret)
	require.Contains(t, text, `"state":"blocked"`)

	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 100 WHERE partition = 0`)
	consumer.Retake(t.Context(), c, h.topic, 0)
	h.waitState(c, consumer.StateHalted)
	code, _, text = ask(t, c)
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, text, `"state":"halted"`)
	require.NoError(t, stop())
	code, body, _ = ask(t, c)
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.NotEmpty(t, body["reason"])
}

// Property: a consumer that waits for its database at the start, or that the group does not admit,
// is not ready; one in the group without a partition is.
func TestReadinessOfAReplica(t *testing.T) {
	t.Parallel()
	t.Run("the database does not answer", func(t *testing.T) {
		t.Parallel()
		h := newHarness(t, 1)
		pool := h.poolWith(func(config *pgxpool.Config) {
			config.ConnConfig.Host, config.ConnConfig.Port, config.ConnConfig.Fallbacks = "127.0.0.1", 1, nil
		})
		c := h.makeOn(pool, consumer.Each(effect), nil)
		_, stop := h.begin(t.Context(), c)
		h.wait("it says what it waits for", func() bool { return c.Status().Err != "" })
		code, body, text := ask(t, c)
		require.Equal(t, http.StatusServiceUnavailable, code)
		require.Equal(t, "starting", body["phase"])
		require.NotContains(t, text, "127.0.0.1")
		require.NoError(t, stop())
	})
	t.Run("the group refuses", func(t *testing.T) {
		t.Parallel()
		h, fake := newFaked(t, 1)
		var refused atomic.Int64
		var open atomic.Bool
		answer(fake, func(join *kmsg.JoinGroupRequest) kmsg.Response {
			if open.Load() {
				return nil
			}
			refused.Add(1)
			response, _ := join.ResponseKind().(*kmsg.JoinGroupResponse)
			response.ErrorCode = kerr.GroupAuthorizationFailed.Code
			return response
		})
		c, stop := h.start(consumer.Each(effect), nil)
		h.wait("refused", func() bool { return refused.Load() > 1 })
		code, body, _ := ask(t, c)
		require.Equal(t, http.StatusServiceUnavailable, code)
		require.Equal(t, "joining", body["phase"])
		open.Store(true)
		h.wait("ready", func() bool { return c.Status().Phase == consumer.PhaseConsuming })
		require.NoError(t, stop())
	})
	t.Run("it has to join anew", func(t *testing.T) {
		t.Parallel()
		h := newHarness(t, 1)
		c, stop := h.start(consumer.Each(effect), func(cfg *consumer.Config) { cfg.RetryMin, cfg.RetryMax = time.Minute, time.Minute })
		h.produce("1")
		h.waitEffects(1)
		require.Equal(t, consumer.PhaseConsuming, c.Status().Phase)
		var status consumer.Status
		h.wait("it waits", func() bool { consumer.Rejoin(c, errBad); status = c.Status(); return status.Err != "" }) // each time for a second at most
		require.Equal(t, consumer.PhaseJoining, status.Phase)
		require.Contains(t, status.Err, errBad.Error())
		require.Empty(t, status.Partitions)
		require.NoError(t, stop())
	})
	t.Run("no partition is left for it", func(t *testing.T) {
		t.Parallel()
		h := newHarness(t, 1)
		both := []*consumer.Consumer{h.make(consumer.Each(effect), nil), h.make(consumer.Each(effect), nil)}
		for _, c := range both {
			h.begin(t.Context(), c)
		}
		h.wait("both are ready", func() bool {
			partitions := len(both[0].Status().Partitions) + len(both[1].Status().Partitions)
			return both[0].Status().Phase == consumer.PhaseConsuming && both[1].Status().Phase == consumer.PhaseConsuming && partitions == 1
		})
	})
}

// Property: the status does not name a parked message that failed again: nothing waits for it. A conflict
// pauses for a second at most, however long failed messages do.
func TestStatusForgetsAReleasedMessage(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("a")
	var turn atomic.Int32
	c, stop := h.start(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		switch turn.Add(1) {
		case 1, 3:
			return consumer.Permanent(errBad)
		case 2:
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$`)
			return err
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.ParkShareMax, c.RetryMin, c.RetryMax = 1, time.Hour, time.Hour })
	h.waitParked("permanent")
	h.retry()
	h.wait("parked again", func() bool {
		return turn.Load() == 3 && h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked'`) == 1
	})
	h.wait("nothing is wrong", func() bool { return c.Status().Partitions[0].Err == "" })
	require.NoError(t, stop())
}

// asking asks for the status whenever something is logged.
type asking struct {
	slog.Handler

	c *atomic.Pointer[consumer.Consumer]
}

func (a asking) Handle(ctx context.Context, r slog.Record) error {
	if c := a.c.Load(); c != nil && !strings.Contains(r.Message, "rejoining") {
		_ = c.Status()
	}
	return a.Handler.Handle(ctx, r)
}

// Property: nothing is logged under a mutex that Status takes.
func TestLoggerMayAskForTheStatus(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("a")
	h.untilHandled(1, h.run(consumer.Each(effect), nil))
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 1000`) // the topic has lost its end
	var known atomic.Pointer[consumer.Consumer]
	c := h.make(consumer.Each(effect), func(c *consumer.Config) {
		c.Logger = slog.New(asking{slog.NewTextHandler(h.log, nil), &known})
	})
	known.Store(c)
	_, stop := h.begin(t.Context(), c)
	h.wait("it says so", func() bool { return h.logged("partition halts") > 0 })
	require.NoError(t, stop())
}
