package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

// cursorRows is the page of a cursor, and cursorInFlight how many records may be unacknowledged.
const cursorRows, cursorInFlight = 5000, 50_000

// cursorPause is how long a cursor waits after it found nothing.
const cursorPause = time.Millisecond

// bareCursor reads by row number and produces without waiting. It is only an upper bound for the
// relay: it keeps no progress, and loses a transaction that commits late.
func (b *relayBench) bareCursor(ctx context.Context, _ int) error {
	_, err := b.cursor(ctx, cursorSQL, b.opts.Rows)
	return err
}

// gapSafeCursor reads the same rows, but only below the oldest open transaction, and so loses
// nothing.
func (b *relayBench) gapSafeCursor(ctx context.Context, _ int) error {
	_, err := b.cursor(ctx, gapSafeSQL, b.opts.Rows)
	return err
}

// cursor sends so many rows to Kafka and returns how many it sent. It is written for speed, as the
// relay is: it reads the next page while it sends, reads values in binary form, and allocates only
// a few times per page.
func (s *site) cursor(ctx context.Context, statement string, want int) (rows int64, err error) {
	conn, closeConn, err := s.connect(ctx)
	if err != nil {
		return 0, err
	}
	defer closeConn()
	client, err := kgo.NewClient(append(s.producer(), kgo.MaxBufferedRecords(cursorInFlight))...)
	if err != nil {
		return 0, fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	ctx, fail := context.WithCancelCause(ctx)
	pages := make(chan []kgo.Record, 1)
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(pages)
		if err := readPages(ctx, conn, s.sql(statement), want, pages); err != nil {
			fail(err)
		}
	}()
	defer func() {
		fail(nil)
		for range pages { // of a run that failed
		}
		<-read // the connection is free
	}()
	promise := func(_ *kgo.Record, err error) {
		if err != nil {
			fail(fmt.Errorf("produce: %w", err))
		}
	}
	for page := range pages {
		rows += int64(len(page))
		for i := range page {
			client.Produce(ctx, &page[i], promise) // waits while too many are unacknowledged
		}
	}
	return rows, errors.Join(client.Flush(ctx), context.Cause(ctx))
}

// readPages stops after the last wanted row. The gap-safe cursor may have to wait for that row
// until every older transaction on the server has ended.
func readPages(ctx context.Context, conn *pgx.Conn, sql string, want int, pages chan<- []kgo.Record) error {
	progress := time.Now()
	for rows, last := 0, int64(0); rows < want; {
		result, err := conn.Query(ctx, sql, last, cursorRows)
		if err != nil {
			return fmt.Errorf("read rows: %w", err)
		}
		page, place, err := readRecords(result)
		if err != nil {
			return fmt.Errorf("read rows: %w", err)
		}
		if len(page) == 0 {
			if time.Since(progress) > stallMax {
				return fmt.Errorf("%d of %d rows were to be read within %v: a transaction elsewhere on the server may be open", rows, want, stallMax)
			}
			if !pause.For(ctx, cursorPause) {
				return ctx.Err()
			}
			continue
		}
		rows, last, progress = rows+len(page), place, time.Now()
		select {
		case pages <- page:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// postgresEpoch is the zero of binary timestamps, in Unix microseconds.
const postgresEpoch = 946_684_800 * 1_000_000

// readRecords makes the same records as the relay, and returns the number of the last row.
func readRecords(result pgx.Rows) (page []kgo.Record, last int64, err error) {
	defer result.Close()
	page = make([]kgo.Record, 0, cursorRows)
	headers := make([]kgo.RecordHeader, 0, 2*cursorRows)
	var arena []byte
	topics := map[string]string{}
	var seconds occurred
	for result.Next() {
		v := result.RawValues()
		last = int64(binary.BigEndian.Uint64(v[0]))
		if need := len(v[3]) + len(v[4]) + 36 + len(occurredLayout); cap(arena)-len(arena) < need {
			arena = make([]byte, 0, max(need, 1<<20))
		}
		topic, known := topics[string(v[2])]
		if !known {
			topic = string(v[2])
			topics[topic] = topic
		}
		keep := func(bytes []byte) []byte {
			begin := len(arena)
			arena = append(arena, bytes...)
			return arena[begin:len(arena):len(arena)]
		}
		record := kgo.Record{Topic: topic}
		if v[3] != nil {
			record.Key = keep(v[3])
		}
		if v[4] != nil {
			record.Value = keep(v[4])
		}
		begin := len(arena)
		arena = appendID(arena, uuid.UUID(v[1]))
		id := arena[begin:len(arena):len(arena)]
		begin = len(arena)
		arena = seconds.append(arena, time.UnixMicro(int64(binary.BigEndian.Uint64(v[6]))+postgresEpoch))
		first := len(headers)
		headers = append(headers, kgo.RecordHeader{Key: outbox.HeaderMessageID, Value: id},
			kgo.RecordHeader{Key: outbox.HeaderOccurredAt, Value: arena[begin:len(arena):len(arena)]})
		if string(v[5]) != "{}" {
			own, err := outbox.DecodeHeaders(v[5])
			if err != nil {
				return nil, 0, fmt.Errorf("row %d: %w", last, err)
			}
			for _, h := range own {
				headers = append(headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
			}
		}
		record.Headers = headers[first:len(headers):len(headers)]
		page = append(page, record)
	}
	return page, last, result.Err()
}

func appendID(b []byte, id uuid.UUID) []byte {
	text, _ := id.MarshalText() // never fails
	return append(b, text...)
}

// occurred formats times. Consecutive rows mostly share their second.
type occurred struct {
	second int64
	text   []byte
}

func (o *occurred) append(b []byte, t time.Time) []byte {
	if second := t.Unix(); o.text == nil || second != o.second {
		o.second, o.text = second, t.UTC().AppendFormat(o.text[:0], occurredLayout[:len(occurredLayout)-len("000000Z")])
	}
	b = append(b, o.text...)
	micros := t.Nanosecond() / 1000
	for unit := 100_000; unit > 0; unit /= 10 {
		b = append(b, byte('0'+micros/unit%10))
	}
	return append(b, 'Z')
}
