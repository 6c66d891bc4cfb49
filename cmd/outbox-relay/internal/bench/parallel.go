package bench

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// reader is a client as the textbook has it: it reads committed records, from the start, and
// commits the offsets of marked records.
func (b *consumeBench) reader(l load, group string) (*kgo.Client, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(b.Brokers...),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(l.topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.AutoCommitMarks(),
		kgo.AutoCommitInterval(markEvery),
	)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	return client, nil
}

// perPartition reads a topic with a client of the usual settings. It passes the records of each
// partition, in order, to a goroutine of that partition, until done or the first error.
func (b *consumeBench) perPartition(ctx context.Context, l load, group string, work func(ctx context.Context, client *kgo.Client, records <-chan []*kgo.Record) error) error {
	client, err := b.reader(l, group)
	if err != nil {
		return err
	}
	defer client.Close()
	workers, ctx := errgroup.WithContext(ctx)
	queues := make([]chan []*kgo.Record, b.opts.Partitions)
	for i := range queues {
		queues[i] = make(chan []*kgo.Record, 1)
		workers.Go(func() error { return work(ctx, client, queues[i]) })
	}
	workers.Go(func() error {
		for {
			fetches := client.PollFetches(ctx)
			if ctx.Err() != nil {
				return nil //nolint:nilerr // everything is done
			}
			if err := fetches.Err(); err != nil {
				return fmt.Errorf("fetch: %w", err)
			}
			fetches.EachPartition(func(p kgo.FetchTopicPartition) {
				select {
				case queues[p.Partition] <- p.Records:
				case <-ctx.Done():
				}
			})
		}
	})
	return workers.Wait()
}

// textbookParallel is the textbook with a goroutine and a connection for each partition.
func (b *consumeBench) textbookParallel(ctx context.Context, l load, group string) (float64, error) {
	m := &meter{want: l.messages}
	err := b.perPartition(ctx, l, group, func(ctx context.Context, client *kgo.Client, queue <-chan []*kgo.Record) error {
		conn, closeConn, err := b.connect(ctx)
		if err != nil {
			return err
		}
		defer closeConn()
		for name, sql := range map[string]string{"claim": textbookClaimSQL, "effect": effectSQL} {
			if _, err := conn.Prepare(ctx, name, b.sql(sql)); err != nil {
				return fmt.Errorf("prepare: %w", err)
			}
		}
		for {
			select {
			case <-ctx.Done():
				return nil
			case records := <-queue:
				for _, record := range records {
					if ctx.Err() != nil {
						return nil
					}
					if err := handleTextbook(ctx, conn, group, record); err != nil {
						return fmt.Errorf("handle offset %d: %w", record.Offset, err)
					}
					client.MarkCommitRecords(record)
					if m.add(1) {
						return errAllDone
					}
				}
			}
		}
	})
	return m.after(err)
}

// after returns the rate of a run that ended because everything was done.
func (m *meter) after(err error) (float64, error) {
	if err != nil && err != errAllDone { //nolint:errorlint // it is never wrapped
		return 0, err
	}
	return m.rate()
}
