package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/outbox"
)

// pollRows is the poller's batch: the best of 100, 300, 1,000, 3,000 and 10,000 rows.
const pollRows = 3000

// skipLocked is the poller of the textbook: lock a batch of waiting rows, produce them, delete
// them, commit. There is only one: a second would break the order of a key.
func (b *relayBench) skipLocked(ctx context.Context, _ int) error {
	conn, closeConn, err := b.Connect(ctx)
	if err != nil {
		return err
	}
	defer closeConn()
	client, err := kgo.NewClient(b.producer()...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	for more := true; more; {
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) (err error) {
			more, err = b.pollOnce(ctx, tx, client)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// pollOnce reports whether there were rows.
func (b *relayBench) pollOnce(ctx context.Context, tx pgx.Tx, client *kgo.Client) (bool, error) {
	page, places, err := readPage(ctx, tx, b.sql(pollSQL), pollRows)
	if err != nil || len(page) == 0 {
		return false, err
	}
	if err := client.ProduceSync(ctx, page...).FirstErr(); err != nil {
		return false, fmt.Errorf("produce: %w", err)
	}
	if _, err := tx.Exec(ctx, b.sql(publishedSQL), places); err != nil {
		return false, fmt.Errorf("delete published rows: %w", err)
	}
	return true, nil
}

// postgresEpoch is the zero of binary timestamps, in Unix microseconds.
const postgresEpoch = 946_684_800 * 1_000_000

// readPage makes the same records as the relay, and returns them with the places of their rows. As
// the relay, it reads values in binary form. The last argument of the statement is the number of
// rows.
func readPage(ctx context.Context, db operator.Querier, sql string, args ...any) (page []*kgo.Record, places []int64, err error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, nil, fmt.Errorf("read rows: %w", err)
	}
	defer rows.Close()
	n := args[len(args)-1].(int)
	page, places = make([]*kgo.Record, 0, n), make([]int64, 0, n)
	maker := record.NewMaker(n)
	for rows.Next() {
		v := rows.RawValues()
		var own []outbox.Header
		if string(v[5]) != "{}" {
			if own, err = outbox.DecodeHeaders(v[5]); err != nil {
				return nil, nil, fmt.Errorf("read a row's headers: %w", err)
			}
		}
		places = append(places, int64(binary.BigEndian.Uint64(v[0])))
		page = append(page, record.Make(maker, record.Row{
			ID: uuid.UUID(v[1]), Topic: string(v[2]), Key: bytes.Clone(v[3]), Payload: bytes.Clone(v[4]),
			CreatedAt: time.UnixMicro(int64(binary.BigEndian.Uint64(v[6])) + postgresEpoch),
		}, own))
	}
	if err := rows.Err(); err != nil {
		return nil, nil, fmt.Errorf("read rows: %w", err)
	}
	return page, places, nil
}
