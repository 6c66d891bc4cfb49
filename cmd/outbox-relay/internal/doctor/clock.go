package doctor

import (
	"context"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// clockMax is the largest difference expected between two clocks that NTP keeps.
const clockMax = time.Second

// Clock compares the database's clock with this machine's. Leases, ages and retention use the
// database's clock. But records carry the time of the machine that publishes them, and dedup
// windows are compared with that time.
func Clock(ctx context.Context, db operator.Querier) []Finding {
	var theirs time.Time
	before := time.Now()
	if err := db.QueryRow(ctx, clockSQL).Scan(&theirs); err != nil {
		return broken("clock", err)
	}
	trip := time.Since(before)
	off := theirs.Sub(before.Add(trip / 2)).Abs().Round(time.Millisecond)
	if off-trip/2 > clockMax {
		return []Finding{warn("clock", "chronyc tracking   # here and on the database's machine: run NTP on both",
			"the database's clock and this machine's differ by about %v: records carry this machine's time, claims and leases use the database's", off)}
	}
	if off == 0 {
		return []Finding{ok("clock", "the clocks agree within half a round trip of %v; only the database's clock is used for decisions", trip)}
	}
	return []Finding{ok("clock", "the clocks differ by about %v, within half a round trip of %v; only the database's clock is used for decisions", off, trip)}
}
