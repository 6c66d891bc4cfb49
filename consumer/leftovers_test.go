package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
)

// Property: nothing that one handler leaves in its session reaches the next message, or outlasts the
// message: temporary tables, sequences, held cursors, session locks, savepoints. Row C19b of guarantees.md.
func TestNothingReachesTheNextMessage(t *testing.T) {
	t.Parallel()
	const locks = `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711`
	for name, c := range map[string]struct {
		a, b, c string // what the handlers of three messages send
		effects int
		parked  int
	}{
		"table":       {a: `CREATE TEMP TABLE stage (v text)`, b: `CREATE TEMPORARY TABLE stage (v text)`, c: `CREATE LOCAL TEMP TABLE stage (v text)`, effects: 3},
		"drop":        {a: `CREATE TEMP TABLE stage ON COMMIT DROP AS SELECT 1`, b: `CREATE TEMP TABLE stage ON COMMIT DROP AS SELECT 1`, effects: 3},
		"sequence":    {a: `CREATE TEMP SEQUENCE s`, b: `CREATE TEMP SEQUENCE s`, effects: 3},
		"cursor":      {a: `DECLARE c CURSOR WITH HOLD FOR SELECT 1`, b: `DECLARE c CURSOR WITH HOLD FOR SELECT 1`, effects: 3},
		"lock":        {a: `SELECT pg_advisory_lock(4711)`, effects: 3},
		"deallocated": {a: `DEALLOCATE ALL`, effects: 3},
		"savepoint":   {a: `SAVEPOINT s`, c: `ROLLBACK TO SAVEPOINT s`, effects: 2, parked: 1},
		"its own":     {b: `SAVEPOINT s; SELECT 1`, c: `SELECT 1; SAVEPOINT s`, effects: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceAll("a", "b", "c")
			sent := map[string]string{"a": c.a, "b": c.b, "c": c.c}
			stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if sql := sent[string(msg.Value)]; sql != "" {
					if _, err := tx.Exec(ctx, sql); err != nil {
						return err
					}
				}
				return effect(ctx, tx, msg)
			}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax = 2, 1 })
			h.wait("all are done", func() bool {
				return h.position() == 3 && h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'retry'`) == 0
			})
			require.Equal(t, c.effects, h.number(`SELECT count(*) FROM effects`))
			require.Len(t, h.parked(), c.parked)
			h.wait("session locks are free", func() bool { return h.number(locks) == 0 })
			require.NoError(t, stop())
		})
	}
}

// Property: a handler that writes as a replica, so that triggers do not run, does not leave the messages
// behind a retried one waiting.
func TestReplicaRoleReleasesTheKey(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var fails atomic.Int32
	h.produceKeyed("k:0", "k:1", "k:2")
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if _, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica`); err != nil {
			return err
		}
		if string(msg.Value) == "k:0" && fails.Add(1) < 3 {
			return consumer.RetryAfter(1100*time.Millisecond, errBad)
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.ParkShareMax = 1 })
	h.waitEffects(3)
	require.NoError(t, stop())
	require.Equal(t, []string{"k:0", "k:1", "k:2"}, h.values())
}
