package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// PausedTopic is one whose rows wait until an operator resumes it.
type PausedTopic struct {
	Relay    string    `json:"relay"`
	Topic    string    `json:"topic"`
	Rows     int64     `json:"rows"` // that wait in outbox_dead, at most CountMax
	Who      string    `json:"who"`
	Why      string    `json:"why"`
	PausedAt time.Time `json:"paused_at"`
}

// readPausedTopics names the topics that are paused, also those without rows: the next row of one waits.
func (s *Status) readPausedTopics(ctx context.Context, db Querier, schema, relay string) error {
	rows, err := db.Query(ctx, inSchema(pausedTopicsSQL, schema), relay, CountMax)
	if err != nil {
		return fmt.Errorf("read paused topics: %w", err)
	}
	if s.PausedTopics, err = pgx.CollectRows(rows, pgx.RowToStructByPos[PausedTopic]); err != nil {
		return fmt.Errorf("read paused topics: %w", err)
	}
	for _, p := range s.PausedTopics {
		waiting := "no rows of it wait"
		if p.Rows > 0 {
			waiting = fmt.Sprintf("%d rows of it wait in outbox_dead", p.Rows)
		}
		s.Notes = append(s.Notes, fmt.Sprintf("relay %q: topic %s is paused since %s by %s (%s), %s: \"outbox-relay topics resume %s --relay %s\" ends it",
			p.Relay, oneLine(p.Topic), p.PausedAt.UTC().Format(time.RFC3339), oneLine(p.Who), oneLine(p.Why), waiting, oneLine(p.Topic), oneLine(p.Relay)))
	}
	return nil
}

// judgeDead says what of the rows in outbox_dead is to be done. Those of a paused topic, and what is behind them, need
// nothing but its end.
func (s *Status) judgeDead(r RelayStatus) {
	var dead int64
	for _, n := range r.Dead {
		dead += n
	}
	paused := r.Dead["paused"]
	stopped := slices.ContainsFunc(s.PausedTopics, func(p PausedTopic) bool { return p.Relay == r.Relay })
	switch {
	case dead == 0:
	case !stopped && paused > 0 && paused+r.Dead["behind"] == dead: // they wait for the rate of their topic
	case paused > 0 && paused+r.Dead["behind"] == dead:
		s.problem(r, "%d rows wait in outbox_dead for paused topics: \"outbox-relay topics resume\" publishes them, \"topics list\" names the topics", dead)
	case paused > 0:
		s.problem(r, "%d rows in outbox_dead hold their keys: read their column error and mend the cause; %d more are of paused topics: \"outbox-relay topics resume\"", dead-paused, paused)
	default:
		s.problem(r, "%d rows in outbox_dead hold their keys: read their column error and mend the cause", dead)
	}
}
