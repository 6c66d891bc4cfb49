package torture

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/relay"
)

// passed returns the offsets up to which all groups have handled the records of their topics.
func (r *run) passed(ctx context.Context) (kadm.Offsets, error) {
	rows, _ := r.pool.Query(ctx, `SELECT topic, partition, min(next_offset) FROM effectonce.consumer_positions WHERE NOT pg_is_in_recovery()
		GROUP BY topic, partition HAVING count(next_offset) = CASE WHEN topic = $1 THEN 1 ELSE 2 END`, topicChild)
	passed := kadm.Offsets{}
	var topic string
	var partition int32
	var next int64
	_, err := pgx.ForEachRow(rows, []any{&topic, &partition, &next}, func() error {
		passed.AddOffset(topic, partition, next, -1)
		return nil
	})
	return passed, err
}

// retention deletes the records that all groups have passed.
func retention(ctx context.Context, r *run, _ Fault) {
	if !r.plan.Retention {
		r.report.Faults--
		return
	}
	passed, err := r.passed(ctx)
	_, deleteErr := kadm.NewClient(r.client).DeleteRecords(ctx, passed)
	r.logger.Info("nemesis: retention", "up to", passed.KOffsets(), "error", errors.Join(err, deleteErr))
}

// restartTopic deletes a topic once all groups have handled what is in it, and creates it again.
func restartTopic(ctx context.Context, r *run, f Fault) {
	topic := []string{topicOrders, topicMore, topicChild}[f.Choice%3]
	r.restarting.Lock()
	done := r.crashing.TryLock() // the pause must not be lost
	if done {
		_, err := relay.Pause(ctx, r.pool, operator(), lease, topic)
		over := time.Now().Add(f.Lasts)
		for done = err == nil; done && !r.handled(ctx, topic); done = time.Now().Before(over) {
			pause.For(ctx, restartGap)
		}
		if done {
			r.recreate(ctx, topic)
		}
		r.crashing.Unlock()
	}
	if !done {
		r.report.Faults--
	}
	r.restarting.Unlock()
	r.resume(ctx, topic)
}

// handled reports whether all groups have handled what is in a topic.
func (r *run) handled(ctx context.Context, topic string) bool {
	admin := kadm.NewClient(r.client)
	stable, err := admin.ListCommittedOffsets(ctx, topic)
	ends, endsErr := admin.ListEndOffsets(ctx, topic)
	passed, passedErr := r.passed(ctx)
	if errors.Join(err, stable.Error(), endsErr, ends.Error(), passedErr) != nil {
		return false
	}
	begin := map[int32]kgo.Offset{}
	for partition := range int32(partitions) {
		end, _ := ends.Lookup(topic, partition)
		if s, _ := stable.Lookup(topic, partition); s.Offset != end.Offset {
			return false // there is an open transaction
		}
		begin[partition] = kgo.NewOffset().At(0)
		if p, known := passed.Lookup(topic, partition); known {
			begin[partition] = kgo.NewOffset().At(p.At)
		}
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(r.kafka.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: begin}), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return false
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	fetches := client.PollFetches(ctx)
	return fetches.NumRecords() == 0 && errors.Is(fetches.Err0(), context.DeadlineExceeded) // only ends of transactions are left
}

// recreate deletes a topic and creates it again. Positions begin anew.
func (r *run) recreate(ctx context.Context, topic string) {
	r.mu.Lock()
	for _, g := range r.groups {
		r.rewound[g.name]++
	}
	r.mu.Unlock()
	admin := kadm.NewClient(r.client)
	deleted, err := admin.DeleteTopics(ctx, topic)
	err = errors.Join(err, deleted.Error())
	for created := err != nil; !created && ctx.Err() == nil; pause.For(ctx, restartGap) {
		answer, createErr := admin.CreateTopic(ctx, partitions, 1, nil, topic)
		created = errors.Join(createErr, answer.Err) == nil // Kafka deletes in the background
	}
	r.logger.Info("nemesis: topic restarted", "topic", topic, "error", err)
}
