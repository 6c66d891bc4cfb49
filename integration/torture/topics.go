package torture

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/relay"
)

// readMax is how long what is to be deleted may take to be read.
const readMax = 5 * time.Second

// passed returns the offsets up to which all groups have handled the records of their topics.
func (r *run) passed(ctx context.Context) (kadm.Offsets, error) {
	topics, topicsErr := kadm.NewClient(r.client).ListTopics(kadm.WithAuthorizedOps(ctx)) // not from memory
	rows, _ := r.pool.Query(ctx, `SELECT topic, topic_id, partition, min(next_offset) FROM effectonce.consumer_positions WHERE NOT pg_is_in_recovery()
		GROUP BY topic, topic_id, partition HAVING count(next_offset) = CASE WHEN topic = $1 THEN 1 ELSE 2 END`, topicChild)
	passed := kadm.Offsets{}
	var topic string
	var id [16]byte
	var partition int32
	var next int64
	_, err := pgx.ForEachRow(rows, []any{&topic, &id, &partition, &next}, func() error {
		if topics[topic].ID == id { // else the position is that of a topic that was restarted
			passed.AddOffset(topic, partition, next, -1)
		}
		return nil
	})
	return passed, errors.Join(topicsErr, err)
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

// overtake deletes the records of a topic, handled or not, and lets an operator resume at the first that is left.
func overtake(ctx context.Context, r *run, f Fault) {
	if !r.plan.Retention {
		r.report.Faults--
		return
	}
	deleted, err := r.mayBeMissing(ctx, f.topic())
	if err == nil {
		_, err = kadm.NewClient(r.client).DeleteRecords(ctx, deleted)
		r.later(ctx, f.Lasts, func() { statement(resumeHaltedSQL)(ctx, r, f) })
	} else {
		r.report.Faults--
	}
	r.logger.Info("nemesis: retention overtakes", "up to", deleted.KOffsets(), "error", err)
}

// mayBeMissing notes what is in a topic that not all groups have passed, and returns where it ends.
func (r *run) mayBeMissing(ctx context.Context, topic string) (kadm.Offsets, error) {
	waiting, ends, err := r.waiting(ctx, topic)
	if err != nil {
		return nil, err
	}
	var sources []string
	var ids []int64
	for _, e := range waiting {
		sources, ids = append(sources, e.Source), append(ids, e.ID)
	}
	_, err = r.pool.Exec(ctx, `INSERT INTO public.torture_overtaken SELECT * FROM unnest($1::text[], $2::bigint[]) ON CONFLICT DO NOTHING`, sources, ids)
	return ends.Offsets(), err
}

// waiting returns what is in a topic that not all groups have passed, and where its committed records end.
func (r *run) waiting(ctx context.Context, topic string) (waiting []event, ends kadm.ListedOffsets, _ error) {
	passed, err := r.passed(ctx)
	admin := kadm.NewClient(r.client)
	starts, startsErr := admin.ListStartOffsets(ctx, topic)
	ends, endsErr := admin.ListCommittedOffsets(ctx, topic)
	if err := errors.Join(err, startsErr, starts.Error(), endsErr, ends.Error()); err != nil {
		return nil, nil, err
	}
	from := map[int32]kgo.Offset{}
	ends.Each(func(end kadm.ListedOffset) {
		start, _ := starts.Lookup(topic, end.Partition)
		p, _ := passed.Lookup(topic, end.Partition)
		if at := max(start.Offset, p.At); at < end.Offset {
			from[end.Partition] = kgo.NewOffset().At(at)
		}
	})
	client, err := kgo.NewClient(kgo.SeedBrokers(r.kafka.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords()) // the last record may be one
	if err != nil {
		return nil, nil, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, readMax)
	defer cancel()
	for len(from) > 0 && ctx.Err() == nil {
		client.PollFetches(ctx).EachRecord(func(record *kgo.Record) {
			var e event
			if !record.Attrs.IsControl() && json.Unmarshal(record.Value, &e) == nil {
				waiting = append(waiting, e)
			}
			if end, _ := ends.Lookup(topic, record.Partition); record.Offset >= end.Offset-1 {
				delete(from, record.Partition)
			}
		})
	}
	return waiting, ends, ctx.Err()
}

// restartTopic deletes a topic once all groups have handled what is in it, and creates it again.
func restartTopic(ctx context.Context, r *run, f Fault) {
	topic := f.topic()
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
	waiting, stable, err := r.waiting(ctx, topic)
	ends, endsErr := kadm.NewClient(r.client).ListEndOffsets(ctx, topic)
	done := errors.Join(err, endsErr, ends.Error()) == nil && len(waiting) == 0
	ends.Each(func(end kadm.ListedOffset) {
		s, _ := stable.Lookup(topic, end.Partition)
		done = done && s.Offset == end.Offset // there is no open transaction
	})
	return done
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
