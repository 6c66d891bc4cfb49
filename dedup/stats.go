package dedup

import (
	"context"
	"fmt"
	"time"
)

// Stats describes the space that claims take. Row counts come from the server's statistics and are
// not exact.
type Stats struct {
	// Claims and Bytes (table and index) are those of consumers that forget; BytesPerClaim is 0 if
	// there are too few rows for an average.
	Claims        int64   `json:"claims"`
	Bytes         int64   `json:"bytes"`
	BytesPerClaim float64 `json:"bytes_per_claim"`
	// Untimed are the claims of IDs without time, which are swept one by one.
	Untimed int64 `json:"untimed"`
	// Forever and ForeverBytes are those of consumers that never forget.
	Forever      int64 `json:"forever"`
	ForeverBytes int64 `json:"forever_bytes"`
	// OldestDay is the first day that has a partition, LastDay the last one.
	OldestDay time.Time `json:"oldest_day"`
	LastDay   time.Time `json:"last_day"`
	// MaintainedSeconds is how long ago claims were maintained; null: never.
	MaintainedSeconds *float64 `json:"maintained_seconds"`
	// HeldBack names the position that keeps claims beyond every window; empty: none does.
	HeldBack string `json:"held_back,omitempty"`
}

// bytesPerClaimMin is the number of rows from which an average is meaningful: small tables are
// mostly free space.
const bytesPerClaimMin = 10_000

// ReadStats reads the statistics from the catalog, which is cheap whatever the size of the tables.
func (c *Claims) ReadStats(ctx context.Context, db Querier) (*Stats, error) {
	var s Stats
	m := &maintenance{Claims: c}
	err := db.QueryRow(ctx, m.in(statsSQL)).Scan(&s.Claims, &s.Bytes, &s.Untimed, &s.Forever, &s.ForeverBytes, &s.MaintainedSeconds)
	if err != nil {
		return nil, fmt.Errorf("read the statistics of claims: %w", err)
	}
	days, err := m.days(ctx, db)
	if err != nil {
		return nil, err
	}
	if len(days) > 0 {
		s.OldestDay, s.LastDay = days[0].from.UTC(), days[len(days)-1].from.UTC()
	}
	_, err = m.behind(ctx, db)
	s.HeldBack = m.report.HeldBack
	if s.Claims >= bytesPerClaimMin {
		s.BytesPerClaim = float64(s.Bytes) / float64(s.Claims)
	}
	return &s, err
}
