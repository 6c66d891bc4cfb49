// Package worker is what the processes of a torture run do: they write orders, publish them, handle
// them, and answer requests. They are ordinary users of this module.
package worker

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/internal/proxies"
)

// Roles of processes.
const (
	RoleProducer = "producer"
	RoleRelay    = "relay"
	RoleConsumer = "consumer"
	RoleService  = "service"
	RolePrepare  = "prepare" // of a rival: it creates its tables, and ends
)

// Job is the task of a process. It is sent through its standard input.
type Job struct {
	Role        string
	Name        string
	Place       int64 // among all processes of the round, from 1 on
	Incarnation int64 // of this place, from 1 on
	Seed        uint64
	DatabaseURL string
	Brokers     []string
	Through     map[string]string // ways to the brokers; empty: straight
	Topic       string            // of orders; see the functions below
	Group       scene.Group
	Scene       scene.Scene
	Ledgers     string // directory
	Bank        string // URL of the foreign system
	Listen      string // address of a service
	// Variant changes what may differ between the replicas of one release and the next: sizes,
	// pauses, workers.
	Variant int
	// Until is when the faults end; zero: they have not begun.
	Until time.Time
}

// ChildTopic is where the children of a group go.
func (j Job) ChildTopic(group int16) string { return fmt.Sprintf("%s-children-%d", j.Topic, group) }

// DeadTopic is where the messages of a group go that it cannot handle.
func (j Job) DeadTopic(group int16) string { return fmt.Sprintf("%s-dead-%d", j.Topic, group) }

// JournalTopic is where the entries of a group's journal go. No group handles them.
func (j Job) JournalTopic(group int16) string { return fmt.Sprintf("%s-journal-%d", j.Topic, group) }

// Consumed is the topic of the job's group.
func (j Job) Consumed() string {
	if j.Group.Parent > 0 {
		return j.ChildTopic(j.Group.Parent)
	}
	return j.Topic
}

// GroupID is the consumer group in Kafka.
func (j Job) GroupID(group int16) string { return fmt.Sprintf("%s-group-%d", j.Topic, group) }

// ExitStatus is that of a process whose handler ended it on purpose.
const ExitStatus = 86

// Limits that are short, so that faults longer than them fit into a round. Session is that of
// consumers' groups.
const (
	lease          = 2 * time.Second
	Session        = 6 * time.Second
	handlerTimeout = 2 * time.Second
)

// Run does a job until ctx is cancelled.
func Run(ctx context.Context, stdin io.Reader, logs io.Writer, orphaned func()) error {
	return RunAs(ctx, stdin, logs, orphaned, map[string]Rival{scene.RivalTextbook: byHand{claims: true}, scene.RivalNaive: byHand{}})
}

// RunAs is Run with these rivals, by their names in a scene.
func RunAs(ctx context.Context, stdin io.Reader, logs io.Writer, orphaned func(), rivals map[string]Rival) error {
	var j Job
	if err := fleet.ReadInput(stdin, &j, orphaned); err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(logs, nil)).With("process", j.Name, "incarnation", j.Incarnation)
	if err := j.arm(ctx); err != nil {
		return err
	}
	pool, err := j.pool(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	if j.Scene.Rival != "" {
		rival, known := rivals[j.Scene.Rival]
		if !known {
			return fmt.Errorf("this program knows no rival %q", j.Scene.Rival)
		}
		return j.compete(ctx, pool, rival, logger)
	}
	switch j.Role {
	case RoleProducer:
		return produce(ctx, pool, j, nil, logger)
	case RoleRelay:
		return publish(ctx, pool, j, logger)
	case RoleConsumer:
		return consume(ctx, pool, j, logger)
	case RoleService:
		return serve(ctx, pool, j, logger)
	default:
		return j.unknown()
	}
}

func (j Job) unknown() error {
	return fmt.Errorf("this command is started by another one, not by people: unknown role %q", j.Role)
}

// compete does the job of a rival's process.
func (j Job) compete(ctx context.Context, pool *pgxpool.Pool, rival Rival, logger *slog.Logger) error {
	switch j.Role {
	case RolePrepare:
		if p, ok := rival.(Preparer); ok {
			return p.Prepare(ctx, pool, j)
		}
		return nil
	case RoleProducer:
		return produce(ctx, pool, j, rival, logger)
	case RoleRelay:
		return rival.Relay(ctx, pool, j, logger)
	case RoleConsumer:
		return rival.Consume(ctx, pool, j, logger)
	default:
		return j.unknown()
	}
}

func (j Job) pool(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(j.DatabaseURL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 12
	config.ConnConfig.RuntimeParams["application_name"] = j.Name
	return pgxpool.NewWithConfig(ctx, config)
}

// Kafka are the options of a client.
func (j Job) Kafka() []kgo.Opt {
	options := []kgo.Opt{kgo.SeedBrokers(j.Brokers...)}
	if len(j.Through) > 0 {
		options = append(options, proxies.Dialer(j.Through))
	}
	return options
}
