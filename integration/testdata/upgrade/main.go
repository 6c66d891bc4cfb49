// Command upgrade is a consumer with effects and foreign calls. The tests of upgrades build it
// twice: with the release before and with this one, so it uses only what both have.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/migrations"
)

// program is what a process does, as JSON in its environment.
type program struct {
	Role           string // migrate, consume or maintain
	Release        string // old or new
	URL            string
	Brokers        []string
	Topic          string
	SessionTimeout time.Duration
	Order          uint8 // the constants of the releases have other names

	log  *slog.Logger
	pool *pgxpool.Pool
}

func main() {
	p := program{log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	p.log.Info("child hears signals")
	err := json.Unmarshal([]byte(os.Getenv("EFFECTONCE_UPGRADE")), &p)
	if err == nil {
		err = p.run(ctx)
	}
	if err != nil {
		p.log.Error("ended", "error", err)
		os.Exit(1)
	}
}

func (p *program) run(ctx context.Context) error {
	if p.Role == "migrate" {
		conn, err := pgx.Connect(ctx, p.URL)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close(ctx) }()
		slog.SetDefault(p.log)
		return migrations.Up(ctx, conn, migrations.Options{})
	}
	config, err := pgxpool.ParseConfig(p.URL)
	if err != nil {
		return err
	}
	config.MaxConns = 30
	if p.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	defer p.pool.Close()
	if p.Role == "maintain" {
		if err := p.maintain(ctx); ctx.Err() == nil {
			return err
		}
		return nil // it was told to stop
	}
	c, err := consumer.New(p.pool, []kgo.Opt{kgo.SeedBrokers(p.Brokers...), kgo.SessionTimeout(p.SessionTimeout), kgo.HeartbeatInterval(p.SessionTimeout / 5)},
		consumer.Each(p.handle), consumer.Config{
			Group: p.Topic, Topics: []string{p.Topic}, Order: consumer.Order(p.Order), BatchMax: 20, AttemptsMax: 1000, RetryMin: time.Second, RetryMax: time.Second,
			StatementTimeout: time.Hour, IdleTimeout: time.Hour, HandlerTimeout: time.Hour, Logger: p.log,
		})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// event is the payload of the messages.
type event struct {
	Key     string
	Version int
}

// handle makes a foreign call, which is a row that stays whatever becomes of the transaction, and
// has an effect. The table faults says what happens to the release before in between.
func (p *program) handle(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
	var e event
	if err := json.Unmarshal(msg.Value, &e); err != nil {
		return consumer.Permanent(err)
	}
	_, err := p.pool.Exec(ctx, `INSERT INTO calls (key, version, release, call) VALUES ($1, $2, $3, $4)`,
		e.Key, e.Version, p.Release, [16]byte(msg.ChildID("charge")))
	if err != nil {
		return fmt.Errorf("call: %w", err)
	}
	fault := ""
	if p.Release == "old" {
		err := p.pool.QueryRow(ctx, `SELECT fault FROM faults WHERE key = $1`, e.Key).Scan(&fault)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("read the fault: %w", err)
		}
	}
	switch fault {
	case "hang":
		<-ctx.Done() // the answer of the call never comes
		return ctx.Err()
	case "fail":
		return errors.New("the answer of the call is lost")
	case "refuse":
		return consumer.Permanent(errors.New("the call was refused"))
	}
	_, err = tx.Exec(ctx, `INSERT INTO effects (message_id, key, version, worker) VALUES ($1, $2, $3, $4)`, [16]byte(msg.ID), e.Key, e.Version, os.Getpid())
	return err
}

// maintain forgets claims again and again, and notes each run.
func (p *program) maintain(ctx context.Context) error {
	claims, err := dedup.New(dedup.Config{})
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		report, err := claims.Maintain(ctx, p.pool, dedup.MaintainOptions{Owner: "previous release"})
		text := ""
		if err != nil {
			text = err.Error()
		}
		if _, err := p.pool.Exec(ctx, `INSERT INTO runs (elsewhere, error) VALUES ($1, $2)`, report.Elsewhere, text); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil
}
