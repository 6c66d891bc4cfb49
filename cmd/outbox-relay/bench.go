//go:build !lean

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/servers"
)

// flagBenchProcess makes the program the measured relay, as flagDemoProcess makes it a process of
// the demo.
const flagBenchProcess = "relay-process"

func newBench(s *cli.Settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the consumer or the relay against the textbook way",
		Long: `Measure the consumer or the relay against the textbook way, in turns in one run.

Without addresses it starts PostgreSQL (downloaded at the first run) and an in-process Kafka. With
--database-url and --brokers it uses a schema, topics and groups of its own there, and removes them at
the end. Run it on an idle machine; only the ratios count.`,
	}
	cmd.AddCommand(newBenchConsume(s), newBenchRelay(s))
	return cmd
}

func newBenchConsume(s *cli.Settings) *cobra.Command {
	b := &benchmark{Settings: s}
	var options bench.ConsumeOptions
	cmd := &cobra.Command{
		Use:   "consume",
		Short: "Measure messages per second, each with one insert as its effect",
		Long: `Measure messages per second, each with one insert as its effect. Figures are medians of the rounds.

  textbook           one message per transaction, in sequence: claim, effect, commit
  textbook_parallel  the same with a goroutine and a connection per partition
  watermill          the same transaction in Watermill's router, over the same Kafka client
  statement          the engine; the handler waits for one statement per message
  by_id              the engine; the effects of a batch go in one round trip
  no_dedup           by_id without claims
  all_duplicates     by_id when every message was claimed before
  parked_key         by_id while a parked message holds one key of a thousand
  by_position        by_id with the position instead of claims
  batch_copy         the engine; a handler of whole batches uses COPY
  hand_loop          the statements of by_id, by hand

  bytes_per_message      growth of the claims' table and index
  wal_bytes_per_message  write-ahead log per claim: by_id less no_dedup, each right after a checkpoint; of the
                         whole server, so too high on a busy one; needs the right to run CHECKPOINT
  ..._interleaved        both for all partitions at once (index pages less full); else for one partition,
                         whose IDs come in time order
  round_trip_us          a statement; textbook needs four per message
  commit_us              a COMMIT; textbook needs one per message. Ratios are small where commits are cheap
                         (no fsync, a disk with a write cache), else large`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return b.run(cmd, func(ctx context.Context, on bench.Servers, progress func(string)) (report, error) {
				options.Servers, options.Progress = on, progress
				return bench.Consume(ctx, options)
			})
		},
	}
	flags := cmd.Flags()
	cli.AddInt(flags, &options.Messages, "messages", bench.MessagesDefault, bench.MessagesMin, bench.MessagesMax,
		"messages per round; statement takes a quarter of them, textbook a fortieth, its faster forms a tenth")
	cli.AddInt(flags, &options.Partitions, "partitions", bench.ConsumePartitionsDefault, bench.PartitionsMin, bench.PartitionsMax,
		"partitions of the topic; the textbook loop stays a single one")
	b.addFlags(cmd, &options.Rounds)
	return cmd
}

const benchRelayHelp = `Measure rows per second of a backlog, and the time from commit to consumable. Rows have 256 bytes of
payload and one of 1,000 keys. All variants produce with the same settings. Figures are medians.

  skip_locked      textbook poller: SELECT ... FOR UPDATE SKIP LOCKED, produce, DELETE, commit
  bare_cursor      reads by row number and produces; stores nothing, loses late commits: a ceiling
  gap_safe_cursor  the same below the oldest open transaction: loses nothing, waits for every transaction
  relay            the relay
  exactly_once     the relay with --exactly-once
  p50_ms, p99_ms   from the return of COMMIT until a consumer has the record, at 500 messages per second

Of a process that runs only the relay, with PostgreSQL and Kafka elsewhere:

  cpu_seconds_per_million  CPU time per million rows, with metrics; also _without_metrics, _exactly_once
  memory_mb                peak resident memory during the drain (Linux); also _exactly_once
  idle_cpu_percent         of one core, with nothing to publish
  idle_queries_per_second  statements sent to the database while idle
  large_...                with --large-rows N, a single drain of N rows: large_vs_relay_process is its rate
                           against that of --rows, large_memory_mb its memory. Ten million rows take about
                           12 GB of the database's disk and write-ahead log

These are the default scenarios drain, process, latency and idle. Others, by --scenario:

  load     500 and 5,000 messages per second (the latter in transactions of ten) for --latency-seconds:
           p50_ms and p99_ms of relay, exactly once and a poller with a 5 ms interval;
           process_cpu_seconds_per_million of the process with writers, relay and reader;
           postgres_cpu_seconds_per_million of the whole server, if it is local; ..._vs_poller: ratios
  backlog  drains of --backlog-rows in separate processes: rows_per_second, vs_gap_safe_cursor, vs_smallest
           (backlog), memory_above_idle_mb (resident, against an idle relay), heap_above_idle_mb
  network  500 messages per second with PostgreSQL 3 ms away (round_trip_ms: as measured), but not for the
           writers
  pooler   the same through PgBouncer in transaction mode, with and without prepared statements (PgBouncer
           1.21 or later); needs the program pgbouncer
  shards   four replicas in one process, PostgreSQL 3 ms away, 1, 2 and 4 shards: rows_per_second of
           --shard-rows, counted once the shards are spread over the replicas`

func newBenchRelay(s *cli.Settings) *cobra.Command {
	b := &benchmark{Settings: s}
	var options bench.RelayOptions
	var child bool
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Measure rows per second of a backlog, and the time from commit to consumable",
		Long:  benchRelayHelp,
		Args:  cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if child {
				relaxCollector() // as outbox-relay run does
				// When the parent is gone there is nothing to report or to clean up.
				orphaned := func() { os.Exit(exitNotWell) }
				return bench.RelayProcess(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), orphaned)
			}
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program, to start it as the relay that is measured: %w", err)
			}
			return b.run(cmd, func(ctx context.Context, on bench.Servers, progress func(string)) (report, error) {
				options.Servers, options.Progress = on, progress
				options.Command = b.ChildCommand(program, "bench", "relay", "--"+flagBenchProcess)
				return bench.Relay(ctx, options)
			})
		},
	}
	flags := cmd.Flags()
	cli.AddInt(flags, &options.Rows, "rows", bench.RowsDefault, bench.RowsMin, bench.RowsMax, "rows of the backlog")
	cli.AddInt(flags, &options.Partitions, "partitions", bench.RelayPartitionsDefault, bench.PartitionsMin, bench.PartitionsMax, "partitions of the topic")
	cli.AddInt(flags, &options.LatencySeconds, "latency-seconds", bench.LatencySecondsDefault, bench.LatencySecondsMin, bench.LatencySecondsMax,
		"how long messages are published")
	cli.AddInt(flags, &options.LargeRows, "large-rows", 0, 0, bench.LargeRowsMax, "rows of a larger backlog to compare with; 0: none")
	cli.AddInt(flags, &options.IdleSeconds, "idle-seconds", bench.IdleSecondsDefault, bench.IdleSecondsMin, bench.IdleSecondsMax, "how long an idle relay is watched")
	cli.AddOption(flags, "scenario", "string", "", "comma-separated list of "+scenarioNames()+", or all; default: the first four", func(text string) (err error) {
		options.Scenarios, err = bench.ParseScenarios(text)
		return err
	})
	cli.AddOption(flags, "backlog-rows", "string", "1000000,10000000", "comma-separated sizes of backlogs, for the scenario backlog", func(text string) (err error) {
		options.BacklogRows, err = bench.ParseBacklogRows(text)
		return err
	})
	cli.AddInt(flags, &options.ShardRows, "shard-rows", bench.ShardRowsDefault, bench.ShardRowsMin, bench.ShardRowsMax, "rows of the scenario shards")
	cli.AddBool(flags, &child, flagBenchProcess, "be a process of the benchmark")
	_ = flags.MarkHidden(flagBenchProcess) // fails only for a flag that is not there
	b.addFlags(cmd, &options.Rounds)
	return cmd
}

func scenarioNames() string {
	all, _ := bench.Scenarios()
	return strings.Join(all, ", ")
}

// report is the result of a benchmark.
type report interface {
	WriteTable(out io.Writer) error
	SetServers(postgres, kafka string, took time.Duration)
}

// benchmark is one run of a bench command.
type benchmark struct {
	*cli.Settings
	json bool
}

func (b *benchmark) addFlags(cmd *cobra.Command, rounds *int) {
	cli.PlainKafka(cmd)
	cli.AddInt(cmd.Flags(), rounds, "rounds", bench.RoundsDefault, bench.RoundsMin, bench.RoundsMax, "how many rounds")
	cli.AddJSON(cmd, &b.json)
	cmd.Flags().Lookup("json").Usage = "print one line of JSON instead of the table"
}

// checkpointsAway keeps an embedded PostgreSQL from a checkpoint during a run. Everything else,
// durability above all, keeps its default.
func checkpointsAway() map[string]string {
	return map[string]string{"max_wal_size": "8GB", "checkpoint_timeout": "1h"}
}

func (b *benchmark) run(cmd *cobra.Command, measure func(context.Context, bench.Servers, func(string)) (report, error)) (err error) {
	ctx, begin := cmd.Context(), time.Now()
	progress := func(line string) {
		_ = terminal.Say(cmd.ErrOrStderr(), "%s\n", line) // a failed write does not stop the run
	}
	progress("starting the servers (the first run downloads PostgreSQL)")
	address, err := b.DatabaseAddress()
	if err != nil {
		return err
	}
	postgres, err := servers.StartPostgres(ctx, servers.PostgresOptions{
		DatabaseURL: address, Embedded: !b.HasDatabase(), Parameters: checkpointsAway(),
	})
	if err != nil {
		return err
	}
	defer stop(ctx, postgres.Stop, &err)
	kafka, err := servers.StartKafka(ctx, servers.KafkaOptions{Brokers: b.Brokers, Embedded: len(b.Brokers) == 0})
	if err != nil {
		return err
	}
	defer stop(ctx, kafka.Stop, &err)
	progress(postgres.Description)
	progress(kafka.Description)
	found, err := measure(ctx, bench.Servers{DatabaseURL: postgres.URL, Brokers: kafka.Brokers}, progress)
	if err != nil {
		return err
	}
	found.SetServers(postgres.Description, kafka.Description, time.Since(begin))
	if b.json {
		return terminal.PrintJSON(cmd.OutOrStdout(), found)
	}
	return found.WriteTable(cmd.OutOrStdout())
}
