package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo/checker"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/site"
	"github.com/effectonce/effectonce/internal/pause"
)

// Report is the result of a run.
type Report struct {
	checker.Verdict
	Injected int      `json:"duplicates_injected"` // records that the demo published again
	Kills    int      `json:"kills"`               // with SIGKILL
	Freezes  int      `json:"freezes"`
	Crashes  int      `json:"crashes"` // processes that ended without being told to; there should be none
	Seed     uint64   `json:"seed"`
	Notes    []string `json:"-"` // other problems, and where the logs are
}

// Run runs the pipeline and returns what the checker found. An error means that the run could not
// be carried out or judged. A broken promise is not an error, but part of the Report. Run leaves
// nothing behind except the logs of a failed run, and what the error names.
func Run(ctx context.Context, options Options) (Report, error) {
	if err := errors.Join(options.Check(), supported()); err != nil {
		return Report{}, err
	}
	logs, err := os.MkdirTemp("", "effectonce-demo-")
	if err != nil {
		return Report{}, fmt.Errorf("create a directory for the processes' logs: %w", err)
	}
	// The name is random, so that runs do not conflict with each other, nor with an existing schema.
	report, err := prepareAndCarryOut(ctx, job{Options: options, Run: site.Name("effectonce_demo_")}, logs)
	report.Seed = options.Seed
	failed := err != nil || !report.Held() && !options.WithoutDedup
	switch {
	case ctx.Err() != nil || !failed:
		err = errors.Join(err, os.RemoveAll(logs))
	case err != nil:
		err = fmt.Errorf("%w\nthe processes' logs are in %s", err, logs)
	default:
		report.Notes = append(report.Notes, "the processes' logs are in "+logs)
	}
	return report, err
}

// Bounds and defaults of Options.
const (
	OrdersMin       = 50
	OrdersDefault   = 3000
	OrdersMax       = 100_000
	DurationMin     = 5 * time.Second
	DurationDefault = 20 * time.Second
	DurationMax     = 10 * time.Minute
	SessionDefault  = 6 * time.Second // the least that brokers accept unless configured
	// OrdersPerSecondMax is the rate that the shop achieves beside everything else on two cores.
	OrdersPerSecondMax = 500
)

// Options are the options of Run.
type Options struct {
	// Command starts a child: program and arguments. It has to call RunProcess.
	Command []string `json:"-"`
	// DatabaseURL is the URL of the PostgreSQL database. Children receive it through a pipe, never
	// as an argument or in their environment, where other users of the machine could read its
	// password.
	DatabaseURL string
	// Brokers are the seed brokers of the Kafka cluster.
	Brokers []string
	// Orders is how many orders the shop places, at most OrdersPerSecondMax for each second of
	// Duration.
	Orders int
	// Duration is how long the shop takes for them, and how long processes are killed and frozen.
	Duration time.Duration
	// Session is Kafka's session timeout for the consumers: how long the group waits for a member
	// that was killed or is frozen.
	Session time.Duration
	// Seed determines which orders are placed, and what is killed, frozen and duplicated when. The
	// effect on the processes depends on the machine, so two runs of one seed are similar, not
	// identical.
	Seed uint64
	// WithoutDedup removes the claim from the consumers, to show that the checker detects the
	// difference.
	WithoutDedup bool
	// Progress is called a few times a second, from one goroutine.
	Progress func(Progress) `json:"-"`
}

// Progress is the progress of a run.
type Progress struct {
	Elapsed    time.Duration
	Phase      string // the current phase
	Orders     int    // orders that the shop has committed
	Delivered  int    // different messages in the topic
	Effects    int    // orders that have an effect
	Duplicates int    // records that were published again on purpose
	Kills      int
	Freezes    int
}

// Check returns what is wrong with the numbers together; the flags have their bounds.
func (o Options) Check() error {
	if rate := float64(o.Orders) / o.Duration.Seconds(); rate > OrdersPerSecondMax {
		return fmt.Errorf("%d orders in %v are %.0f a second: want at most %d: use a longer duration or fewer orders", o.Orders, o.Duration, rate, OrdersPerSecondMax)
	}
	return nil
}

// The numbers of relays and consumers of a run; there is one shop.
const (
	relays    = 2
	consumers = 3
)

// stopMax is how long children have to end after SIGTERM: their own drain limit, and some time to
// start and to disconnect from the brokers.
const stopMax = 3 * drainMax

// judgeMax bounds the checker, in case the brokers are gone.
const judgeMax = time.Minute

// consumerStopMax is shorter, because nothing depends on how consumers end.
const consumerStopMax = 2 * time.Second

// run is a run in progress. Its methods belong to one goroutine.
type run struct {
	job
	begin        time.Time
	site         *site.Site
	conn         *pgx.Conn
	fleet        *fleet
	troublemaker *troublemaker
	duplicator   *duplicator
	trouble      chan error // errors of the goroutines
	now          Progress
	notes        []string
}

// prepareAndCarryOut does everything between the check of the options and the cleanup.
func prepareAndCarryOut(ctx context.Context, j job, logs string) (_ Report, err error) {
	j.Progress(Progress{Phase: "preparing tables and topic"})
	made, err := setUp(ctx, j)
	if err != nil {
		return Report{}, fmt.Errorf("prepare the demo: %w", err)
	}
	defer func() { err = errors.Join(err, made.Remove(ctx)) }()
	conn, hangUp, err := made.Connect(ctx)
	if err != nil {
		return Report{}, err
	}
	defer hangUp()
	duplicator, err := newDuplicator(j)
	if err != nil {
		return Report{}, err
	}
	fleet := newFleet(ctx, j.Command, logs, jobs(j))
	defer fleet.close()
	r := &run{
		begin: time.Now(), job: j, site: made, conn: conn, fleet: fleet, duplicator: duplicator,
		troublemaker: &troublemaker{fleet: fleet}, trouble: make(chan error, 2),
	}
	if err := r.carryOut(ctx); err != nil {
		return Report{}, err
	}
	return r.judge(ctx)
}

func jobs(j job) []job {
	var all []job
	add := func(r role, n int) {
		for i := range n {
			j.Role, j.Name = r, fmt.Sprintf("%s-%d", r, i+1)
			all = append(all, j)
		}
	}
	add(roleShop, 1)
	add(roleRelay, relays)
	add(roleConsumer, consumers)
	return all
}

// carryOut injects faults while the shop works, then lets everything drain and stops it.
func (r *run) carryOut(ctx context.Context) error {
	var background sync.WaitGroup
	defer background.Wait()
	working, stop := context.WithCancel(ctx)
	defer stop()
	calm, finish := make(chan struct{}), make(chan struct{})
	duplicated := make(chan struct{})
	background.Go(func() {
		defer close(duplicated)
		r.tell(r.duplicator.run(working, finish))
	})
	// When the time is over, or all orders are placed, every process is resumed and started again,
	// whatever remains of the plan.
	troubled, calmDown := context.WithCancel(working)
	defer calmDown()
	makeTrouble := func() {
		defer close(calm)
		begin := time.Now()
		limited, cancel := context.WithDeadline(troubled, begin.Add(r.Duration))
		defer cancel()
		r.tell(r.troublemaker.run(limited, begin, plan(newRandom(r.Seed, streamFaults), r.Duration, r.Session)))
	}
	for _, step := range []func(context.Context) error{
		// Orders and faults begin when everything is running: on a slow machine the time would
		// otherwise be over before that.
		r.untilReady,
		r.untilFirstEffect,
		func(context.Context) error { background.Go(makeTrouble); return nil },
		r.untilOrders,
		func(ctx context.Context) error { calmDown(); return r.untilClosed(ctx, calm) },
		r.untilEffects,
		func(ctx context.Context) error { close(finish); return r.untilClosed(ctx, duplicated) },
		r.untilRead,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	// All their work is committed: a consumer that is still disconnecting is killed.
	_ = r.fleet.stop(ctx, roleConsumer, consumerStopMax)
	return ctx.Err()
}

// untilReady starts relays and consumers, and waits until the relays have their lease and the
// consumers their partitions.
func (r *run) untilReady(ctx context.Context) error {
	if err := errors.Join(r.fleet.start(roleRelay), r.fleet.start(roleConsumer)); err != nil {
		return err
	}
	return r.until(ctx, "starting the processes", func() (left int64, err error) {
		err = r.query(ctx, unreadySQL, partitions).Scan(&left)
		return left, err
	})
}

func (r *run) untilFirstEffect(ctx context.Context) error {
	if err := r.fleet.start(roleShop); err != nil {
		return err
	}
	return r.until(ctx, "starting the processes", func() (left int64, err error) {
		err = r.count(ctx)
		return int64(1 - min(r.now.Effects, 1)), err
	})
}

func (r *run) untilOrders(ctx context.Context) error {
	err := r.until(ctx, "placing orders", func() (left int64, err error) {
		err = r.count(ctx)
		return int64(r.Orders - r.now.Orders), err
	})
	if err == nil && r.now.Orders < r.Orders {
		return fmt.Errorf("the shop placed %d of %d orders, and then none for %v", r.now.Orders, r.Orders, stallMax)
	}
	return err
}

func (r *run) untilEffects(ctx context.Context) error {
	r.note(r.fleet.stop(ctx, roleShop, stopMax))
	// Without faults the group settles by itself, but for one of kfake: a member that was killed while
	// its join request waited for an answer gets its share of the partitions but no session timer, and
	// stays until the next rebalance.
	if err := r.fleet.of(roleConsumer)[0].restart(ctx, consumerStopMax); err != nil {
		return err
	}
	return r.until(ctx, "waiting for the last effects", func() (left int64, err error) {
		err = r.count(ctx)
		return int64(r.now.Orders - r.now.Effects), err
	})
}

// untilRead waits until the consumers have read the whole topic: a duplicate that no consumer read
// proves nothing. The relays are stopped first, so that the end does not move.
func (r *run) untilRead(ctx context.Context) error {
	r.note(r.fleet.stop(ctx, roleRelay, stopMax))
	ends, err := r.site.Ends(ctx, r.Run)
	if err != nil {
		return err
	}
	var partitions []int32
	var next []int64
	ends.Each(func(end kadm.ListedOffset) {
		partitions, next = append(partitions, end.Partition), append(next, end.Offset)
	})
	return r.until(ctx, "waiting for the last duplicates", func() (left int64, err error) {
		err = r.query(ctx, behindSQL, r.Run, partitions, next).Scan(&left)
		return left, err
	})
}

func (r *run) untilClosed(ctx context.Context, done <-chan struct{}) error {
	return r.until(ctx, r.now.Phase, func() (left int64, err error) {
		select {
		case <-done:
			return 0, nil
		default:
		}
		err = r.count(ctx)
		return int64(r.Orders - r.now.Effects + 1), err
	})
}

// judge runs the checker.
func (r *run) judge(ctx context.Context) (Report, error) {
	r.now.Phase = "checking"
	r.report()
	ctx, cancel := context.WithTimeout(ctx, judgeMax)
	defer cancel()
	var evidence checker.Evidence
	if err := checker.ReadDatabase(ctx, r.conn, r.Run, &evidence); err != nil {
		return Report{}, err
	}
	if err := checker.ReadTopic(ctx, r.kafka(), r.Run, &evidence); err != nil {
		return Report{}, err
	}
	crashes := r.fleet.crashes()
	return Report{
		Verdict:  checker.Judge(evidence),
		Injected: int(r.duplicator.injected.Load()),
		Kills:    int(r.troublemaker.kills.Load()),
		Freezes:  int(r.troublemaker.freezes.Load()),
		Crashes:  len(crashes),
		Notes:    append(r.notes, crashes...),
	}, nil
}

// tell passes an error of a goroutine to the run.
func (r *run) tell(err error) {
	if err != nil {
		r.trouble <- err
	}
}

// note records what the user should know although the run continues.
func (r *run) note(err error) {
	if err != nil {
		r.notes = append(r.notes, err.Error())
	}
}

func (r *run) report() {
	r.now.Elapsed = time.Since(r.begin)
	r.now.Delivered, r.now.Duplicates = int(r.duplicator.delivered.Load()), int(r.duplicator.injected.Load())
	r.now.Kills, r.now.Freezes = int(r.troublemaker.kills.Load()), int(r.troublemaker.freezes.Load())
	r.Progress(r.now)
}

const countsSQL = `-- demo.counts
SELECT (SELECT count(*) FROM shop.orders), (SELECT count(DISTINCT order_id) FROM shop.effects)`

// unreadySQL counts the partitions, and the relay, that have no owner yet.
const unreadySQL = `-- demo.unready
SELECT greatest($1::bigint - (SELECT count(*) FROM shop.consumer_positions), 0)
  + (SELECT count(*) FROM (VALUES (1)) AS one WHERE NOT EXISTS (SELECT FROM shop.outbox_progress WHERE owner IS NOT NULL))`

// behindSQL compares what the consumers stored in their transactions with the ends of the
// partitions.
const behindSQL = `-- demo.behind
SELECT coalesce(sum(ends.next - coalesce(p.next_offset, 0)), 0)::bigint
FROM unnest($2::int[], $3::bigint[]) AS ends (partition, next)
LEFT JOIN shop.consumer_positions p ON p.consumer_group = $1 AND p.topic = $1 AND p.partition = ends.partition
WHERE ends.next > coalesce(p.next_offset, 0)`

// stallMax is how long a wait continues without progress. It is longer than a session, a rebalance,
// a lease and a lock timeout together can block progress. When it is over, the checker reports what
// is missing.
const stallMax = 25 * time.Second

// pollEvery is how often the database is queried during a wait.
const pollEvery = 200 * time.Millisecond

func (r *run) query(ctx context.Context, sql string, args ...any) pgx.Row {
	return r.conn.QueryRow(ctx, inShop(sql, r.Run), args...)
}

// count reads how many orders and effects the database has.
func (r *run) count(ctx context.Context) error {
	if err := r.query(ctx, countsSQL).Scan(&r.now.Orders, &r.now.Effects); err != nil {
		return fmt.Errorf("count orders and effects: %w", err)
	}
	return nil
}

// until calls ask repeatedly. It ends when ask returns 0, or when its result has not decreased for
// stallMax, which is no error.
func (r *run) until(ctx context.Context, phase string, ask func() (int64, error)) error {
	r.now.Phase = phase
	least, since := int64(-1), time.Now()
	for {
		left, err := ask()
		if err != nil {
			return err
		}
		if least < 0 || left < least {
			least, since = left, time.Now()
		}
		r.report()
		if left <= 0 || time.Since(since) > stallMax {
			return nil
		}
		select {
		case err := <-r.fleet.failed:
			return err
		case err := <-r.trouble:
			return err
		default:
		}
		if !pause.For(ctx, pollEvery) {
			return ctx.Err()
		}
	}
}
