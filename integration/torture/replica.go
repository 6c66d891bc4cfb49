package torture

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/relay"
)

const (
	session    = 3 * time.Second // of group members; a dead one blocks its partitions for so long
	lease      = 2 * time.Second // of relays
	restartGap = 200 * time.Millisecond
	// closeMax is how long a replica may take to end once it was stopped and its network works, or is dead.
	closeMax = 45 * time.Second
	// refusedBytes is the limit of the relay until it is repaired: padded messages die.
	refusedBytes = 2500
)

// replica stands for a process: a relay, a consumer or a service with its own pool, clients and network.
type replica struct {
	name  string
	start func(ctx context.Context) *replica // another process in its place
	wire  *wire
	stop  context.CancelFunc
	done  chan struct{}
}

// work runs one until ctx ends.
type work func(ctx context.Context, p *Process) error

func (r *run) startReplicas(ctx context.Context) {
	start := func(name string, number uint64, work work) {
		random := rand.New(rand.NewPCG(r.plan.Seed, 1000+number)) //nolint:gosec // repeatable
		var again func(ctx context.Context) *replica
		again = func(ctx context.Context) *replica {
			started := r.process(ctx, name, random, work)
			started.start = again
			return started
		}
		r.replicas = append(r.replicas, again(ctx))
	}
	for i := range uint64(2) {
		start("relay", i, r.relay)
		start("service", 500+i, func(ctx context.Context, p *Process) error {
			return r.serve(ctx, p.Pool, &r.doors[i])
		})
		for j, g := range r.groups {
			start(g.name, uint64(10*(j+1))+i, func(ctx context.Context, p *Process) error {
				return g.consume(ctx, p, g.configs[i])
			})
		}
	}
}

// process starts one. Like a supervisor it starts the work again when it ends with an error.
func (r *run) process(ctx context.Context, name string, random *rand.Rand, work work) *replica {
	ctx, stop := context.WithCancel(ctx)
	unheard := 0
	if random.IntN(2) == 0 {
		unheard = random.IntN(60)
	}
	p := &replica{name: name, wire: newWire(rand.New(rand.NewPCG(random.Uint64(), 0)), unheard, "commit", r.preparedCommit), stop: stop, done: make(chan struct{})} //nolint:gosec // repeatable
	config := r.pool.Config()
	config.MaxConns = int32(5 + random.IntN(8))
	config.ConnConfig.DialFunc = p.wire.dialer()
	config.ConnConfig.RuntimeParams["application_name"] = "torture " + name
	has := &Process{Brokers: r.kafka.Brokers, Dial: p.wire.dialer(r.kafka.Brokers...)}
	has.Kafka = []kgo.Opt{
		kgo.SeedBrokers(has.Brokers...), kgo.Dialer(has.Dial), kgo.SessionTimeout(session), kgo.HeartbeatInterval(session / 10),
		kgo.RebalanceTimeout(session + time.Second), kgo.MetadataMinAge(100 * time.Millisecond),
		kgo.RetryBackoffFn(func(int) time.Duration { return lookEvery * 10 }),
	}
	go func() {
		defer close(p.done)
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			r.broken("%s: %v", name, err)
			return
		}
		defer pool.Close()
		has.Pool = pool
		for ctx.Err() == nil {
			if err := work(ctx, has); err != nil && ctx.Err() == nil {
				r.logger.Error("replica ended", "name", name, "error", err)
				pause.For(ctx, restartGap)
			}
		}
	}()
	return p
}

func (g *group) consume(ctx context.Context, p *Process, config consumer.Config) error {
	if g.Rival != nil {
		return g.rivalConsumes(ctx, p)
	}
	config.Logger = g.logger.With("group", g.name)
	c, err := consumer.New(p.Pool, p.Kafka, g.handler(p.Pool), config)
	if err != nil {
		g.broken("%s: %v", g.name, err)
		return err
	}
	return c.Run(ctx)
}

func (r *run) relay(ctx context.Context, has *Process) error {
	if r.Rival != nil {
		return r.Rival.Relay(ctx, has)
	}
	config := relay.Config{
		RecordBytesMax: refusedBytes, Lease: lease, ExactlyOnce: r.plan.ExactlyOnce, Shards: r.plan.Shards, Logger: r.logger.With("relay", "default"),
		DrainMax: time.Second, ProgressEvery: 20 * time.Millisecond, InFlightBytesMax: 1 << 20, PageRowsMax: 200,
	}
	if r.repaired.Load() {
		config.RecordBytesMax = 0
	}
	if r.plan.Flooded {
		config.InFlightBytesMax, config.PageRowsMax = 0, 0
	}
	p, err := relay.New(has.Pool, has.Kafka, config)
	if err != nil {
		r.broken("relay: %v", err)
		return err
	}
	return p.Run(ctx)
}

// replace starts another process in the place of one that was told to end.
func (r *run) replace(ctx context.Context, i int) {
	r.gone = append(r.gone, r.replicas[i])
	r.replicas[i] = r.replicas[i].start(ctx)
}

// stopReplicas ends all of them, and waits.
func (r *run) stopReplicas() {
	all := append(r.gone, r.replicas...)
	r.gone, r.replicas = nil, nil
	for _, p := range all {
		p.wire.heal()
		p.stop()
	}
	over := time.After(closeMax)
	for _, p := range all {
		select {
		case <-p.done:
		case <-over:
			r.broken("%s does not end within %v of its stop", p.name, closeMax)
			return
		}
	}
}
