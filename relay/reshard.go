package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/migrations"
)

// ErrUnknownRelay is returned by SetShards for a relay that never ran.
var ErrUnknownRelay = errors.New("no relay of this name ever ran on this outbox")

// SetShards requests another number of shards, 1 to 256, and returns the present one. The relay
// changes it while it runs, or when it runs next. One replica takes all shards, publishes each up
// to one common tick and begins the new ones there, so that the rows of a key stay in order. Until
// then the old number counts. A later call, also for the old number, replaces the request. by.Who
// and by.Why are stored in operator_actions.
func SetShards(ctx context.Context, pool *pgxpool.Pool, by Operator, shards int16) (now int16, err error) {
	by, err = by.resolve()
	if shards < 1 || shards > shardsMax {
		err = errors.Join(err, fmt.Errorf("shards %d: want 1 to %d", shards, shardsMax))
	}
	if err != nil {
		return 0, err
	}
	err = pool.QueryRow(ctx, migrations.InSchema(wantShardsSQL, by.Schema), by.Relay, shards, by.Who, by.Why).Scan(&now)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, fmt.Errorf("relay %q: %w", by.Relay, ErrUnknownRelay)
	}
	return now, err
}

var errNoChange = errors.New("the change of the number of shards was withdrawn")

// reshard is a step of the change to another number of shards. The replica that holds shard 0 also
// takes all others, lets them run up to one tick, and replaces them.
func (m *member) reshard(ctx context.Context, s *standing, group *sync.WaitGroup, ended chan<- *worker) error {
	if m.workers[0] == nil {
		m.abandonCut(ctx)
		m.shed(0)
		for _, shard := range s.free {
			if shard == 0 && len(m.workers) == 0 {
				return m.acquireShards(ctx, []int16{0}, 1, group, ended)
			}
		}
		return nil
	}
	if len(m.workers) < int(s.shards) {
		m.abandonCut(ctx)
		return m.acquireShards(ctx, s.free, int(s.shards), group, ended)
	}
	if m.cut == nil {
		// A page that is being read may be behind a tick that is taken now: all workers rest first.
		all := true
		for _, w := range m.workers {
			all = w.publisher.course.rest() && all
		}
		if !all {
			return nil
		}
		cut, err := m.newCut(ctx)
		if err != nil {
			m.back(ctx, err)
			return nil
		}
		m.cut = cut
		m.cfg.Logger.InfoContext(ctx, "the number of shards changes: all shards are published up to one tick", "relay", m.cfg.Name, "shards", s.shards, "wanted", *s.wanted)
	}
	for _, w := range m.workers {
		w.publisher.course.endAt(m.cut)
	}
	for _, w := range m.workers {
		if !w.publisher.course.isOver() {
			return nil
		}
	}
	if err := m.cutOver(ctx); err != nil {
		m.abandonCut(ctx)
		m.back(ctx, err)
		return nil
	}
	m.cfg.Logger.InfoContext(ctx, "the number of shards changed", "relay", m.cfg.Name, "shards", *s.wanted)
	clear(m.workers)
	m.cut = nil
	return nil
}

// newCut takes a tick that is behind everything that the shards know. Each lease was taken by a
// transaction that has committed, after its seq was read: see progress.
func (m *member) newCut(ctx context.Context) (*tick, error) {
	ctx, cancel := m.brief(ctx)
	defer cancel()
	run := m.workers[0].lease.cluster.run
	var snapshot string
	var seqLast int64 // at first the floor, up to which an earlier snapshot has passed everything
	var same bool
	if err := m.pool.QueryRow(ctx, m.sql.snapshot, run, m.cfg.Name).Scan(&snapshot, &seqLast, &same); err != nil {
		return nil, fmt.Errorf("take a snapshot: %w", err)
	}
	if !same {
		return nil, errAnotherRun
	}
	for _, w := range m.workers {
		seqLast = max(seqLast, w.lease.seq)
	}
	cut, err := newTick(snapshot, seqLast)
	if err != nil {
		return nil, err
	}
	cut.run = run
	return cut, m.storeTick(ctx, m.pool, cut)
}

// cutOver replaces the shards at the cut, if this replica still holds each of them.
func (m *member) cutOver(ctx context.Context) error {
	ctx, cancel := m.brief(ctx)
	defer cancel()
	var shards []int16
	var epochs []int64
	for shard, w := range m.workers {
		shards, epochs = append(shards, shard), append(epochs, w.lease.epoch)
	}
	return m.transact(ctx, func(tx pgx.Tx) error {
		var held bool
		tag, err := tx.Exec(ctx, m.sql.lockShards, m.cfg.Name)
		if err != nil {
			return fmt.Errorf("lock the relay: %w", err)
		}
		if tag.RowsAffected() == 0 {
			return errNoChange
		}
		if err := tx.QueryRow(ctx, m.sql.allHeld, m.cfg.Name, shards, epochs, m.cut.id).Scan(&held); err != nil {
			return fmt.Errorf("check the shards: %w", err)
		}
		if !held {
			return errLeaseLost
		}
		batch := &pgx.Batch{}
		batch.Queue(m.sql.cutOver, m.cfg.Name, m.cut.id)
		batch.Queue(m.sql.dropShards, m.cfg.Name)
		batch.Queue(m.sql.shardsDone, m.cfg.Name)
		return tx.SendBatch(ctx, batch).Close()
	})
}

// abandonCut withdraws a cut. It releases shards that wait at it, so that they can be published
// further.
func (m *member) abandonCut(ctx context.Context) {
	for _, w := range m.workers {
		w.publisher.course.goOn()
	}
	if m.cut == nil {
		return
	}
	m.cut = nil
	for shard, w := range m.workers {
		w.end()
		if w.publisher.course.isOver() {
			brief, cancel := m.brief(ctx)
			m.giveBack(brief, w.lease)
			cancel()
			delete(m.workers, shard)
		}
	}
}
