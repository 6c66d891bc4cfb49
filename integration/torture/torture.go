// Package torture runs the whole pipeline under random faults, and judges what is left.
//
// A seed draws a plan: three consumer groups of any shape, order and failure policy (two publish into
// one topic that the third reads), a relay and an HTTP service of two replicas each, and faults with their
// times, some of them things that operators do. Clients send requests under idempotency keys until each is
// answered: an order, an event for two receivers of webhooks, or a charge by a bank, whose answers are late or
// lost. Writers place orders, a few in prepared transactions, and say for most of them nothing and for some a habit: something that people write in handlers,
// from the errors that everybody has to roles, savepoints and sessions that are left behind. Then the
// faults end, and everything has to drain. The judge reads the tables with plain SQL: each acknowledged
// order has one effect in each group, with all its children, in the order of its key; each request happened
// once, also in the bank's books, and its answers are the same; nothing else happened; nothing stays behind.
//
// The same seed repeats the plan on the same kinds of servers, but not their timing: a run that fails fails
// again in some of its repetitions.
package torture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
)

// Options of a run.
type Options struct {
	// Seed draws the plan.
	Seed uint64
	// Duration of the faults. Servers start before, and everything drains behind.
	Duration time.Duration
	// Without are kinds of faults, and habits, that the plan has and the run leaves out. Default: none.
	Without []string
	// Shrink is how often a run that failed is tried without some of its faults and habits, to find those that
	// it needs: a cut counts if one of these runs fails, too. 0: it is not shrunk.
	Shrink int
	// Rival runs in place of this module's relay and consumers. Default: none.
	Rival Rival
	// Embedded uses downloaded PostgreSQL and kfake, even if there is a Docker engine.
	Embedded bool
	// Log receives the plan, the faults, and what the replicas log. Default: discarded.
	Log io.Writer
	// Progress receives one line at a time. Default: discarded.
	Progress func(line string)
}

// Report is what a run found.
type Report struct {
	Seed uint64 `json:"seed"`
	// Messages that took effect, and Faults that happened.
	Messages int `json:"messages"`
	Faults   int `json:"faults"`
	// Requests with idempotency keys that were answered.
	Requests int `json:"requests"`
	// Lost effects of acknowledged orders, Doubled ones, those OutOfOrder of their key, and those that
	// had not happened when nothing moved for StuckAfter: Stuck.
	Lost       int `json:"lost"`
	Doubled    int `json:"doubled"`
	OutOfOrder int `json:"out_of_order"`
	Stuck      int `json:"stuck"`
	// Problems say what is wrong, a line each; none: the promise held.
	Problems []string `json:"problems"`
	// Needs are the kinds of faults and the habits that are left of a run that was shrunk; null: it was not.
	Needs    []string `json:"needs"`
	Postgres string   `json:"postgres"`
	Kafka    string   `json:"kafka"`
	// DrainSeconds is how long everything took to drain behind the faults.
	DrainSeconds float64 `json:"drain_seconds"`
}

// Held reports whether the promise held.
func (r *Report) Held() bool { return len(r.Problems) == 0 }

// String is the report for people.
func (r *Report) String() string {
	text := fmt.Sprintf("%d effects, %d requests, %d faults, drained in %v s; lost %d, doubled %d, out of order %d, stuck %d; seed %d",
		r.Messages, r.Requests, r.Faults, r.DrainSeconds, r.Lost, r.Doubled, r.OutOfOrder, r.Stuck, r.Seed)
	for _, problem := range r.Problems {
		text += "; problem: " + problem
	}
	if r.Needs != nil {
		text += "; it needs: " + cmp.Or(strings.Join(r.Needs, ", "), "no fault and no habit")
	}
	return text
}

// run is one run.
type run struct {
	Options

	plan     *Plan
	postgres *servers.Postgres
	data     string // the directory of an embedded one
	kafka    *servers.Kafka
	pool     *pgxpool.Pool // of writers, nemesis and judge, as client: their network has no faults
	client   *kgo.Client
	logger   *slog.Logger
	groups   []*group
	replicas []*replica
	gone     []*replica     // stopped, or killed; some end later
	pending  sync.WaitGroup // faults that are not over
	crashing sync.Mutex
	abort    context.CancelCauseFunc
	// restarting is held while a topic must stay paused.
	restarting sync.RWMutex

	habits   map[string]habit
	repaired atomic.Bool // what fails permanently works again

	mu           sync.Mutex
	report       Report
	acknowledged []int64 // orders whose COMMIT returned
	answered     []int64 // requests
	rewound      map[string]int
	losses       []loss

	orders, requests atomic.Int64
	doors            [2]string // of the service's replicas
	bank             bank
	preparedCommit   string // how pgx names COMMIT once it is prepared
}

// group is a consumer group.
type group struct {
	GroupPlan
	*run

	name string

	tries sync.Map // *atomic.Int64 by source and ID
}

// count returns the number of this attempt.
func (g *group) count(source string, id int64) int {
	n, _ := g.tries.LoadOrStore(fmt.Sprint(source, "/", id), new(atomic.Int64))
	return int(n.(*atomic.Int64).Add(1))
}

// childHabit is what the handler of a child does: drawn from the seed, the same at every attempt.
func (g *group) childHabit(id int64) string {
	return g.drawHabit(rand.New(rand.NewPCG(g.plan.Seed, uint64(id))), g.plan.rarely(36)) //nolint:gosec // repeatable
}

// broken adds a problem.
func (r *run) broken(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Problems = append(r.report.Problems, fmt.Sprintf(format, args...))
}

// Run runs one torture, and repeats it if it is to be shrunk. An error means that it could not be run; what it found
// is in the report.
func Run(ctx context.Context, opts Options) (*Report, error) {
	if opts.Log == nil {
		opts.Log = io.Discard
	}
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	report, err := once(ctx, opts)
	if err == nil && !report.Held() && opts.Shrink > 0 {
		report.Needs, err = shrink(ctx, opts)
	}
	return report, err
}

func once(ctx context.Context, opts Options) (_ *Report, err error) {
	r := &run{
		Options: opts, logger: slog.New(slog.NewTextHandler(opts.Log, nil)), habits: habits(), report: Report{Seed: opts.Seed, Problems: []string{}},
		bank: bank{acted: map[string]map[string]int{}}, rewound: map[string]int{},
	}
	ctx, r.abort = context.WithCancelCause(ctx)
	defer r.abort(nil)
	defer func() { err = errors.Join(err, r.stopServers(ctx)) }()
	if err := r.startServers(ctx); err != nil {
		return nil, err
	}
	defer r.pool.Close()
	defer r.client.Close()
	r.plan = draw(opts.Seed, opts.Duration, r.faultNames())
	if r.Rival != nil {
		r.plan.Scheduled = false
		for _, f := range operators() {
			r.Without = append(r.Without, f.name)
		}
	}
	if _, err := io.WriteString(opts.Log, r.plan.String()); err != nil {
		return nil, err
	}
	for _, p := range r.plan.Groups {
		r.groups = append(r.groups, &group{GroupPlan: p, run: r, name: p.config.Group})
	}
	if err := r.setUp(ctx); err != nil {
		return nil, err
	}
	defer r.stopReplicas()
	r.startReplicas(ctx)
	go r.commitPrepared(ctx)
	writing, stopWriting := context.WithCancel(ctx)
	defer stopWriting()
	var writers sync.WaitGroup
	r.startWriters(writing, &writers)
	writers.Go(func() { r.watch(writing) })
	r.torment(ctx)
	stopWriting()
	writers.Wait()
	r.Progress("the faults are over")
	r.pending.Wait()
	r.heal(ctx)
	r.drain(ctx)
	r.stopReplicas()
	r.judge(ctx)
	return &r.report, context.Cause(ctx)
}

func (r *run) startServers(ctx context.Context) (err error) {
	r.Progress("starting the servers (the first run downloads PostgreSQL)")
	if r.postgres, err = servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Embedded: r.Embedded, Parameters: map[string]string{
		"max_connections": "300", "max_prepared_transactions": "50",
		"recovery_target_timeline":  "current", // a crash may leave the beginning of a later one
		"max_standby_archive_delay": "100ms",   // pg_promote itself is in the way of what is replayed
	}}); err != nil {
		return err
	}
	if r.kafka, err = servers.StartKafka(ctx, servers.KafkaOptions{Own: true, Embedded: r.Embedded, Fake: []kfake.Opt{kfake.NumBrokers(3), kfake.SleepOutOfOrder()}}); err != nil {
		return err
	}
	r.report.Postgres, r.report.Kafka = r.postgres.Description, r.kafka.Description
	r.Progress(r.postgres.Description)
	r.Progress(r.kafka.Description)
	if r.client, err = kgo.NewClient(kgo.SeedBrokers(r.kafka.Brokers...), kgo.ConsumeTopics(topicDead), kgo.FetchIsolationLevel(kgo.ReadCommitted())); err != nil {
		return err
	}
	if r.pool, err = pgxpool.New(ctx, r.postgres.URL+"&pool_max_conns=30"); err != nil {
		return err
	}
	return r.pool.QueryRow(ctx, `SELECT current_setting('data_directory')`).Scan(&r.data)
}

const stopMax = 30 * time.Second

func (r *run) stopServers(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopMax)
	defer cancel()
	if r.kafka != nil {
		err = r.kafka.Stop(ctx)
	}
	if r.postgres != nil {
		err = errors.Join(err, r.postgres.Stop(ctx))
	}
	return err
}

// later does something after a while, or at the end of the run.
func (r *run) later(ctx context.Context, after time.Duration, what func()) {
	r.pending.Go(func() {
		pause.For(ctx, after)
		what()
	})
}

// tx executes a statement in a transaction that stays open for a while.
func (r *run) tx(ctx context.Context, open time.Duration, statement string) {
	r.pending.Go(func() {
		err := pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
			pause.For(ctx, open)
			return nil
		})
		r.logger.Info("nemesis: transaction over", "statement", statement, "error", err)
	})
}
