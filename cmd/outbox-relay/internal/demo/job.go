package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/nodedup"
	"github.com/effectonce/effectonce/relay"
)

type role string

const (
	roleShop     role = "shop"
	roleRelay    role = "relay"
	roleConsumer role = "consumer"
)

// job is the task of a child. It is sent through the child's standard input.
type job struct {
	Options

	Run   string // the name of the schema, of the topic and of the group
	Name  string
	Role  role
	Start time.Time
}

// The limits are short, so that freezes longer than them fit into the run.
const (
	lease    = 2 * time.Second
	drainMax = 5 * time.Second
	// For a consumer: how often it sends heartbeats, how long it may finish a batch when its
	// partitions are revoked (less than the rebalance timeout, see below), and how long it waits
	// for an answer of the brokers beyond the time that they may take for it.
	heartbeat        = 500 * time.Millisecond
	consumerDrainMax = 800 * time.Millisecond
	answerMax        = 3 * time.Second
	idleTimeout      = 3 * time.Second
	lockTimeout      = 5 * time.Second
	retryMax         = time.Second
)

// rebalanceTimeout is how long a rebalancing group waits for a member that was killed or frozen. It
// is well below the session timeout: if a member's session ends while it waits for the others,
// kfake drops it without an answer, and the member would keep waiting for one.
func (j job) rebalanceTimeout() time.Duration { return j.Session / 2 }

// connectionsMax of a child: eight workers of the shop, or six partitions and some room.
const connectionsMax = 10

// RunProcess does the job of a child process until ctx is cancelled, and logs to logs. stdin
// carries the job and also connects the child to its parent: when it ends, the parent is gone and
// orphaned is called, which has to end the process at once.
func RunProcess(ctx context.Context, stdin io.Reader, logs io.Writer, orphaned func()) error {
	input := bufio.NewReader(stdin)
	var j job
	line, err := input.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &j)
	}
	if err != nil {
		return fmt.Errorf("this command is started by the demo, not by people: no job on standard input: %w", err)
	}
	go func() {
		// However the pipe ended, no parent remains that could stop this process.
		_, _ = io.Copy(io.Discard, input)
		orphaned()
	}()
	pool, err := j.pool(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	logger := slog.New(slog.NewTextHandler(logs, nil)).With("process", j.Name)
	switch j.Role {
	case roleShop:
		return runShop(ctx, pool, j)
	case roleRelay:
		return runRelay(ctx, pool, j, logger)
	case roleConsumer:
		return runConsumer(ctx, pool, j, logger)
	default:
		return errors.New("this command is started by the demo, not by people: unknown role")
	}
}

func (j job) pool(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(j.DatabaseURL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = connectionsMax
	return pgxpool.NewWithConfig(ctx, config)
}

func (j job) kafka() []kgo.Opt { return []kgo.Opt{kgo.SeedBrokers(j.Brokers...)} }

func runRelay(ctx context.Context, pool *pgxpool.Pool, j job, logger *slog.Logger) error {
	r, err := relay.New(pool, j.kafka(), relay.Config{
		Schema: j.Run, Owner: j.Name, Lease: lease, DrainMax: drainMax, Logger: logger,
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
	balance, effect := inShop(balanceSQL, j.Run), inShop(effectSQL, j.Run)
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
		Group: j.Run, Topics: []string{j.Run}, Schema: j.Run, Logger: logger,
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
