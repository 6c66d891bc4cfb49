package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
)

// verdicts are what failures mean, by SQLSTATE and by where they arose.
var verdicts = []struct{ state, engine, statement, handler, commit string }{
	{"40001", "repeat", "count", "count", "repeat"},
	{"40P01", "repeat", "count", "count", "repeat"},
	{"55P03", "repeat", "count", "count", "repeat"},
	{"53400", "wait", "count", "count", "wait"},
	{"53100", "wait", "count", "count", "wait"},
	{"53300", "wait", "count", "count", "wait"},
	{"57P01", "wait", "count", "count", "wait"},
	{"57014", "wait", "count", "count", "count"},
	{"08006", "wait", "count", "count", "wait"},
	{"58030", "wait", "count", "count", "wait"},
	{"25006", "wait", "count", "count", "wait"},
	{"23505", "divide", "count", "count", "count"},
	{"22P05", "divide", "count", "count", "count"},
	{"54000", "divide", "count", "count", "count"},
	{"42P01", "wait", "count", "count", "count"},
	{"42501", "wait", "count", "count", "count"},
	{"XX000", "wait", "count", "count", "count"},
	{"EO001", "fenced", "count", "count", "fenced"},
	{"EO002", "wait", "count", "count", "count"},
	{"", "wait", "count", "count", "wait"},
}

func stateError(state string) error {
	if state == "" {
		return errBad
	}
	return fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: state})
}

// Property: the origin of an error and its SQLSTATE decide what it means. A failure of the engine's
// own statements is never an attempt, one of a handler always is unless the engine's connection is
// lost. Every row of the table is tried.
func TestVerdictDependsOnOriginAndState(t *testing.T) {
	t.Parallel()
	used := map[string]bool{}
	judge := func(origin string, err error, lost bool) string {
		verdict, row := consumer.Judge(origin, err, lost)
		used[row] = true
		return verdict
	}
	for _, v := range verdicts {
		for origin, want := range map[string]string{"engine": v.engine, "statement": v.statement, "handler": v.handler, "commit": v.commit} {
			require.Equal(t, want, judge(origin, stateError(v.state), false), "%s %q", origin, v.state)
			if origin == "engine" {
				require.Equal(t, want, judge(origin, consumer.Permanent(stateError(v.state)), true), "of the engine: %q", v.state)
				continue
			}
			if want != "fenced" && want != "repeat" {
				require.Equal(t, "wait", judge(origin, stateError(v.state), true), "connection lost: %s %q", origin, v.state)
				require.Equal(t, "wait", judge(origin, consumer.Permanent(stateError(v.state)), true), "connection lost, whatever the handler makes of it: %s %q", origin, v.state)
				require.Equal(t, "park", judge(origin, consumer.Permanent(stateError(v.state)), false), "%s %q", origin, v.state)
			}
		}
	}
	for _, rule := range consumer.Rules() {
		require.True(t, used[rule], "no case for the row %q", rule)
	}
}

// failures collects what Hooks.Failed is called with.
type failures struct{ list }

func (f *failures) hook(c *consumer.Config) {
	c.Hooks.Failed = func(failed consumer.Failed) { f.add(string(failed.Message.Value)) }
}

// Property: a failure of the engine's own statements is no message's fault: while a table of the
// engine is missing, nothing is parked and no attempt is counted; the partition waits, reports
// that, and resumes by itself when the table is back.
func TestEngineTableAwayIsWaitedOut(t *testing.T) {
	t.Parallel()
	each(t, map[string]string{
		"processed_messages": "good", "consumer_positions": "good", "consumers": "good", // every message needs these
		"parked_messages": "bad", // this only one that fails
	}, func(t *testing.T, h *harness, table, last string) {
		t.Helper()
		var failed failures
		var calls atomic.Int64
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			calls.Add(1)
			if string(msg.Value) == "bad" {
				return consumer.Permanent(errBad)
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) { c.AttemptsMax = 2; failed.hook(c) })
		h.produce("good", "good")
		h.waitEffects(2)
		h.exec(`ALTER TABLE effectonce.` + table + ` RENAME TO away`)
		h.produce(last)
		h.wait("the partition waits", func() bool { return strings.Contains(h.log.String(), "partition waits for the database") })
		seen := calls.Load()
		h.wait("more tries", func() bool {
			return calls.Load() > seen+5 || table == "processed_messages" || table == "consumers" || last == "bad"
		})
		if last == "good" {
			require.Empty(t, failed.all(), "no attempt failed")
		}
		require.Equal(t, 2, h.number(`SELECT count(*) FROM effects`))
		h.exec(`ALTER TABLE effectonce.away RENAME TO ` + table)
		h.produce("good")
		h.untilHandled(4, stop)
		if last == "good" {
			require.Empty(t, failed.all())
			require.Empty(t, h.parked())
			require.Len(t, h.values(), 4)
		} else {
			require.Equal(t, []string{"bad"}, slices.Compact(failed.all()))
			require.Equal(t, []string{"bad permanent parked"}, h.parked())
			require.Len(t, h.values(), 3)
		}
		require.Contains(t, h.log.String(), "partition works again")
	})
}

// Property: an error that a handler's statement raises, or that its other connections report, is
// the message's failure, also with a SQLSTATE that the server uses for its own state: it is counted
// and parked, and does not affect the other messages.
func TestHandlersStateIsNoOutage(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	states := []string{"53400", "53300", "53100", "08006", "57P01", "57P03", "57014", "58030", "25006", "55P03", "40001", "EO001"}
	var values []string
	for _, state := range states {
		values = append(values, "raise "+state, "good")
	}
	values = append(values, "connect refused", "good", "connect 3D000", "good")
	h.produce(values...)
	h.untilHandled(len(values), h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		value := string(msg.Value)
		if state, ok := strings.CutPrefix(value, "raise "); ok {
			_, err := tx.Exec(ctx, fmt.Sprintf(`DO $$ BEGIN RAISE EXCEPTION 'by the handler' USING ERRCODE = '%s'; END $$`, state))
			return err
		}
		if strings.HasPrefix(value, "connect ") {
			other := tx.Conn().Config()
			if other.Database += "_none"; value == "connect refused" {
				other.Host, other.Port, other.Fallbacks = "127.0.0.1", 1, nil
			}
			conn, err := pgx.ConnectConfig(ctx, other)
			if err == nil {
				_ = conn.Close(ctx)
			}
			return err
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.AttemptsMax = 2 }))
	require.Len(t, h.values(), len(states)+2)
	require.Equal(t, len(states)+2, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE reason = 'failed' AND attempts = 2`))
}

func end(ctx context.Context, h *harness, tx pgx.Tx) error {
	var yes bool
	return h.pool.QueryRow(ctx, `SELECT pg_terminate_backend($1, 10000)`, int64(tx.Conn().PgConn().PID())).Scan(&yes)
}

// Property: the engine's connection that is ended from outside in the middle of a handler is no
// message's failure, however often that happens with different messages: no attempt is counted,
// even if the handler marks the error as permanent, and each message has its effect once.
func TestLostConnectionIsNoAttempt(t *testing.T) {
	t.Parallel()
	each(t, map[string]func(error) error{
		"returned": func(err error) error { return err }, "permanent": consumer.Permanent, "swallowed": func(error) error { return nil },
	}, func(t *testing.T, h *harness, _ string, mark func(error) error) {
		t.Helper()
		values := numbered(60)
		h.produce(values...)
		var failed failures
		ended := map[int64]bool{}
		h.untilHandled(60, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if msg.Offset%5 == 4 && !ended[msg.Offset] {
				ended[msg.Offset] = true
				if err := end(ctx, h, tx); err != nil {
					return err
				}
				return mark(effect(ctx, tx, msg))
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) { c.AttemptsMax = 1; failed.hook(c) }))
		require.Equal(t, values, h.values())
		require.Empty(t, failed.all())
		require.Empty(t, h.parked())
		require.Len(t, ended, 12)
	})
}

// Property: a message whose handler ends its own session each time is found by halving its batch,
// is counted and parked, and the others have their effects once. For each shape of handler.
func TestMessageThatEndsItsSessionIsFound(t *testing.T) {
	t.Parallel()
	eachOf(t, []string{"each", "queued", "batch"}, func(t *testing.T, h *harness, shape string) {
		t.Helper()
		values, good := numbered(60), slices.Delete(numbered(60), 37, 38)
		values[37] = "bad"
		h.produce(values...)
		var failed failures
		const self = `SELECT pg_terminate_backend(pg_backend_pid())`
		one := func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if string(msg.Value) == "bad" {
				_, err := tx.Exec(ctx, self)
				return err
			}
			return effect(ctx, tx, msg)
		}
		handler := map[string]consumer.Handler{
			"each": consumer.Each(one),
			"queued": consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
				if string(msg.Value) == "bad" {
					q.Queue(self)
					return nil
				}
				q.Queue(`INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), string(msg.Value))
				return nil
			}),
			"batch": consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
				for _, msg := range msgs {
					if err := one(ctx, tx, msg); err != nil {
						return err
					}
				}
				return nil
			}),
		}[shape]
		h.untilHandled(60, h.run(handler, func(c *consumer.Config) { c.AttemptsMax = 2; failed.hook(c) }))
		require.Equal(t, good, h.values())
		require.Equal(t, []string{"bad", "bad"}, failed.all())
		require.Equal(t, []string{"bad failed parked"}, h.parked())
	})
}

// Property: a round trip of queued statements that takes too long is split until the slow message
// is alone: only that one fails and is parked.
func TestSlowRoundTripBlamesOnlyItsMessage(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	h := newHarness(t, 1)
	values, good := numbered(60), slices.Delete(numbered(60), 20, 21)
	values[20] = "slow"
	h.produce(values...)
	var failed failures
	stop := h.run(consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		if string(msg.Value) == "slow" {
			q.Queue(`SELECT pg_sleep(60)`)
		}
		q.Queue(`INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), string(msg.Value))
		return nil
	}), func(c *consumer.Config) { c.HandlerTimeout, c.AttemptsMax = 2*time.Second, 2; failed.hook(c) })
	h.waitHandled(60)
	h.wait("the last attempt", func() bool { return len(failed.all()) == 2 })
	h.wait("parked for good", func() bool { return slices.Equal(h.parked(), []string{"slow failed parked"}) })
	require.NoError(t, stop())
	require.Equal(t, good, h.values())
	require.Equal(t, []string{"slow", "slow"}, failed.all())
	require.Equal(t, []string{"slow failed parked"}, h.parked())
}

// Property: if a handler returns without an error after its time was over, its message has failed,
// and not the one after it.
func TestOverdueHandlerFailsItself(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	eachOf(t, []string{"each", "queued"}, func(t *testing.T, h *harness, shape string) {
		t.Helper()
		h.produce("1", "late", "2")
		var failed failures
		late := func(ctx context.Context, msg *consumer.Message) {
			if string(msg.Value) == "late" {
				<-ctx.Done()
			}
		}
		handler := map[string]consumer.Handler{
			"each": consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if late(ctx, msg); string(msg.Value) == "late" {
					return nil
				}
				return effect(ctx, tx, msg)
			}),
			"queued": consumer.Queued(func(ctx context.Context, q *consumer.Queue, msg *consumer.Message) error {
				late(ctx, msg)
				q.Queue(`INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), string(msg.Value))
				return nil
			}),
		}[shape]
		stop := h.run(handler, func(c *consumer.Config) { c.HandlerTimeout, c.AttemptsMax = 5*time.Second, 1; failed.hook(c) }) // the others have one attempt, too
		h.untilHandled(3, stop)
		require.Equal(t, []string{"1", "2"}, h.values())
		require.Equal(t, []string{"late"}, failed.all())
		require.Equal(t, []string{"late failed parked"}, h.parked())
	})
}

// Property: a record's timestamp, which its producer chooses, stops no partition: not one that the
// database cannot store, for a message that is handled and for one that is parked.
func TestAnyTimestampIsHandled(t *testing.T) {
	t.Parallel()
	for _, at := range []int64{math.MinInt64, -1, 0, 9224318015999999, 9224318016000000, math.MaxInt64 / 100, math.MaxInt64} {
		h := newHarness(t, 1)
		c, id := h.make(consumer.Each(effect), nil), newID()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		done, err := c.Deliver(ctx,
			&kgo.Record{Topic: h.topic, Timestamp: time.UnixMilli(at), Headers: id},
			&kgo.Record{Topic: h.topic, Timestamp: time.UnixMilli(at), Offset: 1, Headers: append(id, headers("message-id=another")...)})
		require.NoError(t, err, "timestamp %d", at)
		require.Equal(t, consumer.Delivered{Fresh: 1, Parked: 1}, done, "timestamp %d", at)
	}
}

var errOther = errors.New("other")

// panickingError panics in one of its methods, as one with a nil receiver does.
type panickingError struct{ in string }

func (e panickingError) enter(method string) {
	if e.in == method {
		panic("in " + method)
	}
}

func (e panickingError) Error() string {
	e.enter("Error")
	return "quiet"
}

func (e panickingError) Unwrap() error {
	e.enter("Unwrap")
	return errOther
}

func (e panickingError) Is(error) bool {
	e.enter("Is")
	return false
}
