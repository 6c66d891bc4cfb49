package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/migrations"
)

// PausedTopic is one whose rows wait, in outbox_dead.
type PausedTopic struct {
	Topic    string    `json:"topic"`
	Who      string    `json:"who"`
	Why      string    `json:"why"`
	PausedAt time.Time `json:"paused_at"`
}

// Pause lets the rows of topics wait, from the relay's next look on (a quarter of its Lease, 2.5 s at most): they move to
// outbox_dead, and what comes behind them in their keys, too. Other topics go on. who and why are kept in
// operator_actions. Topics that are paused already stay as they are; it returns those that were not.
func Pause(ctx context.Context, pool *pgxpool.Pool, schema, relay, who, why string, topics ...string) ([]string, error) {
	return changePaused(ctx, pool, pauseSQL, schema, relay, who, why, topics)
}

// Resume ends a pause: the rows are published in their order, and then what comes behind them. It returns the topics
// that were paused.
func Resume(ctx context.Context, pool *pgxpool.Pool, schema, relay, who, why string, topics ...string) ([]string, error) {
	return changePaused(ctx, pool, resumeSQL, schema, relay, who, why, topics)
}

func changePaused(ctx context.Context, pool *pgxpool.Pool, sql, schema, relay, who, why string, topics []string) ([]string, error) {
	schema, err := migrations.Options{Schema: schema}.Resolve()
	if len(topics) == 0 {
		err = errors.Join(err, errors.New("no topic is given"))
	}
	for _, topic := range topics {
		if !topicName.MatchString(topic) {
			err = errors.Join(err, fmt.Errorf("topic %.260q: Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens", topic))
		}
	}
	if err != nil {
		return nil, err
	}
	rows, err := pool.Query(ctx, migrations.InSchema(sql, schema), relay, topics, who, why)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// PausedTopics lists them by name.
func PausedTopics(ctx context.Context, pool *pgxpool.Pool, schema, relay string) ([]PausedTopic, error) {
	schema, err := migrations.Options{Schema: schema}.Resolve()
	if err != nil {
		return nil, err
	}
	rows, err := pool.Query(ctx, migrations.InSchema(pausedSQL, schema), relay)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[PausedTopic])
}
