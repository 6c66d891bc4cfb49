package bench

import (
	"fmt"
	"io"
)

// RelayReport is the result of Relay: rows per second, medians of the rounds. A key that could not
// be measured is left out.
type RelayReport struct {
	SkipLocked *float64 `json:"skip_locked,omitempty"` // the textbook's poller
	BareCursor *float64 `json:"bare_cursor,omitempty"` // reads and produces, guarantees nothing
	// The same below the oldest open transaction
	GapSafe *float64 `json:"gap_safe_cursor,omitempty"`
	Relay   *float64 `json:"relay,omitempty"`
	Exactly *float64 `json:"exactly_once,omitempty"` // the relay, in Kafka transactions

	RelayVsSkipLocked *float64 `json:"relay_vs_skip_locked,omitempty"`
	RelayVsBareCursor *float64 `json:"relay_vs_bare_cursor,omitempty"`
	RelayVsGapSafe    *float64 `json:"relay_vs_gap_safe_cursor,omitempty"`
	ExactlyVsRelay    *float64 `json:"exactly_once_vs_relay,omitempty"`

	P50 *float64 `json:"p50_ms,omitempty"` // from commit to consumable, at 500 messages a second
	P99 *float64 `json:"p99_ms,omitempty"`

	// Usage of a process that runs only the relay, with metrics as in outbox-relay run.
	CPU               *float64 `json:"cpu_seconds_per_million,omitempty"`
	CPUWithoutMetrics *float64 `json:"cpu_seconds_per_million_without_metrics,omitempty"`
	CPUExactly        *float64 `json:"cpu_seconds_per_million_exactly_once,omitempty"`
	// Peak of the resident memory during a drain
	Memory        *float64 `json:"memory_mb,omitempty"`
	MemoryExactly *float64 `json:"memory_mb_exactly_once,omitempty"`
	IdleCPU       *float64 `json:"idle_cpu_percent,omitempty"` // of one core
	IdleQueries   *float64 `json:"idle_queries_per_second,omitempty"`

	// The same process with LargeRows and with Rows to drain.
	Process      *float64 `json:"relay_process,omitempty"` // rows a second
	Large        *float64 `json:"large_relay_process,omitempty"`
	LargeVsRelay *float64 `json:"large_vs_relay_process,omitempty"`
	LargeCPU     *float64 `json:"large_cpu_seconds_per_million,omitempty"`
	LargeMemory  *float64 `json:"large_memory_mb,omitempty"`
	LargeRows    int      `json:"large_rows,omitempty"`

	Load     []LoadFigures    `json:"load,omitempty"`
	Backlogs []BacklogFigures `json:"backlogs,omitempty"`
	Network  []LoadFigures    `json:"network,omitempty"` // with PostgreSQL a round trip away
	Pooler   []LoadFigures    `json:"pooler,omitempty"`  // through PgBouncer
	Shards   []ShardFigures   `json:"shards,omitempty"`

	Scenarios      []string `json:"scenarios"`
	Rows           int      `json:"rows"`
	PayloadBytes   int      `json:"payload_bytes"`
	Partitions     int      `json:"partitions"`
	Rounds         int      `json:"rounds"`
	LatencySeconds int      `json:"latency_seconds"`

	Where
}

func newRelayReport(opts RelayOptions, s samples, runs steadies) *RelayReport {
	r := &RelayReport{
		SkipLocked: rounded(s.median("skip_locked"), 0), BareCursor: rounded(s.median("bare_cursor"), 0),
		GapSafe: rounded(s.median("gap_safe_cursor"), 0), Relay: rounded(s.median("relay"), 0), Exactly: rounded(s.median("exactly_once"), 0),
		Rows: opts.Rows, PayloadBytes: payloadBytes, Partitions: opts.Partitions, Rounds: opts.Rounds,
		LatencySeconds: opts.LatencySeconds, Scenarios: opts.Scenarios,
	}
	r.CPU, r.CPUWithoutMetrics, r.CPUExactly = rounded(s.median("cpu"), 2), rounded(s.median("cpu_without_metrics"), 2), rounded(s.median("cpu_exactly_once"), 2)
	r.Memory, r.MemoryExactly = rounded(s.median("memory"), 0), rounded(s.median("memory_exactly_once"), 0)
	r.IdleCPU, r.IdleQueries = rounded(s.median("idle_cpu"), 2), rounded(s.median("idle_queries"), 1)
	r.Process = rounded(s.median("process"), 0)
	if r.Large = rounded(s.median("process_large"), 0); r.Large != nil {
		r.LargeVsRelay, r.LargeRows = ratio(r.Large, r.Process), opts.LargeRows
		r.LargeCPU, r.LargeMemory = rounded(s.median("cpu_large"), 2), rounded(s.median("memory_large"), 0)
	}
	r.RelayVsSkipLocked = ratio(r.Relay, r.SkipLocked)
	r.RelayVsBareCursor = ratio(r.Relay, r.BareCursor)
	r.RelayVsGapSafe, r.ExactlyVsRelay = ratio(r.Relay, r.GapSafe), ratio(r.Exactly, r.Relay)
	r.Load, r.Network, r.Pooler = loadFigures(ScenarioLoad, runs, s), loadFigures(ScenarioNetwork, runs, s), loadFigures(ScenarioPooler, runs, s)
	r.Backlogs, r.Shards = backlogFigures(opts, s), shardFigures(s)
	latencies := s["latency"]
	if len(latencies) > 0 {
		p50, p99 := percentile(latencies, 0.5), percentile(latencies, 0.99)
		r.P50, r.P99 = rounded(&p50, 2), rounded(&p99, 2)
	}
	r.tooSmall("rows", opts.Rows, rowsTelling, opts.Rounds)
	return r
}

// WriteTable writes the report for people.
func (r *RelayReport) WriteTable(w io.Writer) error {
	t := newTable(w, "drain of a backlog", "rows/s", "against the textbook")
	t.row("textbook: FOR UPDATE SKIP LOCKED", r.SkipLocked, ratio(r.SkipLocked, r.SkipLocked))
	t.row("bare cursor, guarantees nothing", r.BareCursor, ratio(r.BareCursor, r.SkipLocked))
	t.row("gap-safe cursor, below the oldest open transaction", r.GapSafe, ratio(r.GapSafe, r.SkipLocked))
	t.row("relay", r.Relay, r.RelayVsSkipLocked)
	t.row("relay, exactly once", r.Exactly, ratio(r.Exactly, r.SkipLocked))
	t.line("")
	t.fact("from commit to consumable, median", r.P50, "%.2f ms")
	t.fact("from commit to consumable, 99 of 100", r.P99, "%.2f ms")
	t.fact("relay alone, a million rows", r.CPU, "%.2f CPU seconds")
	t.fact("relay alone, a million rows, without metrics", r.CPUWithoutMetrics, "%.2f CPU seconds")
	t.fact("relay alone, a million rows, exactly once", r.CPUExactly, "%.2f CPU seconds")
	t.fact("relay alone, memory", r.Memory, "%.0f MB")
	t.fact("relay alone, memory, exactly once", r.MemoryExactly, "%.0f MB")
	t.fact("relay alone, idle", r.IdleCPU, "%.2f %% of a core")
	t.fact("relay alone, idle, statements", r.IdleQueries, "%.1f a second")
	t.fact(fmt.Sprintf("a backlog of %d rows against one of %d", r.LargeRows, r.Rows), r.LargeVsRelay, "%.2f")
	t.fact(fmt.Sprintf("a backlog of %d rows, memory", r.LargeRows), r.LargeMemory, "%.0f MB")
	r.writeScenarios(t)
	r.writeNotes(t)
	return t.flush()
}
