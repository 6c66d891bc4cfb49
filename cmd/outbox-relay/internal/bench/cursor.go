package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

// cursorRows is the page of the cursor, and cursorInFlight how many records may be unacknowledged.
const cursorRows, cursorInFlight = 5000, 50_000

// bareCursor reads by row number and produces without waiting. It is only an upper bound for the
// relay: it keeps no progress, and loses a transaction that commits late. As the relay does, it
// reads the next page while it sends.
func (b *relayBench) bareCursor(ctx context.Context, _ int) error {
	conn, closeConn, err := b.Connect(ctx)
	if err != nil {
		return err
	}
	defer closeConn()
	client, err := kgo.NewClient(append(b.producer(), kgo.MaxBufferedRecords(cursorInFlight))...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	ctx, fail := context.WithCancelCause(ctx)
	pages := make(chan []*kgo.Record, 1)
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(pages)
		if err := readPages(ctx, conn, b.sql(cursorSQL), pages); err != nil {
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
		for _, record := range page {
			client.Produce(ctx, record, promise) // waits while too many are unacknowledged
		}
	}
	return errors.Join(client.Flush(ctx), context.Cause(ctx))
}

// readPages stops at an empty page.
func readPages(ctx context.Context, conn *pgx.Conn, sql string, pages chan<- []*kgo.Record) error {
	for last := int64(0); ; {
		page, places, err := readPage(ctx, conn, sql, last, cursorRows)
		if err != nil || len(page) == 0 {
			return err
		}
		last = places[len(places)-1]
		select {
		case pages <- page:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
