package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
)

// PausedTopic is a topic whose rows wait until an operator resumes it.
type PausedTopic struct {
	Relay    string    `json:"relay"`
	Topic    string    `json:"topic"`
	Rows     int64     `json:"rows"` // rows that wait in outbox_dead, at most CountMax
	Who      string    `json:"who"`
	Why      string    `json:"why"`
	PausedAt time.Time `json:"paused_at"`
}

// readPausedTopics reads the paused topics, also those without waiting rows: their next row waits.
func (s *Status) readPausedTopics(ctx context.Context, db operator.Querier, schema, relay string) (err error) {
	s.PausedTopics, err = operator.Rows(ctx, db, "read paused topics", schema, pausedTopicsSQL, pgx.RowToStructByPos[PausedTopic], relay, pipeline.CountMax)
	if err != nil {
		return err
	}
	for _, p := range s.PausedTopics {
		waiting := "none of its rows wait"
		if p.Rows > 0 {
			waiting = human.Count(p.Rows, "row") + " in outbox_dead"
		}
		s.Notes = append(s.Notes, fmt.Sprintf("relay %q: topic %s is paused since %s by %s (%s), %s: to end the pause, run \"outbox-relay topics resume %s --relay %s\"",
			p.Relay, oneLine(p.Topic), p.PausedAt.UTC().Format(time.RFC3339), oneLine(p.Who), oneLine(p.Why), waiting, human.Word(p.Topic), human.Word(p.Relay)))
	}
	return nil
}

// deadProblem says what to do about the rows in outbox_dead. Rows of a paused topic, and rows behind
// them, only need the pause to end.
func (s *Status) deadProblem(r RelayStatus) string {
	dead, paused := sum(r.Dead), r.Dead["paused"]
	stopped := slices.ContainsFunc(s.PausedTopics, func(p PausedTopic) bool { return p.Relay == r.Relay })
	switch {
	case dead == 0:
	// The pause has ended: they are published by themselves.
	case !stopped && paused > 0 && paused+r.Dead["behind"] == dead:
	case paused > 0 && paused+r.Dead["behind"] == dead:
		return fmt.Sprintf("%s%s of paused topics in outbox_dead: the notes have the commands that publish them", atLeast(r.DeadExact), human.Count(dead, "row"))
	case paused > 0:
		return fmt.Sprintf("%s%s in outbox_dead: see \"outbox-relay dead list\"; %d more of paused topics: the notes have the commands that publish them", atLeast(r.DeadExact), human.Count(dead-paused, "row"), paused)
	default:
		return fmt.Sprintf("%s%s in outbox_dead: see \"outbox-relay dead list\"", atLeast(r.DeadExact), human.Count(dead, "row"))
	}
	return ""
}
