package consumer_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// allOrders are the settings of all orders.
var allOrders = map[string]func(*consumer.Config){
	"by partition": func(*consumer.Config) {},
	"by key":       parallel(consumer.OrderByKey),
	"unordered":    parallel(consumer.OrderUnordered),
}

// workerOrders are the orders in which a partition has workers.
var workerOrders = map[string]consumer.Order{"by key": consumer.OrderByKey, "unordered": consumer.OrderUnordered}

// dedups are the ways to know a message again.
var dedups = map[string]consumer.Dedup{"by ID": consumer.DedupByID, "by position": consumer.DedupByPosition}

// notesEpochs makes each COMMIT that has an effect or parks a message record the position's epoch.
const notesEpochs = `
CREATE TABLE commits (epoch bigint, value text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	INSERT INTO commits SELECT epoch, TG_TABLE_NAME FROM effectonce.consumer_positions; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER note AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note();
CREATE CONSTRAINT TRIGGER note AFTER INSERT ON effectonce.parked_messages DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note();`

// Property: a consumer whose partition was taken over while its handler worked commits nothing of
// it, neither an effect nor a parked message, whatever its order: otherwise later messages of its
// key could overtake it. When it holds the partition again, the message has its one outcome. Row
// C10.
func TestZombieOfEachOrderCommitsNothing(t *testing.T) {
	t.Parallel()
	for name, settings := range allOrders {
		bothModes(t, name+", parks", func(t *testing.T, parks bool) {
			t.Helper()
			zombieCommitsNothing(t, parks, settings)
		})
	}
}

func zombieCommitsNothing(t *testing.T, parks bool, settings func(*consumer.Config)) {
	t.Helper()
	h := newHarness(t, 1)
	if parks {
		h.rewind(0, "") // a position is stored from the beginning
	}
	h.exec(notesEpochs)
	var first atomic.Bool
	begun, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "a:0" {
			if first.CompareAndSwap(false, true) {
				close(begun)
				<-goOn
			}
			if parks {
				return consumer.Permanent(errBad)
			}
		}
		return effect(ctx, tx, msg)
	}), settings)
	h.waitNumber(1, `SELECT count(*) FROM effectonce.consumer_positions WHERE epoch > 0`)
	h.wait("its members are there", func() bool { return strings.Contains(h.log.String(), "partition assigned") })
	h.produceKeyed("a:0")
	<-begun
	taken := h.number(`UPDATE effectonce.consumer_positions SET epoch = epoch + 1, owner = 'another' RETURNING epoch`)
	release()
	h.produceKeyed("a:1", "b:0")
	h.untilHandled(3, stop)
	require.Zero(t, h.number(`SELECT count(*) FROM commits WHERE epoch = $1`, taken))
	require.Equal(t, 3, h.number(`SELECT (SELECT count(*) FROM effects) + (SELECT count(*) FROM effectonce.parked_messages)`))
	var cfg consumer.Config
	if settings(&cfg); cfg.Order != consumer.OrderUnordered {
		require.Zero(t, inversions(h))
	}
}

// failOver restarts the harness's server, like a standby that takes over, without some of its last
// commits. No consumer is connected before lose has run.
func failOver(t *testing.T, h *harness, cluster *servers.Postgres, lose string) {
	t.Helper()
	ctx := t.Context()
	admin := func(sql string) {
		conn, err := pgx.Connect(ctx, cluster.URL)
		require.NoError(t, err)
		defer func() { _ = conn.Close(ctx) }()
		_, err = conn.Exec(ctx, sql)
		require.NoError(t, err)
	}
	admin(`ALTER ROLE app NOLOGIN`)
	require.NoError(t, cluster.Kill(ctx))
	require.NoError(t, cluster.Restart(ctx))
	h.pool.Reset()
	admin(lose)
	admin(`ALTER ROLE app LOGIN`)
}

// appPool connects as a role that can be kept out.
func appPool(t *testing.T, h *harness) *pgxpool.Pool {
	t.Helper()
	h.exec(`CREATE ROLE app LOGIN SUPERUSER PASSWORD 'app'`)
	return h.poolWith(func(config *pgxpool.Config) { config.ConnConfig.User, config.ConnConfig.Password = "app", "app" })
}

// Property: a failover that loses the last commits loses and reorders nothing although the consumer
// continues to run: messages that it considers done, ahead of its stored position, are handled
// again. With workers the position does not show what was lost: a slow message holds it back. Row
// C32.
func TestFailoverBehindWorkersLosesNothing(t *testing.T) {
	longtest.Only(t, "six clusters with a standby each")
	t.Parallel()
	for name, settings := range allOrders {
		bothModes(t, name+", idle", func(t *testing.T, idle bool) {
			t.Helper()
			failOverBehind(t, name != "by partition" && !idle, name != "unordered", settings)
		})
	}
}

func failOverBehind(t *testing.T, slow, ordered bool, settings func(*consumer.Config)) {
	t.Helper()
	h, cluster := ownCluster(t)
	h.rewind(0, "") // a position is stored from the beginning
	pool := appPool(t, h)
	var holding atomic.Bool
	holding.Store(slow)
	begun := make(chan struct{}, 100)
	stop := h.runOn(pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if strings.HasPrefix(string(msg.Value), "slow:") && holding.Load() {
			begun <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) {
		settings(c)
		c.HandlerTimeout, c.AttemptsMax = 3*time.Second, 1000
	})
	h.wait("assigned", func() bool { return strings.Contains(h.log.String(), "partition assigned") })
	n := 40
	if slow {
		h.produceKeyed("slow:0")
		<-begun
		n++
	}
	for version := range 10 {
		h.produceKeyed(fmt.Sprintf("a:%d", version), fmt.Sprintf("b:%d", version), fmt.Sprintf("c:%d", version), fmt.Sprintf("d:%d", version))
	}
	h.wait("effects", func() bool { return h.number(`SELECT count(*) FROM effects`) == 40 })
	if !slow {
		h.waitHandled(40)
	}
	// What is lost is a suffix of the commits. The position is no later than the first of it: with
	// workers that may be a message of a lower offset than 20, whose commit came late.
	failOver(t, h, cluster, `
		WITH lost AS (DELETE FROM effects WHERE n > (SELECT max(n) - 8 FROM effects) RETURNING message_id, split_part(value, ':', 2)::int * 4 AS least),
			claims AS (DELETE FROM effectonce.processed_messages USING lost WHERE processed_messages.message_id = lost.message_id)
		UPDATE effectonce.consumer_positions SET next_offset = least(next_offset, 20, (SELECT min(least) FROM lost))`)
	holding.Store(false)
	h.wait("everything", func() bool {
		var effects int
		return h.pool.QueryRow(t.Context(), `SELECT count(*) FROM effects`).Scan(&effects) == nil && effects >= n
	})
	h.untilHandled(n, stop)
	require.Equal(t, n, h.number(`SELECT count(*) FROM effects`))
	require.Equal(t, n, h.number(`SELECT count(DISTINCT value) FROM effects`))
	if ordered {
		require.Zero(t, inversions(h))
	}
}

// freshEngine makes an engine whose handler fails at a second effect of a message.
func freshEngine(t *testing.T, cfg consumer.Config) (*consumer.Engine, *consumer.Position, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.PoolWith(t, "CREATE TABLE effects (value bytea PRIMARY KEY)")
	cfg.Group, cfg.Topics = "orders", []string{"orders"}
	engine := consumer.NewEngine(t, pool, consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue("INSERT INTO effects VALUES ($1)", msg.Value)
		return nil
	}), cfg)
	at, err := engine.Hold(t.Context(), 0)
	require.NoError(t, err)
	return engine, at, pool
}

// numbers from one up to another.
func numbers(from, to int) (list []int) {
	for n := from; n < to; n++ {
		list = append(list, n)
	}
	return list
}

// even are those whose IDs carry no time and depend on nothing else.
func even(from, to int) []int {
	return slices.DeleteFunc(numbers(from, to), func(n int) bool { return n%2 != 0 })
}

// Property: whichever form a batch begins with, each message has its effect once and is reported
// once. A batch that was taken as fresh and has a duplicate of an earlier batch begins again and
// drops it, and the following batches ask. A message that is twice in one batch needs no second
// form.
func TestABatchTakenAsFreshDropsItsDuplicates(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]consumer.Config{
		"read committed":  {},
		"repeatable read": {Isolation: pgx.RepeatableRead},
		"serializable":    {Isolation: pgx.Serializable},
		"forever":         {Forever: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			engine, at, pool := freshEngine(t, cfg)
			offset, total := int64(0), 0
			apply := func(fresh, duplicates, asks int, numbers ...int) {
				t.Helper()
				out, err := engine.ApplyNumbers(t.Context(), at, offset, false, numbers...)
				require.NoError(t, err)
				require.Equal(t, consumer.Outcome{Fresh: fresh, Duplicates: duplicates}, out)
				require.Equal(t, asks, at.Asks())
				offset, total = offset+int64(len(numbers)), total+fresh
				require.Equal(t, total, pgtest.Count(t, pool, "SELECT count(*) FROM effects"))
			}
			apply(50, 2, 0, append(numbers(0, 50), 8, 8)...) // asks; the next batch need not ask
			apply(50, 0, 0, numbers(50, 100)...)             // is taken as fresh
			apply(50, 50, 0, append(numbers(100, 150), slices.Repeat([]int{148}, 50)...)...)
			apply(50, 1, 20, append(numbers(150, 200), 98)...) // is refused
			for i := range 20 {
				apply(20, 0, 19-i, numbers(200+20*i, 220+20*i)...) // ask
			}
			apply(50, 0, 0, numbers(600, 650)...)
			apply(0, 50, 20, even(0, 100)...)
			apply(1, 0, 19, 651) // too few to be worth it
		})
	}
}

// Property: a message whose claim may have been forgotten is parked as expired in a batch that is
// taken as fresh, too, however recently the mark moved.
func TestABatchTakenAsFreshHeedsTheMark(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			engine, at, pool := freshEngine(t, consumer.Config{Isolation: level})
			_, err := engine.ApplyNumbers(t.Context(), at, 0, false, numbers(0, 50)...)
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), "UPDATE effectonce.consumers SET forgotten_to = clock_timestamp() + interval '1 hour'")
			require.NoError(t, err)
			out, err := engine.ApplyNumbers(t.Context(), at, 50, false, numbers(50, 100)...)
			require.NoError(t, err)
			require.Equal(t, consumer.Outcome{Parked: 50}, out)
			require.Zero(t, at.Asks())
		})
	}
}
