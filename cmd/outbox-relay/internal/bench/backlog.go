package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// backlogWays are the variants that drain a backlog of each size, each in its own process.
func backlogWays(rows int) []struct {
	key string
	job relayJob
} {
	name := fmt.Sprintf("backlog-%d", rows)
	return []struct {
		key string
		job relayJob
	}{
		{"relay", relayJob{Name: name, Metrics: true, Heap: true}},
		{"gap_safe_cursor", relayJob{GapSafe: rows, Heap: true}},
		{"exactly_once", relayJob{Name: name + "-exactly-once", Metrics: true, Heap: true, ExactlyOnce: true}},
	}
}

// backlogs drains outboxes of several sizes: neither rate nor memory should depend on the size. The
// memory above an idle relay's is what the backlog takes.
func (b *relayBench) backlogs(ctx context.Context) error {
	if err := b.exec(ctx, "empty the outbox", emptyOutboxSQL); err != nil {
		return err
	}
	b.note("an idle relay, for its memory")
	idle, err := b.process(ctx, relayJob{Name: "backlog-idle", Metrics: true, Idle: time.Second})
	if err != nil {
		return fmt.Errorf("idle: %w", err)
	}
	for _, rows := range b.opts.BacklogRows {
		if err := b.exec(ctx, "empty the outbox", emptyOutboxSQL); err != nil {
			return err
		}
		if err := b.fill(ctx, rows); err != nil {
			return err
		}
		for round := range b.opts.Rounds {
			ways := backlogWays(rows)
			for i := range ways {
				way := ways[(i+round)%len(ways)]
				way.job.Name = fmt.Sprintf("%s-%d", way.job.Name, round)
				if err := b.backlog(ctx, rows, way.key, way.job, idle); err != nil {
					return fmt.Errorf("a backlog of %d rows: %s: %w", rows, way.key, err)
				}
			}
		}
	}
	return nil
}

func (b *relayBench) backlog(ctx context.Context, rows int, key string, job relayJob, idle *relayUsage) error {
	if err := errors.Join(b.emptyTopic(ctx), b.checkpoint(ctx)); err != nil {
		return err
	}
	found, err := b.process(ctx, job)
	if err != nil {
		return err
	}
	if found.Published != int64(rows) {
		return fmt.Errorf("%d of %d rows were published: this is a bug, the figures are void; please report it", found.Published, rows)
	}
	rate := float64(rows) / found.Seconds
	at := backlogKey(rows, key)
	b.samples.add(at, rate)
	line := fmt.Sprintf("%d rows, %s: %.0f rows/s", rows, key, rate)
	for name, value := range map[string]*float64{
		"cpu": perMillion(found.CPUSeconds, rows), "memory": found.MemoryMB,
		"memory_above": since(idle.ResidentMB, found.MemoryMB), "heap_above": since(idle.HeapMB, found.HeapMB),
	} {
		if value != nil {
			b.samples.add(at+name, *value)
		}
	}
	b.note("%s%s%s", line, noted(", memory above idle %.0f MB", since(idle.ResidentMB, found.MemoryMB)), noted(", heap above idle %.0f MB", since(idle.HeapMB, found.HeapMB)))
	return nil
}

func backlogKey(rows int, key string) string { return fmt.Sprintf("backlog/%d/%s/", rows, key) }

// shardCounts are measured with shardReplicas replicas.
func shardCounts() []int { return []int{1, 2, 4} }

// shards drains a backlog with several replicas, with PostgreSQL a round trip away.
func (b *relayBench) shards(ctx context.Context) error {
	if err := b.exec(ctx, "empty the outbox", emptyOutboxSQL); err != nil {
		return err
	}
	if err := b.fill(ctx, b.opts.ShardRows); err != nil {
		return err
	}
	d, address, err := newDistance(ctx, b.DatabaseURL, networkRoundTrip)
	if err != nil {
		return err
	}
	defer d.close()
	for round := range b.opts.Rounds {
		counts := shardCounts()
		for i := range counts {
			shards := counts[(i+round)%len(counts)]
			if err := errors.Join(b.emptyTopic(ctx), b.checkpoint(ctx)); err != nil {
				return err
			}
			found, err := b.process(ctx, relayJob{DatabaseURL: address, Shards: &shardsJob{
				Name: fmt.Sprintf("shards-%d-%d", shards, round), Shards: shards, Rows: b.opts.ShardRows, PageRows: b.opts.shardPageRows,
			}})
			if err != nil {
				return fmt.Errorf("%d shards: %w", shards, err)
			}
			b.samples.add(shardsKey(shards), found.RowsPerSecond)
			b.samples.add("shards/trip", found.RoundTripMillis)
			if cpu := perMillion(found.CPUSeconds, b.opts.ShardRows); cpu != nil {
				b.samples.add(shardsKey(shards)+"cpu", *cpu)
			}
			b.note("round %d: %d shards, %d replicas, round trip %.1f ms: %.0f rows/s", round+1, shards, shardReplicas, found.RoundTripMillis, found.RowsPerSecond)
		}
	}
	return nil
}

func shardsKey(shards int) string { return fmt.Sprintf("shards/%d/", shards) }
