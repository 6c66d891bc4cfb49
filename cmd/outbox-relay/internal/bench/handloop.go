package bench

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// handBatchMax is the engine's default.
const handBatchMax = 500

// handLoop does what the engine does, by hand and for this one handler only: the same statements in
// the same round trips, and nothing else. Only the claim differs: it is ON CONFLICT, as a program
// without the engine would write it.
func (b *consumeBench) handLoop(ctx context.Context, l load, group string) (float64, error) {
	if _, err := b.pool.Exec(ctx, b.sql(handPositionsSQL), group, l.topic, b.opts.Partitions); err != nil {
		return 0, fmt.Errorf("make positions: %w", err)
	}
	m := &meter{want: l.messages}
	err := b.perPartition(ctx, l, group, func(ctx context.Context, client *kgo.Client, queue <-chan []*kgo.Record) error {
		conn, closeConn, err := b.connect(ctx)
		if err != nil {
			return err
		}
		defer closeConn()
		for {
			select {
			case <-ctx.Done():
				return nil
			case records := <-queue:
				for len(records) > 0 && ctx.Err() == nil {
					n := min(len(records), handBatchMax)
					if err := b.byHand(ctx, conn, group, records[:n]); err != nil {
						return err
					}
					client.MarkCommitRecords(records[n-1])
					if m.add(n) {
						return errAllDone
					}
					records = records[n:]
				}
			}
		}
	})
	return m.after(err)
}

func (b *consumeBench) byHand(ctx context.Context, conn *pgx.Conn, group string, records []*kgo.Record) error {
	ids, sorted := make([]uuid.UUID, len(records)), make([][16]byte, len(records))
	for i, record := range records {
		for _, header := range record.Headers {
			if header.Key == outbox.HeaderMessageID {
				id, err := uuid.ParseBytes(header.Value)
				if err != nil {
					return err
				}
				ids[i], sorted[i] = id, id
			}
		}
	}
	slices.SortFunc(sorted, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	fresh := make(map[uuid.UUID]bool, len(records))
	var oldest time.Time
	batch := &pgx.Batch{}
	batch.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	batch.Queue(b.sql(handGuardSQL))
	batch.Queue(handSettingsSQL, "30000", "10000", "30000")
	batch.Queue(b.sql(handClaimSQL), sorted, handConsumer).Query(func(rows pgx.Rows) error {
		var id [16]byte
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error { fresh[id] = true; return nil })
		return err
	})
	batch.Queue(b.sql(handAgeSQL)).QueryRow(func(row pgx.Row) error { return row.Scan(&oldest) })
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	batch = &pgx.Batch{}
	effect := b.sql(effectSQL)
	for i, record := range records {
		if fresh[ids[i]] && record.Timestamp.After(oldest) {
			batch.Queue(effect, string(record.Key), record.Value)
		}
	}
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	last := records[len(records)-1]
	batch = &pgx.Batch{}
	batch.Queue("CLOSE bench_guard")
	batch.Queue(b.sql(handAdvanceSQL), group, last.Topic, last.Partition, 1, nil, last.Offset+1, last.Timestamp)
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, batch).Close()
}
