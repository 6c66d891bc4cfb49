package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

const (
	textbookRowsMax = 100
	textbookPolls   = 20 * time.Millisecond
	textbookRetries = 100 * time.Millisecond
	// textbookDelivers bounds a produce, so that a poller which lost its network ends.
	textbookDelivers = 10 * time.Second
)

// textbookRelay is the poller of articles about the outbox: it locks rows with SKIP LOCKED, publishes
// them, and deletes them.
func (r *run) textbookRelay(ctx context.Context, pool *pgxpool.Pool, opts []kgo.Opt) error {
	client, err := kgo.NewClient(append(opts, kgo.RecordDeliveryTimeout(textbookDelivers))...)
	if err != nil {
		return err
	}
	defer client.Close()
	for pause.For(ctx, textbookPolls) {
		for n := textbookRowsMax; n == textbookRowsMax && err == nil; {
			n, err = publishRows(ctx, pool, client)
		}
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

func publishRows(ctx context.Context, pool *pgxpool.Pool, client *kgo.Client) (n int, err error) {
	return n, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, `SELECT seq, id::text, topic, key, payload FROM effectonce.outbox ORDER BY seq LIMIT $1 FOR UPDATE SKIP LOCKED`, textbookRowsMax)
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

// textbookConsume is the loop of articles about the idempotent consumer: a transaction for each message
// inserts its ID, and does the work if that was new; then the offset is marked. A message that fails is
// tried until it succeeds.
func (g *group) textbookConsume(ctx context.Context, pool *pgxpool.Pool, opts []kgo.Opt) error {
	client, err := kgo.NewClient(append(opts, kgo.ConsumerGroup(g.name), kgo.ConsumeTopics(g.Topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.AutoCommitMarks(), kgo.AutoCommitInterval(time.Second))...)
	if err != nil {
		return err
	}
	defer client.Close()
	for ctx.Err() == nil {
		for _, record := range client.PollFetches(ctx).Records() {
			for {
				err := g.textbookHandle(ctx, pool, record)
				if err == nil {
					break
				}
				g.logger.Warn("textbook", "group", g.name, "offset", record.Offset, "error", err)
				if !pause.For(ctx, textbookRetries) {
					return ctx.Err()
				}
			}
			client.MarkCommitRecords(record)
		}
	}
	return ctx.Err()
}

func (g *group) textbookHandle(ctx context.Context, pool *pgxpool.Pool, record *kgo.Record) (err error) {
	ctx, cancel := context.WithTimeout(ctx, g.config.HandlerTimeout)
	defer cancel()
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
	a := &attempt{group: g, pool: pool}
	if err := json.Unmarshal(record.Value, &a.event); err != nil {
		return err
	}
	a.number = g.count(a.Source, a.ID)
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		claimed, err := tx.Exec(ctx, `INSERT INTO public.torture_processed VALUES ($1, $2) ON CONFLICT DO NOTHING`, id, g.name)
		if err != nil || claimed.RowsAffected() == 0 {
			return err
		}
		a.tx = tx
		return errors.Join(a.handle(ctx), ctx.Err())
	})
}
