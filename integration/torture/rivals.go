package torture

import (
	"context"
	"encoding/json"
	"net"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// Rival takes the place of this module's outbox, relay and consumers.
type Rival interface {
	// SetUp creates its tables.
	SetUp(ctx context.Context, pool *pgxpool.Pool) error
	// Publish stores a message in the transaction of what it is about.
	Publish(ctx context.Context, tx pgx.Tx, m outbox.Message) error
	// Relay publishes what was stored until ctx ends. After an error it is called again.
	Relay(ctx context.Context, p *Process) error
	// Consume calls handle for each record of topics until ctx ends. After an error it is called again.
	Consume(ctx context.Context, p *Process, group string, topics []string, handle Handle) error
}

// Handle does what a record asks for, in a transaction of the rival. An error, or a panic, means that the
// transaction must be rolled back.
type Handle func(ctx context.Context, tx pgx.Tx, payload []byte) error

// Process is what one process has: a pool, and a network that has faults.
type Process struct {
	Pool    *pgxpool.Pool
	Brokers []string
	// Dial connects to brokers.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Kafka has the brokers, Dial and the limits for clients of franz-go.
	Kafka []kgo.Opt
}

// rivalConsumes is a group's replica.
func (g *group) rivalConsumes(ctx context.Context, p *Process) error {
	return g.Rival.Consume(ctx, p, g.name, g.Topics, func(ctx context.Context, tx pgx.Tx, payload []byte) error {
		ctx, cancel := context.WithTimeout(ctx, g.config.HandlerTimeout)
		defer cancel()
		a := &attempt{group: g, pool: p.Pool, tx: tx}
		if err := json.Unmarshal(payload, &a.event); err != nil {
			return err
		}
		a.number = g.count(a.Source, a.ID)
		if err := a.handle(ctx); err != nil {
			return err
		}
		return ctx.Err()
	})
}

// publish stores a message.
func (r *run) publish(ctx context.Context, tx pgx.Tx, m outbox.Message) error {
	if r.Rival != nil {
		return r.Rival.Publish(ctx, tx, m)
	}
	return outbox.Publish(ctx, tx, m)
}
