package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Limits are the limits on the outbox. 0: no limit.
type Limits struct {
	Age   time.Duration
	Bytes int64
}

const backlogSQL = `-- doctor.backlog
SELECT coalesce(pg_catalog.max(oldest_seconds), 0)::float8, coalesce(pg_catalog.max(rows), 0)::bigint, coalesce(pg_catalog.max(bytes), 0)::bigint FROM effectonce.outbox_backlog`

// BacklogLimits checks how old the oldest waiting row is and how large the outbox is.
func BacklogLimits(ctx context.Context, db operator.Querier, schema string, limits Limits) []Finding {
	const check = "backlog"
	var oldest float64
	var rows, bytes int64
	if err := db.QueryRow(ctx, inSchema(backlogSQL, schema)).Scan(&oldest, &rows, &bytes); err != nil {
		return broken(check, err)
	}
	var found []Finding
	if limits.Age > 0 && oldest > limits.Age.Seconds() {
		found = append(found, warn(check, "outbox-relay status   # shows which relays run and which do not",
			"the oldest row has waited for %v, the limit is %v: about %s not published", age(oldest), limits.Age, human.Count(rows, "row")))
	}
	if limits.Bytes > 0 && bytes > limits.Bytes {
		found = append(found, warn(check, "outbox-relay doctor   # \"slots\", \"relays\" and \"transactions\" show what keeps rows",
			"the outbox takes %d MiB, the limit is %d MiB: about %s not published, the rest is published and kept", bytes>>20, limits.Bytes>>20, human.Count(rows, "row")))
	}
	if len(found) == 0 {
		waiting := "no rows waiting"
		if rows > 0 {
			waiting = fmt.Sprintf("about %s waiting, the oldest for %s", human.Count(rows, "row"), human.Seconds(oldest))
		}
		found = append(found, ok(check, "%s; the outbox takes %d MiB", waiting, bytes>>20))
	}
	return found
}
