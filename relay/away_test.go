package relay_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// cut is a network that an outage interrupts.
type cut struct{ away atomic.Bool }

func (c *cut) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if c.away.Load() {
		return nil, errors.New("broker is away")
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, address)
	return &cutConn{Conn: conn, cut: &c.away}, err
}

// behindCut lets a relay run whose brokers are behind a network.
func behindCut(t *testing.T, pool *pgxpool.Pool, fake *kfake.Cluster, network *cut, cfg relay.Config) *relay.Relay {
	t.Helper()
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...), kgo.Dialer(network.dial), kgo.RetryTimeout(time.Second)}, cfg)
	require.NoError(t, err)
	starts(t, r)
	return r
}

// describe returns what the replicas say of themselves.
func describe(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return one[string](t, pool, `SELECT coalesce(string_agg(owner || ' ' || state, ', ' ORDER BY owner), '') FROM effectonce.outbox_replicas`)
}

func problems(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_replicas WHERE problem IS NOT NULL`)
}

// shares waits until the replicas have as many shards each.
func shares(t *testing.T, pool *pgxpool.Pool, want string) {
	t.Helper()
	testwait.Equal(t, want, "shares", func() string {
		return one[string](t, pool, `SELECT coalesce(string_agg(owner || ' ' || n, ', ' ORDER BY owner), '') FROM (
			SELECT owner, count(*) AS n FROM effectonce.outbox_progress WHERE lease_until > clock_timestamp() GROUP BY owner) s`)
	})
}

// problem is what one of them says.
func problem(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return one[string](t, pool, `SELECT coalesce(max(problem), '') FROM effectonce.outbox_replicas`)
}

// holder returns who holds each shard, under which epoch.
func holder(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return one[string](t, pool, `SELECT coalesce(string_agg(owner || ' ' || epoch, ', ' ORDER BY shard), '') FROM effectonce.outbox_progress WHERE lease_until > clock_timestamp()`)
}

// Property: while no replica reaches the brokers, each says that it waits for Kafka, none holds a
// lease, and the shard does not go around between them; when the brokers are back, one takes it and every
// row is published in order. Row O45 of guarantees.md.
func TestBrokerOutageIsWaitedOut(t *testing.T) {
	longtest.Only(t, "leases of real seconds")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake, network := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders")), &cut{}
		var said lockedBuffer
		for _, owner := range []string{"a", "b"} {
			cfg := relay.Config{Owner: owner, Lease: 4 * time.Second, ExactlyOnce: exactly, Logger: slog.New(slog.NewTextHandler(&said, nil))}
			behindCut(t, pool, fake, network, cfg)
		}
		insert(t, pool, "orders", "k", "0")
		testwait.True(t, "the first is published", func() bool { return len(valuesAt(t, fake, "orders")) == 1 })
		testwait.True(t, "both are known", func() bool {
			return strings.Count(describe(t, pool), ",") == 1 && !strings.Contains(describe(t, pool), "away")
		})
		testwait.True(t, "the shard has gone to the first by name", func() bool { return strings.HasPrefix(holder(t, pool), "a ") })
		network.away.Store(true)
		// What has reached the brokers is waited for there, and what has not is asked about.
		for i := 1; i < 20; i++ {
			insert(t, pool, "orders", "k", fmt.Sprint(i))
		}
		insert(t, pool, "payments", "k", "missing")
		testwait.True(t, "both say what they wait for", func() bool { return describe(t, pool) == "a kafka_away, b kafka_away" })
		epoch := func() int64 { return one[int64](t, pool, `SELECT epoch FROM effectonce.outbox_progress`) }
		before := epoch()
		_, err := pool.Exec(t.Context(), `SELECT pg_sleep(12)`) // three leases, by the database's clock
		require.NoError(t, err)
		require.Empty(t, holder(t, pool))
		require.Equal(t, before, epoch())
		require.Contains(t, one[string](t, pool, `SELECT max(problem) FROM effectonce.outbox_replicas`), "broker is away")
		network.away.Store(false)
		testwait.True(t, "all is published", func() bool { return len(distinctInOrder(valuesAt(t, fake, "orders"))) == 20 })
		testwait.True(t, "they say so", func() bool { return !strings.Contains(describe(t, pool), "away") && problems(t, pool) == 0 })
		require.LessOrEqual(t, strings.Count(said.String(), "waiting for Kafka"), 2*3, said.String())
		require.NotContains(t, said.String(), "relay interrupted")
	})
}

// Property: brokers that answer and take no rows, as with too few replicas in sync, cost no lease: the
// client keeps the rows and tries again, the replica says so, and none is published twice. Row O45 of
// guarantees.md.
func TestBrokersThatOnlyRefuseAreWaitedFor(t *testing.T) {
	longtest.Only(t, "leases of real seconds")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		var short atomic.Bool
		onProduce(fake, func([]byte) error {
			if short.Load() {
				return kerr.NotEnoughReplicas
			}
			return nil
		})
		for _, owner := range []string{"a", "b"} {
			behindCut(t, pool, fake, &cut{}, relay.Config{Owner: owner, Lease: 5 * time.Second, ExactlyOnce: exactly})
		}
		insert(t, pool, "orders", "k", "0")
		testwait.True(t, "the first is published", func() bool {
			return len(valuesAt(t, fake, "orders")) == 1 && describe(t, pool) == "a publishing, b standing_by"
		})
		before := holder(t, pool)
		short.Store(true)
		insert(t, pool, "orders", "k", "1")
		testwait.True(t, "it says what it waits for", func() bool {
			return strings.Contains(problem(t, pool), "not acknowledged")
		})
		must(t, pool, `SELECT pg_sleep(5)`)
		require.Equal(t, before, holder(t, pool))
		require.Equal(t, "a publishing, b standing_by", describe(t, pool))
		short.Store(false)
		testwait.True(t, "all is published", func() bool { return len(valuesAt(t, fake, "orders")) >= 2 })
		require.Equal(t, []string{"0", "1"}, valuesAt(t, fake, "orders"))
		require.Equal(t, before, holder(t, pool))
	})
}

// Property: a replica that is cut off from the brokers yields its shards, all of them, to one that
// reaches the brokers, and takes none back before it reaches them itself. Rows O5, O45 of
// guarantees.md.
func TestReplicaThatIsCutOffYields(t *testing.T) {
	longtest.Only(t, "leases of real seconds")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		networks := map[string]*cut{"a": {}, "b": {}}
		for _, owner := range []string{"a", "b"} {
			behindCut(t, pool, fake, networks[owner], relay.Config{Owner: owner, Lease: 3 * time.Second, ExactlyOnce: exactly, Shards: 3})
			testwait.True(t, "it has shards", func() bool { return strings.Contains(holder(t, pool), owner) })
		}
		shares(t, pool, "a 2, b 1")
		more := func(until int) {
			for i := until - 30; i < until; i++ {
				insert(t, pool, "orders", fmt.Sprint("k", i%9), fmt.Sprint(i))
			}
		}
		published := func() int { return len(distinctInOrder(valuesAt(t, fake, "orders"))) }
		more(30)
		testwait.True(t, "they know the topic", func() bool { return published() == 30 })
		networks["a"].away.Store(true)
		more(60)
		shares(t, pool, "b 3")
		testwait.True(t, "the other publishes them", func() bool { return published() == 60 })
		held := holder(t, pool)
		testwait.True(t, "both say so", func() bool { return describe(t, pool) == "a kafka_away, b publishing" })
		must(t, pool, `SELECT pg_sleep(4)`)
		require.Equal(t, held, holder(t, pool), "nothing changes hands meanwhile")
		networks["a"].away.Store(false)
		shares(t, pool, "a 2, b 1")
	})
}

// Property: a replica with a Sink takes its shard again and again while its
// receiver is away, and no other one does, however many there are; it says why its rows wait.
func TestSinkTriesAgain(t *testing.T) {
	longtest.Only(t, "leases of real seconds")
	t.Parallel()
	pool := pgtest.Pool(t)
	var away atomic.Bool
	var tries atomic.Int64
	sink := &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		if away.Load() {
			tries.Add(1)
			return 0, errors.New("receiver is away")
		}
		return len(messages), nil
	}}
	for _, owner := range []string{"a", "b"} {
		starts(t, newSinkRelay(t, pool, sink, relay.Config{Owner: owner, Lease: 2 * time.Second}))
	}
	insert(t, pool, "a", "k", "0")
	testwait.True(t, "it is published", func() bool { return len(sink.all()) == 1 })
	testwait.True(t, "both are known", func() bool {
		return describe(t, pool) == "a publishing, b standing_by" && strings.HasPrefix(holder(t, pool), "a ")
	})
	away.Store(true)
	insert(t, pool, "a", "k", "1")
	testwait.True(t, "it says what it waits for", func() bool {
		return one[string](t, pool, `SELECT coalesce(max(owner || problem), '') FROM effectonce.outbox_replicas`) == "ashard 0: hand rows to the sink: receiver is away"
	})
	for range 20 {
		must(t, pool, `SELECT pg_sleep(0.2)`)
		require.NotContains(t, holder(t, pool), "b ")
	}
	require.Less(t, tries.Load(), int64(20), "the pauses grow")
	away.Store(false)
	testwait.True(t, "it is published", func() bool { return len(sink.all()) == 2 })
	testwait.True(t, "nothing is wrong", func() bool { return problems(t, pool) == 0 })
}

// Property: a Sink that never returns for one shard of a replica costs that replica the shard: its
// lease is not renewed though the other worker renews its own, the log and the hook name it, and
// another replica publishes both shards. When the call returns after all, the replica shares again.
// Row O46 of guarantees.md.
func TestHungShardIsTakenOver(t *testing.T) {
	longtest.Only(t, "a lease of real seconds")
	t.Parallel()
	pool := pgtest.Pool(t)
	release := make(chan struct{})
	returns := sync.OnceFunc(func() { close(release) })
	defer returns()
	hangs := &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		if string(messages[0].Payload) == "poison" {
			<-release // whatever its context says
		}
		if string(messages[0].Payload) == "refused" {
			return 0, relay.Refuse(errors.New("never")) // the looks at dead rows say nothing of the work
		}
		return len(messages), nil
	}}
	var hung, held sync.Map // by shard
	is := func(m *sync.Map, shard int16) bool {
		v, _ := m.Load(shard)
		return v == true
	}
	hooks := relay.Hooks{Hung: func(shard int16, is bool) { hung.Store(shard, is) }, Lease: func(shard int16, is bool) { held.Store(shard, is) }}
	var said lockedBuffer
	starts(t, newSinkRelay(t, pool, hangs, relay.Config{Owner: "a", Shards: 2, Lease: 2 * time.Second, Hooks: hooks, Logger: slog.New(slog.NewTextHandler(&said, nil))}))
	shares(t, pool, "a 2")
	insert(t, pool, "a", "k2", "refused")
	testwait.True(t, "a row is dead", func() bool { return dead(t, pool) == 1 })
	insert(t, pool, "a", "k", "poison")
	shard := one[int16](t, pool, `SELECT shard % 2 FROM effectonce.outbox WHERE key = 'k'`)
	shares(t, pool, "a 1") // the other is kept: no other replica runs
	testwait.True(t, "the hook names it", func() bool { return is(&hung, shard) })
	testwait.True(t, "it says so", func() bool {
		return describe(t, pool) == "a stuck" && strings.Contains(said.String(), fmt.Sprintf("shard=%d", shard)) && strings.Contains(said.String(), "a shard hangs")
	})
	testwait.True(t, "it counts as lost", func() bool { return !is(&held, shard) && is(&held, 1-shard) })

	takes := &receiver{}
	starts(t, newSinkRelay(t, pool, takes, relay.Config{Owner: "b", Shards: 2, Lease: 2 * time.Second}))
	shares(t, pool, "b 2")
	insert(t, pool, "a", "k", "next")
	testwait.True(t, "and publishes", func() bool { return len(takes.all()) == 2 })
	require.Equal(t, []string{"poison", "next"}, takes.all())
	returns()
	testwait.True(t, "the first is well again", func() bool { return !is(&hung, shard) })
	shares(t, pool, "a 1, b 1")
}

// Property: if the outbox cannot be read, while the leases can be renewed, the relay does not wait
// forever: it logs that, retries, keeps its lease until then, and publishes when the outbox
// answers. Row O13 of guarantees.md.
func TestSilentReadIsGivenUp(t *testing.T) {
	longtest.Only(t, "limits of real seconds")
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	var silent, lost atomic.Int64
	interrupted := func(err error) {
		t.Log(err)
		if strings.Contains(err.Error(), "the database does not answer on this connection") {
			silent.Add(1)
		} else if strings.Contains(err.Error(), "lease lost") { // on a busy machine other statements are late, too
			lost.Add(1)
		}
	}
	r := newRelay(t, pool, relay.Config{Lease: 12 * time.Second, Keep: 100 * time.Millisecond, Hooks: relay.Hooks{Interrupted: interrupted}})
	r.SetPatience(2 * time.Second)
	stop := starts(t, r)
	insert(t, pool, topic, "k", "1")
	testwait.True(t, "a row is published", func() bool { return len(distinctInOrder(values(t, topic))) == 1 })
	lock := opened(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', '2')`, topic)
	must(t, lock, `LOCK TABLE effectonce.outbox IN ACCESS EXCLUSIVE MODE`)
	locked := one[time.Time](t, pool, `SELECT clock_timestamp()`)
	testwait.True(t, "it is said again and again", func() bool {
		must(t, pool, `SELECT pg_current_xact_id()`) // or no snapshot is new, and nothing needs to be read
		return silent.Load() >= 2
	})
	// Longer than a lease that is not renewed, by the database's clock.
	must(t, pool, `SELECT pg_sleep(extract(epoch FROM $1::timestamptz + interval '12 seconds' - clock_timestamp()))`, locked)
	require.NoError(t, lock.Commit(ctx))
	testwait.True(t, "the next row is published", func() bool { return len(distinctInOrder(values(t, topic))) == 2 })
	stop()
	require.Zero(t, lost.Load(), "the lease was lost, since the upkeep waited for the lock, too")
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
	becomes(t, pool, "they are forgotten", `SELECT count(*) <= 25000 FROM effectonce.outbox_ticks WHERE snapshot::text = '10:10:'`)
	require.Equal(t, 25000, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_ticks WHERE snapshot::text = '10:10:' AND created_at > clock_timestamp() - interval '10 minutes'`))
}
