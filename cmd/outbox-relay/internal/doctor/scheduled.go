package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// overdueMax is how late a scheduled message may be: a relay looks every two seconds.
const overdueMax = time.Minute

// Scheduled are the scheduled messages that are not in the outbox yet.
type Scheduled struct {
	Count        int64 `json:"count"` // at most CountMax
	CountExact   bool  `json:"count_exact"`
	Overdue      int64 `json:"overdue"` // due and still there, at most CountMax
	OverdueExact bool  `json:"overdue_exact"`
	// OldestOverdueSeconds is the time since the first of them was due; 0: none is overdue.
	OldestOverdueSeconds float64 `json:"oldest_overdue_seconds"`
}

// ReadScheduled counts scheduled messages.
func ReadScheduled(ctx context.Context, db operator.Querier, schema string) (Scheduled, error) {
	var s Scheduled
	if err := db.QueryRow(ctx, inSchema(scheduledSQL, schema), CountMax+1).Scan(&s.Count, &s.Overdue, &s.OldestOverdueSeconds); err != nil {
		return s, fmt.Errorf("count messages for later: %w", err)
	}
	s.CountExact, s.OverdueExact = s.Count <= CountMax, s.Overdue <= CountMax
	s.Count, s.Overdue = min(s.Count, CountMax), min(s.Overdue, CountMax)
	return s, nil
}

// Later checks that scheduled messages move to the outbox when they are due.
func Later(ctx context.Context, db operator.Querier, schema string) []Finding {
	s, err := ReadScheduled(ctx, db, schema)
	if err != nil {
		return broken("scheduled", err)
	}
	late := age(s.OldestOverdueSeconds)
	if late <= overdueMax {
		return []Finding{ok("scheduled", "%s not due yet", human.Count(s.Count, "message"))}
	}
	table := pgx.Identifier{schema, "outbox_scheduled"}.Sanitize()
	return []Finding{warn("scheduled", "outbox-relay run   # a running one logs \"messages for later could not be moved\" with the cause; to see what locks their rows: "+
		"SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE pid IN (SELECT pid FROM pg_locks WHERE relation = "+literal(table)+"::regclass)",
		"messages for later: %d due and not in the outbox, the oldest for %v: no relay moves them", s.Overdue, late)}
}

// age converts seconds to a duration, rounded for people.
func age(seconds float64) time.Duration {
	d := time.Duration(seconds * float64(time.Second))
	if d < 10*time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Second)
}
