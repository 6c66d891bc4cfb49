package consumers

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// Pause is a topic whose messages the consumers of a group do not handle.
type Pause struct {
	Group    string    `json:"group"`
	Topic    string    `json:"topic"`
	Who      string    `json:"who"`
	Why      string    `json:"why"`
	PausedAt time.Time `json:"paused_at"`
}

// Pauses returns the pauses of a group and a topic; nil is any.
func Pauses(ctx context.Context, db operator.Querier, schema string, group, topic *string) ([]Pause, error) {
	return operator.Rows(ctx, db, "read paused topics", schema, pausesSQL, pgx.RowToStructByPos[Pause], group, topic)
}

// PauseTopic makes the messages of a topic wait for a group, in Kafka. If the topic is already
// paused, that pause stays: PauseTopic returns it, and paused is false.
func PauseTopic(ctx context.Context, db operator.Beginner, schema string, by operator.By, group, topic string) (pause Pause, paused bool, err error) {
	err = change(ctx, db, "pause", func(tx pgx.Tx) error {
		if err := knows(ctx, tx, schema, group, topic); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, migrations.InSchema(pauseSQL, schema), group, topic, by.Who, by.Why)
		if err != nil {
			return err
		}
		found, err := Pauses(ctx, tx, schema, &group, &topic)
		if err != nil {
			return err
		}
		if len(found) > 0 { // empty: the pause was ended since then
			pause = found[0]
		}
		if paused = tag.RowsAffected() > 0; !paused {
			return nil
		}
		return operator.Note(ctx, tx, schema, by, "consumer.pause", map[string]any{"group": group, "topic": topic})
	})
	return pause, paused, err
}

// ResumeTopic ends a pause. resumed is false if there was none.
func ResumeTopic(ctx context.Context, db operator.Beginner, schema string, by operator.By, group, topic string) (resumed bool, err error) {
	err = change(ctx, db, "resume", func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, migrations.InSchema(resumeSQL, schema), group, topic)
		if err != nil {
			return err
		}
		// A pause may outlive the group's last consumer, so the pause is looked up first.
		if resumed = tag.RowsAffected() > 0; !resumed {
			return knows(ctx, tx, schema, group, topic)
		}
		return operator.Note(ctx, tx, schema, by, "consumer.resume", map[string]any{"group": group, "topic": topic})
	})
	return resumed, err
}
