package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Backlog is the part of the outbox that waits for a relay, without dead rows and messages for
// later.
type Backlog struct {
	// Oldest is the age of the oldest committed row that is not published, by the database's clock.
	// 0: no row waits.
	Oldest time.Duration
	// Rows is the number of waiting rows: an estimate from the sequence, usually too high. 0: no
	// row waits.
	Rows int64
	// Bytes is the size of the outbox on disk, including indexes, TOAST and the published rows that
	// relays keep.
	Bytes int64
}

// RowQuerier is a connection, a pool or a transaction.
type RowQuerier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// ReadBacklog reads the backlog of the default schema; see Outbox.ReadBacklog.
func ReadBacklog(ctx context.Context, db RowQuerier) (Backlog, error) {
	return standard.ReadBacklog(ctx, db)
}

// ReadBacklog returns the backlog, for a writer that slows down, or refuses work, before the disk
// is full. If several relays read the outbox, each number is the maximum over them. It reads a few
// index entries, however large the backlog, and is meant to be called once per second and process,
// not in each transaction. It needs SELECT on the view outbox_backlog, which exposes no rows of the
// outbox.
func (o *Outbox) ReadBacklog(ctx context.Context, db RowQuerier) (Backlog, error) {
	var b Backlog
	var seconds float64
	if err := db.QueryRow(ctx, o.backlog).Scan(&seconds, &b.Rows, &b.Bytes); err != nil {
		return b, fmt.Errorf("read the backlog of the outbox: %w", err)
	}
	b.Oldest = time.Duration(max(seconds, 0) * float64(time.Second))
	return b, nil
}
