package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/integration/torture"
	"github.com/effectonce/effectonce/outbox"
)

// textbook is the way of articles: a poller locks rows of the outbox with SKIP LOCKED, publishes them, and deletes
// them; a consumer has a transaction for each message, which inserts its ID, and does the work if that was new.
type textbook struct{}

const (
	rowsMax = 100
	polls   = 20 * time.Millisecond
	// retryAfter is the pause behind a message that fails.
	retryAfter = 100 * time.Millisecond
	// deliversMax bounds a produce, so that a poller which lost its network ends.
	deliversMax = 10 * time.Second
)

func (textbook) SetUp(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `CREATE TABLE public.processed (id text NOT NULL, consumer text NOT NULL, PRIMARY KEY (id, consumer))`)
	return err
}

func (textbook) Publish(ctx context.Context, tx pgx.Tx, m outbox.Message) error {
	return outbox.Publish(ctx, tx, m)
}

func (textbook) Relay(ctx context.Context, p *torture.Process) error {
	client, err := kgo.NewClient(append(p.Kafka, kgo.RecordDeliveryTimeout(deliversMax))...)
	if err != nil {
		return err
	}
	defer client.Close()
	for wait(ctx, polls) {
		for n := rowsMax; n == rowsMax && err == nil; {
			n, err = publishRows(ctx, p.Pool, client)
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

func publishRows(ctx context.Context, pool *pgxpool.Pool, client *kgo.Client) (n int, err error) {
	return n, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, `SELECT seq, id::text, topic, key, payload FROM effectonce.outbox ORDER BY seq LIMIT $1 FOR UPDATE SKIP LOCKED`, rowsMax)
		var seqs []int64
		var records []*kgo.Record
		var seq int64
		var id, topic string
		var key, payload []byte
		if _, err := pgx.ForEachRow(rows, []any{&seq, &id, &topic, &key, &payload}, func() error {
			header := kgo.RecordHeader{Key: outbox.HeaderMessageID, Value: []byte(id)}
			seqs, records = append(seqs, seq), append(records, &kgo.Record{Topic: topic, Key: key, Value: payload, Headers: []kgo.RecordHeader{header}})
			key, payload = nil, nil
			return nil
		}); err != nil {
			return err
		}
		n = len(seqs)
		if err := client.ProduceSync(ctx, records...).FirstErr(); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `DELETE FROM effectonce.outbox WHERE seq = ANY ($1)`, seqs)
		return err
	})
}

// Consume marks the offset of each message that was handled. One that fails is tried until it succeeds.
func (textbook) Consume(ctx context.Context, p *torture.Process, group string, topics []string, handle torture.Handle) error {
	client, err := kgo.NewClient(append(p.Kafka, kgo.ConsumerGroup(group), kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.AutoCommitMarks(), kgo.AutoCommitInterval(time.Second))...)
	if err != nil {
		return err
	}
	defer client.Close()
	for ctx.Err() == nil {
		for _, record := range client.PollFetches(ctx).Records() {
			for once(ctx, p.Pool, group, record, handle) != nil {
				if !wait(ctx, retryAfter) {
					return ctx.Err()
				}
			}
			client.MarkCommitRecords(record)
		}
	}
	return ctx.Err()
}

func once(ctx context.Context, pool *pgxpool.Pool, group string, record *kgo.Record, handle torture.Handle) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	var id string
	for _, header := range record.Headers {
		if header.Key == outbox.HeaderMessageID {
			id = string(header.Value)
		}
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		claimed, err := tx.Exec(ctx, `INSERT INTO public.processed VALUES ($1, $2) ON CONFLICT DO NOTHING`, id, group)
		if err != nil || claimed.RowsAffected() == 0 {
			return err
		}
		return handle(ctx, tx, record.Value)
	})
}

// wait reports whether ctx has not ended meanwhile.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
