package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Backlog is what of the outbox waits for a relay. Dead rows and messages for later are not part of it.
type Backlog struct {
	// Oldest is the age of the oldest committed row that is not published, by the database's clock. 0: nothing waits.
	Oldest time.Duration
	// Rows is how many wait: an estimate from the sequence, rather too high. 0: nothing waits.
	Rows int64
	// Bytes is the size of the outbox on disk, with indexes, TOAST and the published rows that relays keep.
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

// ReadBacklog returns what waits, for a writer that slows down, or refuses work, before the disk is full. Where several relays
// read the outbox it is the most of each number. It costs some descents of indexes, whatever waits, and is meant for once a
// second and process, not for each transaction. It needs SELECT on the view outbox_backlog, which shows no row.
func (o *Outbox) ReadBacklog(ctx context.Context, db RowQuerier) (Backlog, error) {
	var b Backlog
	var seconds float64
	if err := db.QueryRow(ctx, o.backlog).Scan(&seconds, &b.Rows, &b.Bytes); err != nil {
		return b, fmt.Errorf("read the backlog of the outbox: %w", err)
	}
	b.Oldest = time.Duration(max(seconds, 0) * float64(time.Second))
	return b, nil
}
