package demo

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/nodedup"
	"github.com/effectonce/effectonce/relay"
)

func runRelay(ctx context.Context, pool *pgxpool.Pool, j job, logger *slog.Logger) error {
	r, err := relay.New(pool, j.kafka(), relay.Config{
		Schema: j.Schema, Owner: j.Name, Lease: lease, DrainMax: drainMax, Logger: logger,
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// balanceSQL runs before the effect is inserted: it locks the row that orders a customer's effects,
// so that effects.sequence is commit order for the checker.
const balanceSQL = `-- demo.balance
UPDATE shop.balances SET balance = balance + $2 WHERE customer = $1`

const effectSQL = `-- demo.effect
INSERT INTO shop.effects (order_id, message_id, customer, version, amount, worker) VALUES ($1, $2, $3, $4, $5, $6)`

func runConsumer(ctx context.Context, pool *pgxpool.Pool, j job, logger *slog.Logger) error {
	balance, effect := inShop(balanceSQL, j.Schema), inShop(effectSQL, j.Schema)
	handler := consumer.JSON(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, order event) error {
		if _, err := tx.Exec(ctx, balance, order.Customer, order.Amount); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, effect, order.Order, msg.ID, order.Customer, order.Version, order.Amount, j.Name)
		return err
	})
	options := append(j.kafka(),
		kgo.SessionTimeout(j.Session), kgo.HeartbeatInterval(heartbeat), kgo.RebalanceTimeout(j.rebalanceTimeout()),
		kgo.RequestTimeoutOverhead(answerMax), kgo.MetadataMinAge(250*time.Millisecond))
	config := consumer.Config{
		Group: j.Group, Topics: []string{j.Topic}, Schema: j.Schema, Logger: logger,
		// A consumer that is frozen in the middle of a transaction holds claims and rows for this
		// long.
		IdleTimeout: idleTimeout, LockTimeout: lockTimeout, RetryMax: retryMax, DrainMax: consumerDrainMax,
	}
	if j.WithoutDedup {
		ctx = nodedup.With(ctx)
	}
	c, err := consumer.New(pool, options, handler, config)
	if err != nil {
		return err
	}
	return c.Run(ctx)
}
