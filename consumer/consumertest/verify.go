package consumertest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/effects"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Verify fails the test if the handler's effects in the database after any schedule of deliveries
// and crashes differ from those after a single clean run: each effect once, messages published once
// and under the same IDs. It takes some seconds: about 30 runs, each in its own database.
func Verify(t *testing.T, handler consumer.Handler, messages []Message, opts ...Options) {
	t.Helper()
	var o Options
	switch len(opts) {
	case 0:
	case 1:
		o = opts[0]
	default:
		t.Fatal("consumertest.Verify: want at most one Options")
	}
	if len(messages) == 0 {
		t.Fatal("consumertest.Verify: want at least one message: without any, nothing is verified")
	}
	problems, err := verify(t, handler, Records(messages...), o)
	if err != nil {
		t.Fatal("consumertest.Verify:", err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}
}

// schedule is one way in which the messages reach the handler.
type schedule struct {
	name    string
	batch   int
	records []*kgo.Record
	crash   string   // the point at which the consumer is killed once; then everything is redelivered
	pass    int      // … when it is passed for this many-th time, from 0
	park    bool     // each message is parked after its handler ran, and retried
	ignored []string // columns
	hint    string   // the likely cause of a difference in this schedule
}

const (
	hintOutside = "the handler seems to write through another connection than its tx, or to keep what it did in memory: only what goes through tx commits once"
	hintBatch   = "the handler's effect seems to depend on which messages share a transaction, or on what it keeps in memory between messages"
	hintParked  = "the handler's effect differs where a message was parked and retried: derive what must stay the same from msg.ID and msg.CallKey; msg.PublishID changes with the retry"
	hintRandom  = "the handler's effect differs from run to run: derive IDs from msg.ID or msg.CallKey and times from msg.Time, or name the columns in Options.Ignore"
)

// schedules lists the schedules to run after the clean run.
func schedules(records []*kgo.Record) []schedule {
	all := []schedule{
		{name: "a second clean run", batch: 500, records: records, hint: hintRandom},
		{name: "each message in a transaction of its own", batch: 1, records: records, hint: hintBatch},
		{name: "every message twice in a row", batch: 500, records: doubled(records), hint: hintBatch},
		{name: "all messages, and then all again", batch: 2, records: again(records), hint: hintBatch},
		{name: "all messages, and then all again in reverse", batch: 3, records: again(records, slices.Reverse[[]*kgo.Record]), hint: hintBatch},
	}
	for _, point := range []struct{ name, text string }{
		{crashpoint.ConsumerClaimed, "killed after the claim, before the handler ran"},
		{crashpoint.ConsumerHandled, "killed after the handler ran, before COMMIT"},
		{crashpoint.ConsumerCommitting, "killed right before COMMIT"},
		{crashpoint.ConsumerCommitted, "killed right after COMMIT"},
		{crashpoint.ConsumerMarked, "killed before the offset went to Kafka"},
	} {
		for _, batch := range []int{1, 500} {
			passes := []int{0}
			if batch == 1 {
				passes = slices.Compact([]int{0, len(records) / 2, len(records) - 1})
			}
			for _, pass := range passes {
				all = append(all, schedule{
					name:  fmt.Sprintf("%s (batches of %d, transaction %d), and delivered again", point.text, batch, pass+1),
					batch: batch, records: records, crash: point.name, pass: pass, hint: hintOutside,
				})
			}
		}
	}
	return append(all, schedule{
		name: "each message parked after its handler ran, and retried", batch: 500, records: records, park: true, ignored: ignoredIDs, hint: hintParked,
	})
}

// doubled returns the records, each followed by a copy at the next offset.
func doubled(records []*kgo.Record) (twice []*kgo.Record) {
	for _, r := range records {
		one, two := *r, *r
		one.Offset, two.Offset = 2*r.Offset, 2*r.Offset+1
		twice = append(twice, &one, &two)
	}
	return twice
}

// again returns the records, followed by copies of all of them at later offsets; change reorders
// the copies.
func again(records []*kgo.Record, change ...func([]*kgo.Record)) []*kgo.Record {
	second := slices.Clone(records)
	for _, f := range change {
		f(second)
	}
	end := map[[2]any]int64{}
	for _, r := range records {
		end[[2]any{r.Topic, r.Partition}]++
	}
	both := slices.Clone(records)
	for _, r := range second {
		copied := *r
		at := [2]any{r.Topic, r.Partition}
		copied.Offset = end[at]
		end[at]++
		both = append(both, &copied)
	}
	return both
}

func verify(t *testing.T, handler consumer.Handler, records []*kgo.Record, o Options) (problems []string, err error) {
	t.Helper()
	clean, err := run(t, handler, schedule{name: "the clean run", batch: 500, records: records}, o)
	if err != nil {
		return nil, fmt.Errorf("the clean run: %w", err)
	}
	for _, s := range schedules(records) {
		if s.park && !o.parks() {
			continue // nothing is parked under the consumer's policy
		}
		after, err := run(t, handler, s, o)
		if err != nil {
			problems = append(problems, fmt.Sprintf("%s: %v", s.name, err))
			continue
		}
		wanted := clean
		if s.park {
			if wanted, err = run(t, handler, schedule{name: "the clean run again", batch: 500, records: records, ignored: ignoredIDs}, o); err != nil {
				return nil, fmt.Errorf("the clean run: %w", err)
			}
		}
		if difference := effects.Compare(wanted, after); difference != "" {
			problems = append(problems, fmt.Sprintf("%s: %s\n%s", s.name, difference, s.hint))
			if s.hint == hintRandom {
				return problems, nil // other differences have the same cause
			}
		}
	}
	return append(problems, o.Calls.problems()...), nil
}

var errNoEffect = errors.New("the messages changed nothing in any table: there is no effect to verify; does Options.Setup create the handler's tables, and does Options.Ignore leave a column?")

// runMax bounds one run; HandlerTimeout distinguishes a handler that hangs from one that is slow.
const runMax = time.Minute

// run delivers the records of a schedule in a new database and returns its content afterwards.
func run(t *testing.T, handler consumer.Handler, s schedule, o Options) (effects.Effects, error) {
	t.Helper()
	var found effects.Effects
	var err error
	t.Run(strings.ReplaceAll(s.name, " ", "_"), func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), runMax)
		defer cancel()
		pool := pgtest.Pool(t)
		if err = prepare(ctx, pool, o); err != nil {
			return
		}
		var failures failures
		config := o.config(s, &failures)
		if s.park {
			config.Middleware = append(config.Middleware, parkedOnce{}.middleware())
		}
		c, newErr := consumer.New(pool, nil, handler, config)
		if err = newErr; err != nil {
			return
		}
		var before effects.Effects
		if before, err = effects.Read(ctx, pool, s.ignore(o)); err != nil {
			return
		}
		if s.crash != "" && !crashing(ctx, c, s) {
			err = errors.Join(errors.New("the crash point was not reached"), failures.err())
		}
		if err == nil {
			_, err = c.Deliver(ctx, s.records...)
		}
		if err == nil && s.park {
			err = retry(ctx, pool, c, s.records)
		}
		if err == nil {
			err = failures.err()
		}
		if err == nil {
			found, err = effects.Read(ctx, pool, s.ignore(o))
		}
		if err == nil && effects.Compare(before, found) == "" {
			err = errNoEffect
		}
	})
	return found, err
}

func prepare(ctx context.Context, pool *pgxpool.Pool, o Options) error {
	if o.Setup != "" {
		if _, err := pool.Exec(ctx, o.Setup); err != nil {
			return fmt.Errorf("Options.Setup: %w", err)
		}
	}
	if o.Prepare != nil {
		if err := o.Prepare(ctx, pool); err != nil {
			return fmt.Errorf("Options.Prepare: %w", err)
		}
	}
	return nil
}

func (o Options) config(s schedule, f *failures) consumer.Config {
	var cfg consumer.Config
	if o.Consumer != nil {
		o.Consumer(&cfg)
	}
	cfg.Group, cfg.Topics, cfg.Schema, cfg.Logger = "consumertest", nil, "", nil
	for _, r := range s.records {
		if !slices.Contains(cfg.Topics, r.Topic) {
			cfg.Topics = append(cfg.Topics, r.Topic)
		}
	}
	cfg.BatchMax = s.batch
	if s.park {
		cfg.ParkShareMax = 1
	}
	cfg.RetryMin, cfg.RetryMax = time.Millisecond, 10*time.Millisecond
	cfg.Hooks = consumer.Hooks{Failed: f.failed}
	return cfg
}

// failures keeps the last error of each message that failed.
type failures struct {
	mu   sync.Mutex
	list []string
}

func (f *failures) failed(e consumer.Failed) {
	if errors.Is(e.Err, errParked) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append(f.list, fmt.Sprintf("%s, attempt %d: %v", e.Message, e.Attempt, e.Err))
}

func (f *failures) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.list) == 0 {
		return nil
	}
	return fmt.Errorf("the handler failed: %s", strings.Join(f.list, "\n"))
}

// crashing delivers until the crash point, where the consumer is killed: the goroutine that reaches
// the point ends, and its transaction is rolled back as the server does when a process dies. It
// returns whether the point was reached.
func crashing(ctx context.Context, c *consumer.Consumer, s schedule) bool {
	ctx, kill := context.WithCancel(ctx)
	defer kill()
	var mu sync.Mutex
	pass, killed := s.pass, false
	die := func(name string) {
		mu.Lock()
		now := name == s.crash && pass == 0
		if name == s.crash {
			pass--
		}
		killed = killed || now
		mu.Unlock()
		if now {
			kill()
			runtime.Goexit()
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = c.Deliver(crashpoint.With(ctx, die), s.records...)
	}()
	<-done
	mu.Lock()
	defer mu.Unlock()
	return killed
}
