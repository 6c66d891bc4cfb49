package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// markEvery is how often the textbook's loop commits offsets to Kafka: as often as the engine.
const markEvery = time.Second

// textbook is the loop from articles about the idempotent consumer: for each message a transaction
// that inserts the ID, writes the effect if the ID was new, and commits; then the offset is marked.
// The statements are prepared once, and the client commits offsets in the background, once a
// second.
func (b *consumeBench) textbook(ctx context.Context, l load, group string) (float64, error) {
	conn, closeConn, err := b.Connect(ctx)
	if err != nil {
		return 0, err
	}
	defer closeConn()
	for name, sql := range map[string]string{"claim": textbookClaimSQL, "effect": effectSQL} {
		if _, err := conn.Prepare(ctx, name, b.sql(sql)); err != nil {
			return 0, fmt.Errorf("prepare: %w", err)
		}
	}
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
		return 0, fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	m := &meter{want: l.messages}
	for {
		fetches := client.PollFetches(ctx)
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return 0, fmt.Errorf("fetch: %w", err)
		}
		for _, record := range fetches.Records() {
			if err := handleTextbook(ctx, conn, group, record); err != nil {
				return 0, fmt.Errorf("handle offset %d: %w", record.Offset, err)
			}
			client.MarkCommitRecords(record)
			if m.add(1) {
				return m.rate()
			}
		}
	}
}

func handleTextbook(ctx context.Context, conn *pgx.Conn, group string, record *kgo.Record) error {
	var id string
	for _, header := range record.Headers {
		if header.Key == outbox.HeaderMessageID {
			id = string(header.Value)
		}
	}
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		claimed, err := tx.Exec(ctx, "claim", id, group)
		if err != nil || claimed.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, "effect", string(record.Key), record.Value)
		return err
	})
}
