package trace

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/migrations"
)

// ReplayOptions select what is published again.
type ReplayOptions struct {
	Schema, Relay string
	From          time.Time  // of created_at, inclusive
	To            *time.Time // of created_at, exclusive; nil: no end
	Topic         *string    // nil: all
	ToTopic       *string    // of the new rows, whose headers then ask for no partition; nil: the row's
	By            operator.By
}

// chosenSQL chooses the rows that the relay has published and Kafka has accepted, a row that was
// replayed before once. $1 to $6 are the cut, $7 and $8 the times, $9 the topic, $10 the relay.
const chosenSQL = `WITH ` + pipeline.CutCTE + `, chosen AS (
  SELECT pg_catalog.min(o.seq) AS seq FROM effectonce.outbox o ` + pipeline.CutJoin + `
  WHERE o.created_at >= $7 AND ($8::timestamptz IS NULL OR o.created_at < $8) AND ($9::text IS NULL OR o.topic = $9) AND ` + pipeline.CutPublished + `
    AND NOT EXISTS (SELECT FROM effectonce.outbox_dead d WHERE d.relay = $10 AND d.seq = o.seq)
  GROUP BY o.id, o.topic)`

const countSQL = `-- replay.count
` + chosenSQL + ` SELECT count(*) FROM chosen`

const insertSQL = `-- replay.insert
` + chosenSQL + ` INSERT INTO effectonce.outbox (id, topic, key, payload, headers, created_at)
SELECT o.id, coalesce($11::text, o.topic), o.key, o.payload, CASE WHEN $11::text IS NULL THEN o.headers ELSE o.headers - '` + record.HeaderPartition + `' END, o.created_at
FROM chosen JOIN effectonce.outbox o USING (seq) ORDER BY o.seq`

func (o *ReplayOptions) in(sql string) string { return migrations.InSchema(sql, o.Schema) }

func (o *ReplayOptions) args(ctx context.Context, db operator.Querier, more ...any) ([]any, error) {
	cut, err := pipeline.ReadCut(ctx, db, o.Schema, o.Relay)
	if err != nil {
		return nil, err
	}
	return cut.Args(append([]any{o.From, o.To, o.Topic, o.Relay}, more...)...), nil
}

// CountReplay returns how many rows Replay would publish again.
func CountReplay(ctx context.Context, db operator.DB, opts ReplayOptions) (rows int64, err error) {
	args, err := opts.args(ctx, db)
	if err != nil {
		return 0, err
	}
	if err := db.QueryRow(ctx, opts.in(countSQL), args...).Scan(&rows); err != nil {
		return 0, fmt.Errorf("count rows: %w", err)
	}
	return rows, nil
}

// Replay inserts the chosen rows into the outbox again, in their order and under their IDs, and records
// who did so, in one transaction: an error means that nothing was done, unless the connection broke
// during COMMIT. It takes until ctx ends at most, and then ends on the server, too.
func Replay(ctx context.Context, db operator.DB, opts ReplayOptions) (rows int64, err error) {
	err = operator.Change(ctx, db, func(tx pgx.Tx, _ time.Time) error {
		if end, ok := ctx.Deadline(); ok { // a long statement is expected here
			if _, err := tx.Exec(ctx, "SELECT pg_catalog.set_config('statement_timeout', $1, true)", fmt.Sprint(max(time.Until(end).Milliseconds(), 1))); err != nil {
				return err
			}
		}
		args, err := opts.args(ctx, tx, opts.ToTopic)
		if err != nil {
			return err
		}
		done, err := tx.Exec(ctx, opts.in(insertSQL), args...)
		if err != nil {
			return fmt.Errorf("insert into the outbox: %w", err)
		}
		if rows = done.RowsAffected(); rows == 0 {
			return nil
		}
		return operator.Note(ctx, tx, opts.Schema, opts.By, "replay",
			map[string]any{"relay": opts.Relay, "from": opts.From, "to": opts.To, "topic": opts.Topic, "to_topic": opts.ToTopic, "rows": rows})
	})
	if err != nil {
		return 0, err
	}
	return rows, nil
}
