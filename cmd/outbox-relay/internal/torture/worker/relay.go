package worker

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/relay"
)

func publish(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger) error {
	c := j.Scene.Relay
	r, err := relay.New(pool, j.Kafka(), relay.Config{
		Owner: j.Name, Lease: lease, DrainMax: 5 * time.Second, Logger: logger,
		Shards: c.Shards, ExactlyOnce: c.ExactlyOnce, ProgressTopic: j.Topic + "-progress",
		PageRowsMax: max(1, c.PageRows>>j.Variant), Keep: c.Keep, WakeOnNotify: c.Notify,
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}
