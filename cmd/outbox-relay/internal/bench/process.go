package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/metrics"
	"github.com/effectonce/effectonce/relay"
)

// relayJob is the task of a process of the benchmark. It is sent through standard input: an address
// may contain a password.
type relayJob struct {
	DatabaseURL   string
	Brokers       []string
	Schema        string
	Name          string
	ExactlyOnce   bool
	ProgressTopic string
	Metrics       bool // count metrics as outbox-relay run does
	Heap          bool // measure the heap

	// Instead of a drain by the relay:
	Idle    time.Duration // do nothing for this long
	GapSafe int           // a drain of this many rows by the gap-safe cursor
	Stream  *streamJob
	Shards  *shardsJob
}

// relayUsage is what the process used during the job. Nil: it cannot be measured here.
type relayUsage struct {
	Published      int64
	Seconds        float64
	CPUSeconds     *float64
	MemoryMB       *float64 // the peak of the process
	ResidentMB     *float64 // at the end
	HeapMB         *float64 // peak of the heap, including garbage
	Queries        int64    // statements that were sent to the database
	Stream         *streamFound
	RowsPerSecond, // for shardsJob
	RoundTripMillis float64
}

// idleWarmUp is how long an idle relay takes to get its lease and to lengthen its pauses.
const idleWarmUp = 3 * time.Second

// RelayProcess runs only the relay that Relay measures, in a process that Relay started: see
// RelayOptions.Command. stdin carries the job and also connects the process to its parent: when it
// ends, the parent is gone and orphaned is called, which has to end the process at once.
func RelayProcess(ctx context.Context, stdin io.Reader, stdout io.Writer, orphaned func()) error {
	input := bufio.NewReader(stdin)
	var job relayJob
	line, err := input.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &job)
	}
	if err != nil {
		return fmt.Errorf("this command is started by the benchmark, not by people: no job on standard input: %w", err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, input) // however it ended, the parent is gone
		orphaned()
	}()
	used, err := job.run(ctx)
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(used)
}

func (j relayJob) run(ctx context.Context) (*relayUsage, error) {
	here := &site{Servers: Servers{DatabaseURL: j.DatabaseURL, Brokers: j.Brokers}, schema: j.Schema}
	switch {
	case j.Stream != nil:
		found, err := newStream(here, *j.Stream, j.ProgressTopic).measure(ctx)
		return &relayUsage{Stream: found}, err
	case j.Shards != nil:
		return j.Shards.run(ctx, here)
	case j.GapSafe > 0:
		return j.watched(func() (int64, error) { return here.cursor(ctx, gapSafeSQL, j.GapSafe) })
	}
	queries := &queryCounter{}
	config, err := pgxpool.ParseConfig(j.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	config.MaxConns = 4
	if j.Idle > 0 {
		config.ConnConfig.Tracer = queries
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer pool.Close()
	options := relay.Config{Schema: j.Schema, Name: j.Name, ExactlyOnce: j.ExactlyOnce, ProgressTopic: j.ProgressTopic}
	if j.Metrics {
		options.Hooks = metrics.New(metrics.Config{Relay: j.Name, Schema: j.Schema}).Hooks()
	}
	r, err := relay.New(pool, here.producer(), options)
	if err != nil {
		return nil, err
	}
	if j.Idle > 0 {
		return j.idle(ctx, r, queries)
	}
	return j.watched(func() (int64, error) { return r.Drain(ctx) })
}

// watched measures a drain.
func (j relayJob) watched(drain func() (int64, error)) (used *relayUsage, err error) {
	used = &relayUsage{}
	heap := &heapWatch{}
	if j.Heap {
		heap.begin()
	}
	measure := begin()
	used.Published, err = drain()
	measure.end(used)
	used.HeapMB = heap.end()
	return used, err
}

func (j relayJob) idle(ctx context.Context, r *relay.Relay, queries *queryCounter) (*relayUsage, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	used := &relayUsage{}
	var measure usage
	for _, phase := range []struct {
		takes time.Duration
		then  func()
	}{
		{idleWarmUp, func() { measure = begin(); used.Queries -= queries.n.Load() }},
		{j.Idle, func() { used.Queries += queries.n.Load(); measure.end(used); used.HeapMB = heapMB() }},
	} {
		timer := time.NewTimer(phase.takes)
		select {
		case err := <-done:
			timer.Stop()
			return nil, errors.Join(errors.New("the idle relay ended"), err)
		case <-timer.C:
		}
		phase.then()
	}
	stop()
	return used, <-done
}

// usage is what this process had used at a moment.
type usage struct {
	at  time.Time
	cpu *float64
}

func begin() usage { return usage{time.Now(), cpuSeconds()} }

func (u usage) end(used *relayUsage) {
	used.Seconds = time.Since(u.at).Seconds()
	if cpu := cpuSeconds(); cpu != nil && u.cpu != nil {
		spent := *cpu - *u.cpu
		used.CPUSeconds = &spent
	}
	used.MemoryMB, used.ResidentMB = memory("VmHWM:"), memory("VmRSS:")
}

// memory is the resident memory, or its peak. The rusage of a process that was just started would
// return the peak of its parent, whose memory it shares until it executes another program.
func memory(which string) *float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil // not Linux
	}
	_, after, _ := strings.Cut(string(status), which)
	fields := strings.Fields(after)
	if len(fields) == 0 {
		return nil
	}
	kilobytes, err := strconv.ParseFloat(fields[0], 64)
	if err != nil {
		return nil
	}
	megabytes := kilobytes * 1024 / 1e6
	return &megabytes
}

// queryCounter counts statements.
type queryCounter struct{ n atomic.Int64 }

func (c *queryCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (c *queryCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *queryCounter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	c.n.Add(int64(data.Batch.Len()))
	return ctx
}

func (c *queryCounter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (c *queryCounter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
