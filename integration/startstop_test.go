package integration_test

import (
	"context"
	"math/rand/v2"
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
