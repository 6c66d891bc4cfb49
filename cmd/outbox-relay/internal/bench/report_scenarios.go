package bench

import "fmt"

// LoadFigures are the figures of a steady load: medians of the rounds. The latency is from the
// return of COMMIT to consumable. CPU time is that of the process with writers, relay and reader,
// and that of the whole PostgreSQL server if its processes are on this machine.
type LoadFigures struct {
	Way              string   `json:"way"`
	PgBouncer        string   `json:"pgbouncer,omitempty"` // none, prepared, not prepared
	WantedPerSecond  int      `json:"wanted_per_second"`
	PerCommit        int      `json:"messages_per_commit"`
	PerSecond        *float64 `json:"messages_per_second,omitempty"`
	P50              *float64 `json:"p50_ms,omitempty"`
	P99              *float64 `json:"p99_ms,omitempty"`
	CPU              *float64 `json:"process_cpu_seconds_per_million,omitempty"`
	PostgresCPU      *float64 `json:"postgres_cpu_seconds_per_million,omitempty"`
	CPUVsPoller      *float64 `json:"process_cpu_vs_poller,omitempty"`
	PostgresVsPoller *float64 `json:"postgres_cpu_vs_poller,omitempty"`
	RoundTripMillis  *float64 `json:"round_trip_ms,omitempty"` // of a statement
}

func loadFigures(scenario string, runs steadies, s samples) (figures []LoadFigures) {
	for _, run := range runs {
		if run.scenario != scenario {
			continue
		}
		key := run.key()
		poller := run
		poller.job.Way = wayPoller
		f := LoadFigures{
			Way: run.job.Way, PgBouncer: run.pooler, WantedPerSecond: run.job.Rate, PerCommit: run.job.PerCommit,
			PerSecond: rounded(s.median(key+"rate"), 0), P50: rounded(s.median(key+"p50"), 2), P99: rounded(s.median(key+"p99"), 2),
			CPU: rounded(s.median(key+"cpu"), 0), PostgresCPU: rounded(s.median(key+"server"), 0), RoundTripMillis: rounded(s.median(key+"trip"), 2),
			CPUVsPoller:      ratio(s.median(key+"cpu"), s.median(poller.key()+"cpu")),
			PostgresVsPoller: ratio(s.median(key+"server"), s.median(poller.key()+"server")),
		}
		figures = append(figures, f)
	}
	return figures
}

// BacklogFigures are the figures of a drain in a separate process.
type BacklogFigures struct {
	Rows int    `json:"rows"`
	Way  string `json:"way"`
	// Rate in rows per second, relative to that of the gap-safe cursor, and relative to that of the
	// smallest backlog.
	Rate       *float64 `json:"rows_per_second,omitempty"`
	VsGapSafe  *float64 `json:"vs_gap_safe_cursor,omitempty"`
	VsSmallest *float64 `json:"vs_smallest,omitempty"`
	CPU        *float64 `json:"cpu_seconds_per_million,omitempty"`
	Memory     *float64 `json:"memory_mb,omitempty"` // peak of the resident memory
	AboveIdle  *float64 `json:"memory_above_idle_mb,omitempty"`
	// Peak of the heap, including garbage
	HeapAboveIdle *float64 `json:"heap_above_idle_mb,omitempty"`
}

func backlogFigures(opts RelayOptions, s samples) (figures []BacklogFigures) {
	for _, rows := range opts.BacklogRows {
		for _, way := range backlogWays(rows) {
			key := backlogKey(rows, way.key)
			rate := s.median(key)
			if rate == nil {
				continue
			}
			figures = append(figures, BacklogFigures{
				Rows: rows, Way: way.key, Rate: rounded(rate, 0),
				VsGapSafe:  ratio(rate, s.median(backlogKey(rows, "gap_safe_cursor"))),
				VsSmallest: ratio(rate, s.median(backlogKey(opts.BacklogRows[0], way.key))),
				CPU:        rounded(s.median(key+"cpu"), 2), Memory: rounded(s.median(key+"memory"), 0),
				AboveIdle: rounded(s.median(key+"memory_above"), 0), HeapAboveIdle: rounded(s.median(key+"heap_above"), 0),
			})
		}
	}
	return figures
}

// ShardFigures are the figures of a drain by several replicas.
type ShardFigures struct {
	Shards          int      `json:"shards"`
	Replicas        int      `json:"replicas"`
	Rate            *float64 `json:"rows_per_second,omitempty"`
	VsOne           *float64 `json:"vs_one_shard,omitempty"`
	CPU             *float64 `json:"cpu_seconds_per_million,omitempty"`
	RoundTripMillis *float64 `json:"round_trip_ms,omitempty"`
}

func shardFigures(s samples) (figures []ShardFigures) {
	for _, shards := range shardCounts() {
		rate := s.median(shardsKey(shards))
		if rate == nil {
			continue
		}
		figures = append(figures, ShardFigures{
			Shards: shards, Replicas: shardReplicas, Rate: rounded(rate, 0), VsOne: ratio(rate, s.median(shardsKey(1))),
			CPU: rounded(s.median(shardsKey(shards)+"cpu"), 2), RoundTripMillis: rounded(s.median("shards/trip"), 2),
		})
	}
	return figures
}

// writeScenarios adds the scenarios that are not always measured.
func (r *RelayReport) writeScenarios(t *table) {
	for _, part := range []struct {
		title   string
		figures []LoadFigures
	}{{"steady load", r.Load}, {"PostgreSQL a round trip away", r.Network}, {"PgBouncer", r.Pooler}} {
		for _, f := range part.figures {
			what := fmt.Sprintf("%s, %d a second, %s%s", part.title, f.WantedPerSecond, f.Way, inFront(f.PgBouncer))
			t.fact(what+": median", f.P50, "%.2f ms")
			t.fact(what+": 99 of 100", f.P99, "%.2f ms")
			t.fact(what+": the process, a million messages", f.CPU, "%.0f CPU seconds")
			t.fact(what+": PostgreSQL, a million messages", f.PostgresCPU, "%.0f CPU seconds")
		}
	}
	for _, f := range r.Backlogs {
		what := fmt.Sprintf("a backlog of %d rows, %s", f.Rows, f.Way)
		t.fact(what, f.Rate, "%.0f rows/s")
		t.fact(what+": memory above idle", f.AboveIdle, "%.0f MB")
	}
	for _, f := range r.Shards {
		t.fact(fmt.Sprintf("%d replicas, shards: %d", f.Replicas, f.Shards), f.Rate, "%.0f rows/s")
	}
}
