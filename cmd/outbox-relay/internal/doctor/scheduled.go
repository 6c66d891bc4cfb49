package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
)

// Scheduled are the scheduled messages that are not in the outbox yet.
type Scheduled struct {
	Count        int64 `json:"count"` // at most CountMax
	CountExact   bool  `json:"count_exact"`
	Overdue      int64 `json:"overdue"` // due and still there, at most CountMax
	OverdueExact bool  `json:"overdue_exact"`
	Refused      int64 `json:"refused"` // by the outbox, see their column refused; at most CountMax
	// OldestOverdueSeconds is the time since the first overdue or refused one was due; 0: there is none.
	OldestOverdueSeconds float64 `json:"oldest_overdue_seconds"`
}

// ReadScheduled counts scheduled messages.
func ReadScheduled(ctx context.Context, db operator.Querier, schema string) (Scheduled, error) {
	var s Scheduled
	if err := db.QueryRow(ctx, inSchema(scheduledSQL, schema), pipeline.CountMax+1).Scan(&s.Count, &s.Overdue, &s.Refused, &s.OldestOverdueSeconds); err != nil {
		return s, fmt.Errorf("count messages for later: %w", err)
	}
	s.CountExact, s.OverdueExact = s.Count <= pipeline.CountMax, s.Overdue <= pipeline.CountMax
	s.Count, s.Overdue, s.Refused = min(s.Count, pipeline.CountMax), min(s.Overdue, pipeline.CountMax), min(s.Refused, pipeline.CountMax)
	return s, nil
}

// age converts seconds to a duration, rounded for people.
func age(seconds float64) time.Duration {
	d := time.Duration(seconds * float64(time.Second))
	if d < 10*time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Second)
}
