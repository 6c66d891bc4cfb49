package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: consumers that are stopped with SIGTERM, at whatever moment, leave nothing behind that
// has to come again: over all rounds each message is handled once and none is redelivered, also
// where a second member of the group gets the partitions. Row C42 of guarantees.md.
func TestCleanStopsRedeliverNothing(t *testing.T) {
	longtest.Only(t, "20 rounds of stops at random moments")
	t.Parallel()
	rounds := 20
	for _, protocol := range []string{cooperative, eager, serverSide} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			c, pool := consuming(t, child{Protocol: protocol, BatchMax: 7, SessionTimeout: 30 * time.Second}, 4)
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			random := rand.New(rand.NewPCG(seed, 0))
			versions := 100 * rounds
			producedAt(t, c.Brokers, pool, c.Topic, "k", 8, versions, 0)
			var stopped, members []*process
			for range rounds {
				members = append(members, start(t, c))
				enough := min(count(ctx, t, pool, `SELECT count(*) FROM effects`)+random.IntN(400), 8*versions)
				eventually(t, "effects go on", func() (bool, any) {
					n := count(ctx, t, pool, `SELECT count(*) FROM effects`)
					return n >= enough, fmt.Sprint(n, enough)
				})
				if len(members) > 1 || random.IntN(2) == 0 {
					require.NoError(t, members[0].terminate())
					stopped, members = append(stopped, members[0]), members[1:]
				}
			}
			members = append(members, start(t, c))
			handled(ctx, t, pool)
			for _, m := range members {
				require.NoError(t, m.terminate())
			}
			fresh, duplicates := totals(t, append(stopped, members...))
			require.Equal(t, 8*versions, fresh)
			require.Zero(t, duplicates, "redelivered")
		})
	}
}

// totals sums up what consumers said at their ends.
func totals(t *testing.T, stopped []*process) (fresh, duplicates int) {
	t.Helper()
	for _, p := range stopped {
		log := p.log.String()
		at := strings.Index(log, childTotals)
		if at < 0 {
			require.NotContains(t, log, "partition assigned") // stopped before it began
			continue
		}
		var f, d int
		_, err := fmt.Sscanf(log[at+len(childTotals)+1:], " fresh=%d duplicates=%d", &f, &d)
		require.NoError(t, err, log[at:])
		fresh, duplicates = fresh+f, duplicates+d
	}
	return fresh, duplicates
}

// Property: relay, consumer and completer return nil in time whenever they are stopped, also while they start, and can be started
// again at once; what was published meanwhile has its effect once. goleak sees what they leave behind.
func TestRunStoppedAtAnyMoment(t *testing.T) {
	longtest.Only(t, "stops at random moments")
	t.Parallel()
	const rounds, seed = 40, 16
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "orders"))
	kafka := []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}
	_, err := pool.Exec(t.Context(), `CREATE TABLE effects (message text)`)
	require.NoError(t, err)
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, string(msg.Value))
		return err
	})
	round := func(ctx context.Context) {
		t.Helper()
		r, err := relay.New(pool, kafka, relay.Config{Lease: time.Second})
		require.NoError(t, err)
		c, err := consumer.New(pool, kafka, handler, consumer.Config{Group: "g", Topics: []string{"orders"}, DrainMax: 5 * time.Second})
		require.NoError(t, err)
		op, err := idempotency.New(pool, idempotency.Config{Operation: "pay"})
		require.NoError(t, err)
		var group errgroup.Group
		group.Go(func() error { return r.Run(ctx) })
		group.Go(func() error { return c.Run(ctx) })
		group.Go(func() error { op.Run(ctx); return nil })
		ended := make(chan error, 1)
		go func() { ended <- group.Wait() }()
		<-ctx.Done()
		select {
		case err := <-ended:
			require.NoError(t, err)
		case <-time.After(testwait.Bound):
			t.Fatal("Run did not return at its context's end")
		}
	}
	random := rand.New(rand.NewPCG(seed, 0))
	for i := range rounds {
		_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', 'k', convert_to(gen_random_uuid()::text, 'UTF8') FROM generate_series(1, 5)`)
		require.NoError(t, err)
		ctx, stop := context.WithTimeout(t.Context(), time.Duration(random.Int64N(int64([]time.Duration{5 * time.Millisecond, 300 * time.Millisecond}[i%2]))))
		round(ctx)
		stop()
	}
	// The group may still have members that were stopped while they joined, for as long as a
	// rebalance may take.
	ctx, stop := context.WithTimeout(t.Context(), 5*time.Minute)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer stop()
		for count := 0; count < 5*rounds && pause.For(ctx, 20*time.Millisecond); {
			_ = pool.QueryRow(ctx, `SELECT count(*) FROM effects`).Scan(&count)
		}
	}()
	round(ctx)
	<-done
	var effects, distinct int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT message) FROM effects`).Scan(&effects, &distinct))
	require.Equal(t, []int{5 * rounds, 5 * rounds}, []int{effects, distinct})
}
