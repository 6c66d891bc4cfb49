package relay_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: if the outbox cannot be read, while the leases can be renewed, the relay does not wait
// forever: it logs that, retries, keeps its lease until then, and publishes when the outbox
// answers. Row O13 of guarantees.md.
func TestSilentReadIsGivenUp(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	var mu sync.Mutex
	var silent, lost []string
	interrupted := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(err.Error(), "the database does not answer on this connection") {
			silent = append(silent, err.Error())
		} else if strings.Contains(err.Error(), "lease lost") { // on a busy machine other statements are late, too
			lost = append(lost, err.Error())
		}
	}
	r := newRelay(t, pool, relay.Config{Lease: 12 * time.Second, Keep: 100 * time.Millisecond, Hooks: relay.Hooks{Interrupted: interrupted}})
	r.SetPatience(2 * time.Second)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(running) }()
	insert(t, pool, topic, "k", "1")
	testwait.True(t, "a row is published", func() bool { return len(distinctInOrder(values(t, topic))) == 1 })
	lock, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer lock.Rollback(context.WithoutCancel(ctx))
	_, err = lock.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', '2')`, topic)
	require.NoError(t, err)
	_, err = lock.Exec(ctx, `LOCK TABLE effectonce.outbox IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	locked := one[time.Time](t, pool, `SELECT clock_timestamp()`)
	testwait.True(t, "it is said again and again", func() bool {
		must(t, pool, `SELECT pg_current_xact_id()`) // or no snapshot is new, and nothing needs to be read
		mu.Lock()
		defer mu.Unlock()
		return len(silent) >= 2
	})
	// Longer than a lease that is not renewed, by the database's clock.
	_, err = pool.Exec(ctx, `SELECT pg_sleep(extract(epoch FROM $1::timestamptz + interval '12 seconds' - clock_timestamp()))`, locked)
	require.NoError(t, err)
	require.NoError(t, lock.Commit(ctx))
	testwait.True(t, "the next row is published", func() bool { return len(distinctInOrder(values(t, topic))) == 2 })
	stop()
	require.NoError(t, <-done)
	require.Empty(t, lost, "the lease was lost, since the upkeep waited for the lock, too")
}

// Property: a recovery may take longer than a statement: its rows are published when it is done.
func TestLongRecoveryComesToAnEnd(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	insert(t, pool, topic, "k", "1")
	must(t, pool, `UPDATE effectonce.outbox SET txid = '99999999'`)
	must(t, pool, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(4); RETURN new; END'`)
	must(t, pool, `CREATE TRIGGER slow BEFORE UPDATE ON effectonce.outbox FOR EACH ROW EXECUTE FUNCTION slow()`)
	r := newRelay(t, pool, relay.Config{})
	r.SetPatience(3 * time.Second)
	require.EqualValues(t, 1, drain(t, r))
	require.Equal(t, []string{"1"}, values(t, topic))
}

// Property: however many ticks there are, those that no progress refers to are removed without
// waiting for the next turn of the upkeep, and those of the last minutes are kept.
func TestOldTicksAreForgotten(t *testing.T) {
	longtest.Only(t, "a minute of real time decides")
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	must(t, pool, `INSERT INTO effectonce.outbox_ticks (snapshot, seq_last, created_at)
		SELECT '10:10:', 0, clock_timestamp() - i * interval '9 minutes' FROM generate_series(1, 2) AS i, generate_series(1, 25000)`)
	insert(t, pool, topic, "k", "1")
	drain(t, newRelay(t, pool, relay.Config{}))
	running(t, pool, relay.Config{Lease: 30 * time.Second}) // half of it is what the upkeep may take
	testwait.True(t, "they are forgotten", func() bool {
		return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_ticks WHERE snapshot::text = '10:10:'`) <= 25000
	})
	require.Equal(t, 25000, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_ticks WHERE snapshot::text = '10:10:' AND created_at > clock_timestamp() - interval '10 minutes'`))
}
