package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// costs measures the relay in a process that runs nothing else: PostgreSQL has its own, and an
// in-process Kafka stays in this one. Each variant is measured in every round, and the order
// rotates.
func (b *relayBench) costs(ctx context.Context, round int) error {
	variants := []struct {
		suffix string
		job    relayJob
	}{
		{"", relayJob{Metrics: true}},
		{"_without_metrics", relayJob{}},
		{"_exactly_once", relayJob{Metrics: true, ExactlyOnce: true}},
	}
	for i := range variants {
		v := variants[(i+round)%len(variants)]
		v.job.Name = costName(round, v.suffix)
		if err := b.cost(ctx, v.suffix, v.job, b.opts.Rows); err != nil {
			return fmt.Errorf("round %d: cost%s: %w", round+1, v.suffix, err)
		}
	}
	return nil
}

func costName(round int, suffix string) string { return fmt.Sprintf("cost-%d%s", round, suffix) }

// cost measures one drain. It adds the results under the names of the report, with a suffix.
func (b *relayBench) cost(ctx context.Context, suffix string, job relayJob, rows int) error {
	if err := errors.Join(b.emptyTopic(ctx), b.checkpoint(ctx)); err != nil {
		return err
	}
	before, err := b.written(ctx)
	if err != nil {
		return err
	}
	found, err := b.process(ctx, job)
	if err != nil {
		return err
	}
	if job.ExactlyOnce {
		if err := b.marked(ctx); err != nil {
			return err
		}
	}
	after, err := b.written(ctx)
	if err != nil {
		return err
	}
	if got := after - before; found.Published != int64(rows) || got < int64(rows) || (got > int64(rows) && !job.ExactlyOnce) {
		return fmt.Errorf("the relay counted %d of %d rows, which became %d records: this is a bug, the figures are void; please report it",
			found.Published, rows, got)
	}
	b.samples.add("process"+suffix, float64(rows)/found.Seconds)
	line := fmt.Sprintf("relay alone%s: %.0f rows/s", suffix, float64(rows)/found.Seconds)
	if found.CPUSeconds != nil {
		b.samples.add("cpu"+suffix, *found.CPUSeconds/float64(rows)*1e6)
		line += fmt.Sprintf(", %.2f CPU seconds a million", *found.CPUSeconds/float64(rows)*1e6)
	}
	if found.MemoryMB != nil {
		b.samples.add("memory"+suffix, *found.MemoryMB)
		line += fmt.Sprintf(", %.0f MB", *found.MemoryMB)
	}
	b.note("%s", line)
	return nil
}

// large drains a larger backlog: neither rate nor memory should depend on the size.
func (b *relayBench) large(ctx context.Context) error {
	if b.opts.LargeRows == 0 {
		return nil
	}
	if err := b.exec(ctx, "empty the outbox", emptyOutboxSQL); err != nil {
		return err
	}
	if err := b.fill(ctx, b.opts.LargeRows); err != nil {
		return err
	}
	b.behind = "cost-large"
	return b.cost(ctx, "_large", relayJob{Name: b.behind, Metrics: true}, b.opts.LargeRows)
}

// idle measures a relay without work, after it has waited long enough for its pauses to be the
// longest.
func (b *relayBench) idle(ctx context.Context) error {
	b.note("an idle relay for %d seconds", b.opts.IdleSeconds)
	found, err := b.process(ctx, relayJob{Name: b.behind, Metrics: true, Idle: time.Duration(b.opts.IdleSeconds) * time.Second})
	if err != nil {
		return fmt.Errorf("idle: %w", err)
	}
	if found.CPUSeconds != nil {
		b.samples.add("idle_cpu", *found.CPUSeconds/found.Seconds*100)
	}
	b.samples.add("idle_queries", float64(found.Queries)/found.Seconds)
	return nil
}

// trimEvery is how often the produced records are deleted from the topic: they may be in this
// process's memory.
const trimEvery = 500 * time.Millisecond

// process runs a job in a separate process.
func (b *relayBench) process(ctx context.Context, job relayJob) (*relayUsage, error) {
	job.DatabaseURL = cmp.Or(job.DatabaseURL, b.DatabaseURL)
	job.Brokers, job.Schema, job.ProgressTopic = b.Brokers, b.schema, b.progress
	task, err := json.Marshal(job)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.opts.Command[0], b.opts.Command[1:]...) //nolint:gosec // this program itself
	var out, logs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &logs
	stdin, err := cmd.StdinPipe() // open for as long as this process lives
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the relay's process: %w", err)
	}
	// It fits into the pipe; if the process has already ended, Wait reports it
	_, _ = stdin.Write(append(task, '\n'))
	group, trimming := errgroup.WithContext(ctx)
	if job.Stream == nil { // whose reader has not read them yet
		group.Go(func() error { return b.trim(trimming) })
	}
	err = cmd.Wait()
	cancel()
	if trimmed := group.Wait(); err == nil && trimmed != nil {
		return nil, trimmed
	}
	if err != nil {
		return nil, fmt.Errorf("the relay's process: %w: %s", err, strings.TrimSpace(logs.String()))
	}
	found := &relayUsage{}
	if err := json.Unmarshal(out.Bytes(), found); err != nil {
		return nil, fmt.Errorf("what the relay's process found: %w", err)
	}
	return found, nil
}

// trim returns nil when ctx ends.
func (b *relayBench) trim(ctx context.Context) error {
	every := time.NewTicker(trimEvery)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-every.C:
			if err := b.emptyTopic(ctx); err != nil && ctx.Err() == nil {
				return err
			}
		}
	}
}
