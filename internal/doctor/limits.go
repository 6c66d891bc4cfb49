package doctor

import (
	"context"
	"time"
)

// Limits on the outbox. 0: none.
type Limits struct {
	Age   time.Duration
	Bytes int64
}

const backlogSQL = `-- doctor.backlog
SELECT coalesce(max(oldest_seconds), 0)::float8, coalesce(max(rows), 0)::bigint, coalesce(max(bytes), 0)::bigint FROM effectonce.outbox_backlog`

// BacklogLimits checks how old and how large the outbox is.
func BacklogLimits(ctx context.Context, db Querier, schema string, limits Limits) []Finding {
	const check = "backlog"
	var oldest float64
	var rows, bytes int64
	if err := db.QueryRow(ctx, inSchema(backlogSQL, schema)).Scan(&oldest, &rows, &bytes); err != nil {
		return broken(check, err)
	}
	var found []Finding
	if limits.Age > 0 && oldest > limits.Age.Seconds() {
		found = append(found, warn(check, "outbox-relay status   # who relays, and what does not",
			"the oldest row waits for %v, the limit is %v: about %d rows are not published", age(oldest), limits.Age, rows))
	}
	if limits.Bytes > 0 && bytes > limits.Bytes {
		found = append(found, warn(check, "outbox-relay doctor   # \"slots\", \"relays\" and \"transactions\" say what keeps rows",
			"the outbox takes %d MiB, the limit is %d MiB: about %d rows are not published, the others are kept", bytes>>20, limits.Bytes>>20, rows))
	}
	if len(found) == 0 {
		found = append(found, ok(check, "about %d rows wait, the oldest for %v; the outbox takes %d MiB", rows, age(oldest), bytes>>20))
	}
	return found
}
