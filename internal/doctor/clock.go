package doctor

import (
	"context"
	"time"
)

// clockMax is how far clocks that are kept by NTP never are apart.
const clockMax = time.Second

// Clock compares the database's clock with this machine's. Leases, ages and retention use the database's; but records
// carry the time of the machine that publishes them, and dedup windows are compared with it.
func Clock(ctx context.Context, db Querier) []Finding {
	var theirs time.Time
	before := time.Now()
	if err := db.QueryRow(ctx, clockSQL).Scan(&theirs); err != nil {
		return broken("clock", err)
	}
	trip := time.Since(before)
	off := theirs.Sub(before.Add(trip / 2)).Abs().Round(time.Millisecond)
	if off-trip/2 > clockMax {
		return []Finding{warn("clock", "chronyc tracking   # here and on the database's machine: NTP has to run on both",
			"the database's clock and this machine's differ by about %v: records get this machine's time, claims and leases the database's", off)}
	}
	return []Finding{ok("clock", "the clocks differ by about %v, within half a round trip of %v; only the database's decides", off, trip.Round(time.Millisecond))}
}
