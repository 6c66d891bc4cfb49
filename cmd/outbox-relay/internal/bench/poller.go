package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// pollRows is the poller's batch: the best of 100, 300, 1,000, 3,000 and 10,000 rows.
const pollRows = 3000

// polled is a row of either table.
type polled struct {
	place   int64
	id      uuid.UUID
	topic   string
	key     []byte
	payload []byte
	headers string
	created time.Time
}

func scanPolled(row pgx.CollectableRow) (p polled, err error) {
	return p, row.Scan(&p.place, (*[16]byte)(&p.id), &p.topic, &p.key, &p.payload, &p.headers, &p.created)
}

// occurredLayout is the relay's layout: the records of all variants are the same.
const occurredLayout = "2006-01-02T15:04:05.000000Z"

// record makes the same record as the relay.
func (p *polled) record() (*kgo.Record, error) {
	own, err := outbox.DecodeHeaders([]byte(p.headers))
	if err != nil {
		return nil, fmt.Errorf("row %d: %w", p.place, err)
	}
	headers := make([]kgo.RecordHeader, 0, 2+len(own))
	headers = append(headers,
		kgo.RecordHeader{Key: outbox.HeaderMessageID, Value: []byte(p.id.String())},
		kgo.RecordHeader{Key: outbox.HeaderOccurredAt, Value: p.created.UTC().AppendFormat(nil, occurredLayout)})
	for _, h := range own {
		headers = append(headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
	}
	return &kgo.Record{Topic: p.topic, Key: p.key, Value: p.payload, Headers: headers}, nil
}

// skipLocked is the poller of the textbook: lock a batch of waiting rows, produce them, delete
// them, commit. There is only one: a second would break the order of a key.
func (b *relayBench) skipLocked(ctx context.Context, _ int) error {
	conn, closeConn, err := b.connect(ctx)
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
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			n, err := b.pollOnce(ctx, tx, client)
			more = n > 0
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *site) pollOnce(ctx context.Context, tx pgx.Tx, client *kgo.Client) (int, error) {
	result, err := tx.Query(ctx, b.sql(pollSQL), pollRows)
	if err != nil {
		return 0, fmt.Errorf("read rows: %w", err)
	}
	rows, err := pgx.CollectRows(result, scanPolled)
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	places, records := make([]int64, len(rows)), make([]*kgo.Record, len(rows))
	for i := range rows {
		places[i] = rows[i].place
		if records[i], err = rows[i].record(); err != nil {
			return 0, err
		}
	}
	if err := client.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return 0, fmt.Errorf("produce: %w", err)
	}
	if _, err := tx.Exec(ctx, b.sql(publishedSQL), places); err != nil {
		return 0, fmt.Errorf("delete published rows: %w", err)
	}
	return len(rows), nil
}
