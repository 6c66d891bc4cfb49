package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
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

// failing is a handler that refuses messages that end with "bad", until it is repaired.
func failing(repaired *atomic.Bool) consumer.Handler {
	return failingWith(consumer.Permanent(errBad), repaired)
}

func failingWith(err error, repaired *atomic.Bool) consumer.Handler {
	return consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if strings.HasSuffix(string(msg.Value), "bad") && !repaired.Load() {
			return err
		}
		return effect(ctx, tx, msg)
	})
}

// orders are the settings of the orders under which a parked message holds its key.
var orders = map[string]func(*consumer.Config){
	"by partition": func(*consumer.Config) {},
	"by key":       parallel(consumer.OrderByKey),
}

// state is the SQLSTATE of an error.
func state(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// waitBlocked waits until a statement of the test's database waits for a lock.
func (h *harness) waitBlocked() {
	h.t.Helper()
	h.wait("blocked", func() bool {
		return h.number(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
	})
}

// Property: if two operators delete the first messages of a key at the same time, the message
// behind both is promoted, whichever of them commits first.
func TestPromotionOutlivesConcurrentDeletes(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("a:bad", "a:1", "a:2", "b:bad", "b:1", "b:2")
	h.untilHandled(6, h.run(failing(&atomic.Bool{}), nil))
	remove := `DELETE FROM effectonce.parked_messages WHERE convert_from(payload, 'UTF8') = `
	for _, values := range [][2]string{{"a:1", "a:bad"}, {"b:bad", "b:1"}} {
		first, err := h.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = first.Exec(t.Context(), remove+"'"+values[0]+"'")
		require.NoError(t, err)
		second := make(chan error, 1)
		go func() {
			_, err := h.pool.Exec(context.WithoutCancel(t.Context()), remove+"'"+values[1]+"'")
			second <- err
		}()
		h.waitBlocked()
		require.NoError(t, first.Commit(t.Context()))
		require.NoError(t, <-second)
	}
	require.Equal(t, []string{"a:2 behind retry", "b:2 behind retry"}, h.parked())
}

// Property: what is parked in masses is not read once for each held key of a batch, although nothing was parked when
// PostgreSQL made its statistics and its plan.
func TestHeldKeysAreFoundByIndex(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.exec(`VACUUM ANALYZE effectonce.parked_messages`)
	h.exec(`CREATE TABLE reads (n bigint)`)
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if strings.HasSuffix(string(msg.Value), "bad") {
			return consumer.Permanent(errors.New("bad"))
		}
		_, err := tx.Exec(ctx, `INSERT INTO reads SELECT seq_tup_read FROM pg_stat_xact_all_tables WHERE relid = 'effectonce.parked_messages'::regclass`)
		return errors.Join(err, effect(ctx, tx, msg))
	}), nil)
	var held []string
	for n := range 20 {
		held = append(held, fmt.Sprintf("k%d:bad", n))
	}
	h.produceKeyed(held...)
	for n := range 12 { // from the sixth on the plan may be the one for all arguments
		h.produceKeyed(append(held, "b:1")...)
		if h.waitEffects(n + 1); n == 8 {
			h.exec(`INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, headers, reason, error, attempts, state, retry_at)
				SELECT consumer, gen_random_uuid(), topic, partition, n, n::text::bytea, '[]', 'failed', '', 1, 'parked', now() FROM effectonce.parked_messages, generate_series(1000, 21000) AS n WHERE "offset" = 0`)
		}
	}
	require.Less(t, h.number(`SELECT max(n) FROM reads`), 10*20000) // the session's polls may count, too
	h.untilEffects(12, stop)
}

// Property: an operator's transaction of an earlier snapshot does not see a message that was parked
// behind another one since then, so it cannot delete that other one: the message behind would wait
// forever. A delete that sees it frees the messages behind, in order, and the key.
func TestDeleteOfAnEarlierSnapshotIsRefused(t *testing.T) {
	t.Parallel()
	each(t, orders, func(t *testing.T, h *harness, _ string, settings func(*consumer.Config)) {
		t.Helper()
		stop := h.run(failing(&atomic.Bool{}), settings)
		h.produceKeyed("a:bad")
		h.waitParked("permanent")
		early, err := h.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		require.NoError(t, err)
		_, err = early.Exec(t.Context(), `SELECT FROM effects`)
		require.NoError(t, err)
		h.produceKeyed("a:1", "a:2", "b:bad")
		h.waitHandled(4)
		_, err = early.Exec(t.Context(), `DELETE FROM effectonce.parked_messages`)
		require.Equal(t, "40001", state(err))
		require.NoError(t, early.Rollback(t.Context()))
		h.exec(`DELETE FROM effectonce.parked_messages WHERE state = 'parked'`)
		h.waitEffects(2)
		h.wait("freed", func() bool { return len(h.parked()) == 0 })
		h.produceKeyed("b:1")
		h.untilEffects(3, stop)
		require.Equal(t, []string{"a:1", "a:2", "b:1"}, h.values())
	})
}

// Property: a holder that takes its partition back knows the keys of what another one parked in
// between.
func TestHolderThatComesBackKnowsWhatWasParkedMeanwhile(t *testing.T) {
	t.Parallel()
	each(t, orders, func(t *testing.T, h *harness, _ string, settings func(*consumer.Config)) {
		t.Helper()
		stop := h.run(failing(&atomic.Bool{}), settings)
		h.produceKeyed("b:1")
		h.waitEffects(1)
		other := h.make(failing(&atomic.Bool{}), settings)
		bad := kgo.Record{Key: []byte("a"), Value: []byte("a:bad"), Topic: h.topic, Offset: 1, Timestamp: time.Now(), Headers: headers("message-id=bad")}
		var done consumer.Delivered
		h.wait("the other one parks it", func() bool { // the first holder may take the partition back before that
			var err error
			done, err = other.Deliver(t.Context(), &bad)
			return err == nil
		})
		require.Equal(t, consumer.Delivered{Parked: 1}, done)
		h.produceRecords(&kgo.Record{Key: bad.Key, Value: bad.Value, Headers: bad.Headers})
		h.produceKeyed("a:1", "b:2")
		h.untilHandled(4, stop)
		require.Equal(t, []string{"b:1", "b:2"}, h.values())
		require.Equal(t, []string{"a:bad permanent parked", "a:1 behind behind"}, h.parked())
	})
}

// Property: state='retry' on a message that waits behind another one of its key does not make it
// overtake: it waits, and runs after that one, even if its own retry time is later than that of the
// one before it.
func TestRetryBehindAHeadDoesNotOvertake(t *testing.T) {
	t.Parallel()
	each(t, orders, func(t *testing.T, h *harness, _ string, settings func(*consumer.Config)) {
		t.Helper()
		var repaired atomic.Bool
		h.produceKeyed("a:bad", "a:1", "a:2", "a:3", "b:bad", "b:1", "b:2")
		stop := h.run(failing(&repaired), settings)
		h.waitHandled(7)
		h.exec(`UPDATE effectonce.parked_messages SET state = 'retry' WHERE convert_from(payload, 'UTF8') IN ('a:2', 'a:3')`)
		h.produceKeyed("c:bad")
		h.waitHandled(8)
		repaired.Store(true)
		h.exec(`UPDATE effectonce.parked_messages SET state = 'retry' WHERE convert_from(payload, 'UTF8') = 'c:bad'`)
		h.wait("a later order is carried out", func() bool { return slices.Contains(h.values(), "c:bad") })
		require.Equal(t, []string{"c:bad"}, h.values())
		h.exec(`UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp() + interval '2 s' WHERE convert_from(payload, 'UTF8') = 'b:1'`)
		h.exec(`UPDATE effectonce.parked_messages SET state = 'retry' WHERE convert_from(payload, 'UTF8') IN ('a:bad', 'b:bad')`)
		h.untilEffects(8, stop)
		require.Equal(t, []string{"a:bad", "a:1", "a:2", "a:3"}, of("a", strings.Join(h.values(), " ")))
		require.Equal(t, []string{"b:bad", "b:1", "b:2"}, of("b", strings.Join(h.values(), " ")))
		require.Empty(t, h.parked())
	})
}

// Property: with OrderUnordered a message that an operator retries is handled alone: it neither waits
// for an earlier one of its key that stays parked, nor takes a later one along.
func TestUnorderedRetryWaitsForNoOther(t *testing.T) {
	t.Parallel()
	each(t, map[string]string{"a:1bad": "a:2bad", "a:2bad": "a:1bad"}, func(t *testing.T, h *harness, retried, stays string) {
		t.Helper()
		var repaired atomic.Bool
		h.produceKeyed("a:1bad", "a:2bad")
		stop := h.run(failing(&repaired), parallel(consumer.OrderUnordered))
		h.waitParked("permanent", "permanent")
		repaired.Store(true)
		h.exec(fmt.Sprintf(`UPDATE effectonce.parked_messages SET state = 'retry' WHERE convert_from(payload, 'UTF8') = '%s'`, retried))
		h.untilEffects(1, stop)
		require.Equal(t, []string{stays + " permanent parked"}, h.parked())
	})
}

// operator deletes and retries parked messages by plain SQL, at random, and records what it
// deleted.
func (h *harness) operator(ctx context.Context, seed uint64, keys int) error {
	random := rand.New(rand.NewPCG(seed, 0))
	remove := `WITH gone AS (DELETE FROM effectonce.parked_messages WHERE %s RETURNING payload) INSERT INTO discarded SELECT convert_from(payload, 'UTF8') FROM gone`
	for ctx.Err() == nil {
		key := fmt.Sprintf("convert_from(key, 'UTF8') = 'k%d'", random.IntN(keys))
		some := fmt.Sprintf("%s AND seq %% 5 = %d", key, random.IntN(5))
		var sql string
		switch random.IntN(7) {
		case 0:
			sql = fmt.Sprintf(remove, "seq = (SELECT min(seq) FROM effectonce.parked_messages WHERE "+key+")")
		case 1:
			sql = fmt.Sprintf(remove, some+" AND state = 'behind'")
		case 2:
			sql = fmt.Sprintf(remove, some)
		case 3:
			sql = fmt.Sprintf(remove, key)
		case 4:
			sql = `UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp() WHERE ` + some
		default:
			sql = `UPDATE effectonce.parked_messages SET state = 'retry' WHERE state = 'parked' AND ` + key
		}
		level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead}[random.IntN(2)]
		err := pgx.BeginTxFunc(ctx, h.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `SELECT pg_sleep($1), count(*) FROM discarded`, random.Float64()*0.02); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, random.Float64()*0.01)
			return err
		})
		if code := state(err); err != nil && ctx.Err() == nil && code != "40001" && code != "40P01" {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

// Property: operators delete and retry parked messages by plain SQL, in any order and at any
// isolation level, while a consumer parks and retries messages of the same keys: nothing gets
// stuck, the order of each key holds, and each message has one effect or was discarded.
func TestHeldKeysUnderFire(t *testing.T) {
	longtest.Only(t, "operators at random moments")
	t.Parallel()
	for name, settings := range orders {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
			if name != "by partition" && level != pgx.ReadCommitted {
				continue // New refuses it
			}
			t.Run(fmt.Sprintf("%s, %s", name, level), func(t *testing.T) {
				t.Parallel()
				underFire(t, func(c *consumer.Config) {
					settings(c)
					c.Isolation, c.ParkShareMax = level, 1
				})
			})
		}
	}
}

func underFire(t *testing.T, settings func(*consumer.Config)) {
	t.Helper()
	h := newHarness(t, 1)
	h.exec(`CREATE TABLE discarded (value text)`)
	const keys, rounds, perRound = 5, 10, 6
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var repaired atomic.Bool
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !repaired.Load() && rand.IntN(4) == 0 {
			return consumer.Permanent(errBad)
		}
		return effect(ctx, tx, msg)
	}), settings)
	working, end := context.WithCancel(t.Context())
	defer end()
	var operators sync.WaitGroup
	failed := make(chan error, 2)
	for i := range uint64(2) {
		operators.Go(func() { failed <- h.operator(working, seed+i, keys) })
	}
	for round := range rounds {
		h.produceKeyed(versions(keys, round*perRound, (round+1)*perRound)...)
		h.waitHandled((round + 1) * keys * perRound)
	}
	end()
	operators.Wait()
	require.NoError(t, <-failed)
	require.NoError(t, <-failed)
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.parked_messages p WHERE state = 'behind' AND NOT EXISTS
		(SELECT FROM effectonce.parked_messages f WHERE f.key = p.key AND f.seq < p.seq)`), "wait behind none")
	repaired.Store(true)
	h.wait("nothing is parked", func() bool {
		h.retry()
		return len(h.parked()) == 0
	})
	require.NoError(t, stop())
	require.Equal(t, keys*rounds*perRound, h.number(`SELECT count(DISTINCT value) FROM (SELECT value FROM effects UNION ALL SELECT value FROM discarded) AS x`))
	require.Equal(t, keys*rounds*perRound, h.number(`SELECT count(value) FROM (SELECT value FROM effects UNION ALL SELECT value FROM discarded) AS x`))
	require.Zero(t, inversions(h))
	t.Logf("%d were discarded", h.number(`SELECT count(*) FROM discarded`))
}
