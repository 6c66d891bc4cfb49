package bench

import "io"

// RelayReport is the result of Relay: rows per second, medians of the rounds.
type RelayReport struct {
	SkipLocked *float64 `json:"skip_locked,omitempty" row:"textbook: FOR UPDATE SKIP LOCKED"`
	BareCursor *float64 `json:"bare_cursor,omitempty" row:"bare cursor, guarantees nothing"`
	GapSafe    *float64 `json:"gap_safe_cursor,omitempty" row:"gap-safe cursor, below the oldest open transaction"`
	Relay      *float64 `json:"relay,omitempty" row:"relay"`
	Exactly    *float64 `json:"exactly_once,omitempty" row:"relay, exactly once"`

	RelayVsSkipLocked *float64 `json:"relay_vs_skip_locked,omitempty" ratio:"relay/skip_locked"`
	RelayVsBareCursor *float64 `json:"relay_vs_bare_cursor,omitempty" ratio:"relay/bare_cursor"`
	RelayVsGapSafe    *float64 `json:"relay_vs_gap_safe_cursor,omitempty" ratio:"relay/gap_safe_cursor"`
	ExactlyVsRelay    *float64 `json:"exactly_once_vs_relay,omitempty" ratio:"exactly_once/relay"`

	// From commit to consumable, at 500 messages a second
	P50 *float64 `json:"p50_ms,omitempty" fact:"from commit to consumable, median" as:"%.2f ms"`
	P99 *float64 `json:"p99_ms,omitempty" fact:"from commit to consumable, 99 of 100" as:"%.2f ms"`

	// Usage of a process that runs only the relay, with metrics as in outbox-relay run.
	CPU               *float64 `json:"cpu_seconds_per_million,omitempty" of:"cpu" digits:"2" fact:"relay alone, a million rows" as:"%.2f CPU seconds"`
	CPUWithoutMetrics *float64 `json:"cpu_seconds_per_million_without_metrics,omitempty" of:"cpu_without_metrics" digits:"2" fact:"relay alone, a million rows, without metrics" as:"%.2f CPU seconds"`
	CPUExactly        *float64 `json:"cpu_seconds_per_million_exactly_once,omitempty" of:"cpu_exactly_once" digits:"2" fact:"relay alone, a million rows, exactly once" as:"%.2f CPU seconds"`
	// Peak of the resident memory during a drain
	Memory        *float64 `json:"memory_mb,omitempty" of:"memory" fact:"relay alone, memory" as:"%.0f MB"`
	MemoryExactly *float64 `json:"memory_mb_exactly_once,omitempty" of:"memory_exactly_once" fact:"relay alone, memory, exactly once" as:"%.0f MB"`
	IdleCPU       *float64 `json:"idle_cpu_percent,omitempty" of:"idle_cpu" digits:"2" fact:"relay alone, idle" as:"%.2f %% of a core"`
	IdleQueries   *float64 `json:"idle_queries_per_second,omitempty" of:"idle_queries" digits:"1" fact:"relay alone, idle, statements" as:"%.1f a second"`

	// The same process with LargeRows and with Rows to drain.
	Process      *float64 `json:"relay_process,omitempty" of:"process"` // rows a second
	Large        *float64 `json:"large_relay_process,omitempty" of:"process_large"`
	LargeVsRelay *float64 `json:"large_vs_relay_process,omitempty" ratio:"large_relay_process/relay_process" fact:"a backlog of {large_rows} rows against one of {rows}" as:"%.2f"`
	LargeCPU     *float64 `json:"large_cpu_seconds_per_million,omitempty" of:"cpu_large" digits:"2"`
	LargeMemory  *float64 `json:"large_memory_mb,omitempty" of:"memory_large" fact:"a backlog of {large_rows} rows, memory" as:"%.0f MB"`
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
		Rows: opts.Rows, PayloadBytes: payloadBytes, Partitions: opts.Partitions, Rounds: opts.Rounds,
		LatencySeconds: opts.LatencySeconds, Scenarios: opts.Scenarios,
		Load: loadFigures(ScenarioLoad, runs, s), Network: loadFigures(ScenarioNetwork, runs, s), Pooler: loadFigures(ScenarioPooler, runs, s),
		Backlogs: backlogFigures(opts, s), Shards: shardFigures(s),
	}
	if latencies := s["latency"]; len(latencies) > 0 {
		p50, p99 := percentile(latencies, 0.5), percentile(latencies, 0.99)
		r.P50, r.P99 = rounded(&p50, 2), rounded(&p99, 2)
	}
	if fill(r, s); r.Large != nil {
		r.LargeRows = opts.LargeRows
	}
	r.tooSmall("rows", opts.Rows, rowsTelling, opts.Rounds)
	return r
}

// WriteTable writes the report for people.
func (r *RelayReport) WriteTable(w io.Writer) error {
	t := newTable(w, "drain of a backlog", "rows/s", "against the textbook")
	t.figures(r)
	r.writeScenarios(t)
	r.writeNotes(t)
	return t.flush()
}
