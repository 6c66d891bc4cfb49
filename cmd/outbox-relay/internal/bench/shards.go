package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/relay"
)

// shardReplicas share the work.
const shardReplicas = 4

// shardLease is short, so that shards are soon distributed.
const shardLease = 2 * time.Second

// shardsJob drains a backlog by several replicas at once, all in one process.
type shardsJob struct {
	Name     string
	Shards   int
	Rows     int
	PageRows int // 0: the relay's default
}

// shardsRun counts what the replicas publish once the shards are distributed among them.
type shardsRun struct {
	shardsJob

	mu        sync.Mutex
	held      [shardReplicas]int // shards
	spread    time.Time          // since when every shard is held, by as many replicas as possible
	before    int64              // rows up to that time
	published int64
	done      context.CancelFunc
	last      time.Time
}

func (j *shardsJob) run(ctx context.Context, here *site) (*relayUsage, error) {
	used := &relayUsage{}
	var err error
	if used.RoundTripMillis, err = measureRoundTrip(ctx, here.DatabaseURL); err != nil {
		return nil, err
	}
	ctx, done := context.WithTimeoutCause(ctx, 10*time.Minute, errors.New("the replicas do not finish: this is a bug, please report it"))
	defer done()
	s := &shardsRun{shardsJob: *j, done: done}
	measure := begin()
	group, running := errgroup.WithContext(ctx)
	for i := range shardReplicas {
		group.Go(func() error { return s.replica(running, here, i) })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	measure.end(used)
	s.mu.Lock()
	defer s.mu.Unlock()
	used.Published = s.published
	counted := s.published - s.before
	switch {
	case s.published < int64(s.Rows):
		return nil, context.Cause(ctx)
	case s.spread.IsZero() || counted < int64(s.Rows)/10:
		return nil, fmt.Errorf("most rows were published before the %d shards were distributed among the replicas: use more rows", s.Shards)
	}
	used.RowsPerSecond = float64(counted) / s.last.Sub(s.spread).Seconds()
	return used, nil
}

func (s *shardsRun) replica(ctx context.Context, here *site, i int) error {
	pool, err := here.newPool(ctx, 8)
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := relay.New(pool, here.producer(), relay.Config{
		Schema: here.schema, Name: s.Name, Owner: fmt.Sprintf("replica %d", i+1), Shards: int16(s.Shards), Lease: shardLease, PageRowsMax: s.PageRows,
		Hooks: relay.Hooks{Published: s.count, Lease: func(_ int16, held bool) { s.lease(i, held) }},
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func (s *shardsRun) lease(replica int, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.published >= int64(s.Rows) {
		return // they release what they hold
	}
	if held {
		s.held[replica]++
	} else {
		s.held[replica]--
	}
	all, most := 0, 0
	for _, n := range s.held {
		all, most = all+n, max(most, n)
	}
	s.spread = time.Time{}
	if all == s.Shards && most == (s.Shards+shardReplicas-1)/shardReplicas {
		s.spread, s.before = time.Now(), s.published
	}
}

func (s *shardsRun) count(rows int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.published, s.last = s.published+rows, time.Now()
	if s.published >= int64(s.Rows) {
		s.done()
	}
}
