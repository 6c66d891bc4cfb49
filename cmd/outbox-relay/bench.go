package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/bench"
	"github.com/effectonce/effectonce/internal/servers"
)

// flagBenchProcess makes the program the relay that is measured, as flagDemoProcess makes it one of the demo.
const flagBenchProcess = "relay-process"

func newBench(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure consumer or relay, and the textbook way beside it",
		Long: `Measure consumer or relay, and the textbook way beside it, in turns and in one run.

Without addresses it brings PostgreSQL (downloaded at the first run) and an in-process Kafka. With
--database-url and --brokers it uses those, with a schema, topics and groups of its own, which it
removes at the end. Give it a machine that does nothing else; what counts are the ratios.`,
	}
	cmd.AddCommand(newBenchConsume(s), newBenchRelay(s))
	return cmd
}

func newBenchConsume(s *settings) *cobra.Command {
	b := &benchmark{settings: s}
	var options bench.ConsumeOptions
	cmd := &cobra.Command{
		Use:   "consume",
		Short: "Measure messages a second, each with one insert of effect",
		Long: `Measure messages a second, each with one insert of effect, medians of the rounds.

  textbook           one message per transaction: claim, effect, commit, one after the other
  textbook_parallel  the same with a goroutine and a connection for each partition
  watermill          the same transaction in the router of Watermill, over the same Kafka client
  statement          the engine with a handler that waits for one statement per message
  by_id              the engine with the effects of a batch queued and sent in one round trip
  no_dedup           the same with the claim taken out
  all_duplicates     the same, when every message was claimed before
  parked_key         the same, while one key of a thousand is held by a parked message
  by_position        the same with the position instead of claims
  batch_copy         the engine with a handler of whole batches that uses COPY
  hand_loop          the statements of by_id, by hand

bytes_per_message is the growth of the claims' table and index. wal_bytes_per_message is the claim's
part of the write-ahead log: that of a by_id run less that of a no_dedup run, each right after a
checkpoint. Both are of one partition, whose IDs come in the order of their time; with _interleaved they
are of all partitions at the same time, which leaves the pages of the index less full. The log is the
whole server's, so on a busy one the figure is too high; it is left out where the role must not run
CHECKPOINT.

With --preload N, dedup_cost_uuid7 and dedup_cost_random say how much longer a claim takes when N claims
of a week are in the table than when there is none.

round_trip_us and commit_us are what this machine takes for a statement and for a COMMIT. The textbook
pays four of the one and one of the other for each message: where a commit costs nothing (no fsync, a
disk with a write cache) the ratios are small, where it waits for the disk they are large.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return b.run(cmd, func(ctx context.Context, on bench.Servers, progress func(string)) (report, error) {
				options.Servers, options.Progress = on, progress
				return bench.Consume(ctx, options)
			})
		},
	}
	flags := cmd.Flags()
	addInt(flags, &options.Messages, "messages", bench.MessagesDefault, bench.MessagesMin, bench.MessagesMax,
		"messages of the fast variants in a round; statement takes a fourth of them, textbook a fortieth, its faster forms a tenth")
	addInt(flags, &options.Partitions, "partitions", bench.ConsumePartitionsDefault, bench.PartitionsMin, bench.PartitionsMax,
		"partitions of the topic; the textbook loop stays a single one")
	addInt(flags, &options.Preload, "preload", 0, 0, bench.PreloadMax, "claims in the table when the cost of one is measured again; 0: not measured")
	b.addFlags(cmd, &options.Rounds)
	return cmd
}

const benchRelayHelp = `Measure rows a second of a backlog, medians of the rounds, and the time from commit to consumable.

  skip_locked     the textbook's poller: SELECT ... FOR UPDATE SKIP LOCKED, produce, DELETE, commit
  bare_cursor     reads by row number and produces; stores nothing, loses late commits: a ceiling
  gap_safe_cursor the same below the oldest open transaction: loses nothing, waits for every transaction
  relay           the relay
  exactly_once    the relay with --exactly-once
  p50_ms, p99_ms  from the return of COMMIT until a consumer has the record, at 500 messages a second

Rows have 256 bytes of payload and one of 1,000 keys. All produce with the same settings.

Of a process that runs the relay and nothing else, neither PostgreSQL nor an in-process Kafka:

  cpu_seconds_per_million  CPU time for a million rows, with metrics counted; also _without_metrics and _exactly_once
  memory_mb                peak of resident memory during the drain (Linux); also _exactly_once
  idle_cpu_percent         of one core, with nothing to publish
  idle_queries_per_second  statements sent to the database meanwhile

With --large-rows N, it also drains a backlog of N rows, once: large_vs_relay_process is its rate against that of
--rows, large_memory_mb its memory. Ten million rows take about 12 GB of the database's disk and write-ahead log.

That is what the scenarios drain, process, latency and idle measure. More of them, by --scenario:

  load     500 and 5,000 messages a second (there ten to a transaction) for --latency-seconds: p50_ms and p99_ms of the
           relay, of exactly once and of a poller that looks every 5 ms; process_cpu_seconds_per_million of the process
           that has writers, relay and reader in it, postgres_cpu_seconds_per_million of the whole server where its
           processes are on this machine, and both against those of the poller (…_vs_poller)
  backlog  drains of --backlog-rows in processes of their own: rows_per_second, vs_gap_safe_cursor, vs_smallest (backlog),
           memory_above_idle_mb (resident, against an idle relay), heap_above_idle_mb
  network  the load of 500 a second with a PostgreSQL that is 3 ms away (round_trip_ms as measured) for what gets
           messages to Kafka, and not for the writers
  pooler   the same through PgBouncer in transaction mode, with prepared statements (from version 1.21 on) and without;
           needs the program pgbouncer
  shards   four replicas in one process, PostgreSQL 3 ms away, 1, 2 and 4 shards: rows_per_second of --shard-rows, counted
           once the shards are spread over the replicas`

func newBenchRelay(s *settings) *cobra.Command {
	b := &benchmark{settings: s}
	var options bench.RelayOptions
	var child bool
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Measure rows a second of a backlog, and the time from commit to consumable",
		Long:  benchRelayHelp,
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if child {
				// Nothing is left to be told or tidied up when the parent is gone.
				orphaned := func() { os.Exit(exitNotWell) }
				return bench.RelayProcess(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout(), orphaned)
			}
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program, to start it as the relay that is measured: %w", err)
			}
			return b.run(cmd, func(ctx context.Context, on bench.Servers, progress func(string)) (report, error) {
				options.Servers, options.Progress = on, progress
				options.Command = []string{program, "bench", "relay", "--" + flagBenchProcess}
				return bench.Relay(ctx, options)
			})
		},
	}
	flags := cmd.Flags()
	addInt(flags, &options.Rows, "rows", bench.RowsDefault, bench.RowsMin, bench.RowsMax, "rows of the backlog")
	addInt(flags, &options.Partitions, "partitions", bench.RelayPartitionsDefault, bench.PartitionsMin, bench.PartitionsMax, "partitions of the topic")
	addInt(flags, &options.LatencySeconds, "latency-seconds", bench.LatencySecondsDefault, bench.LatencySecondsMin, bench.LatencySecondsMax,
		"how long messages are published one by one")
	addInt(flags, &options.LargeRows, "large-rows", 0, 0, bench.LargeRowsMax, "rows of a larger backlog to compare with; 0: not measured")
	addInt(flags, &options.IdleSeconds, "idle-seconds", bench.IdleSecondsDefault, bench.IdleSecondsMin, bench.IdleSecondsMax, "how long an idle relay is watched")
	addOption(flags, "scenario", "string", "", "what to measure: all, or some of "+scenarioNames()+", with commas between them; default: the first four", func(text string) (err error) {
		options.Scenarios, err = bench.ParseScenarios(text)
		return err
	})
	addOption(flags, "backlog-rows", "string", "1000000,10000000", "sizes of the backlogs of the scenario backlog, with commas between them", func(text string) (err error) {
		options.BacklogRows, err = bench.ParseBacklogRows(text)
		return err
	})
	addInt(flags, &options.ShardRows, "shard-rows", bench.ShardRowsDefault, bench.ShardRowsMin, bench.ShardRowsMax, "rows of the scenario shards")
	addBool(flags, &child, flagBenchProcess, "be a process of the benchmark")
	_ = flags.MarkHidden(flagBenchProcess) // fails only for a flag that is not there
	b.addFlags(cmd, &options.Rounds)
	return cmd
}

func scenarioNames() string {
	all, _ := bench.Scenarios()
	return strings.Join(all, ", ")
}

// report is what a benchmark found.
type report interface {
	WriteTable(out io.Writer) error
	SetServers(postgres, kafka string, took time.Duration)
}

// benchmark is one run of a bench command.
type benchmark struct {
	*settings
	json bool
}

func (b *benchmark) addFlags(cmd *cobra.Command, rounds *int) {
	plainKafka(cmd)
	addInt(cmd.Flags(), rounds, "rounds", bench.RoundsDefault, bench.RoundsMin, bench.RoundsMax, "how many times the variants take turns")
	addJSON(cmd, &b.json)
	cmd.Flags().Lookup("json").Usage = "print one line of JSON in place of the table"
}

// checkpointsAway keeps an embedded PostgreSQL from a checkpoint within a run; everything else is as it
// comes, durability above all.
func checkpointsAway() map[string]string {
	return map[string]string{"max_wal_size": "8GB", "checkpoint_timeout": "1h"}
}

func (b *benchmark) run(cmd *cobra.Command, measure func(context.Context, bench.Servers, func(string)) (report, error)) (err error) {
	ctx, begin := cmd.Context(), time.Now()
	progress := func(line string) {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), line) // what cannot be shown is lost; the run goes on
	}
	progress("starting the servers (the first run downloads PostgreSQL)")
	address, err := b.databaseAddress()
	if err != nil {
		return err
	}
	postgres, err := servers.StartPostgres(ctx, servers.PostgresOptions{
		DatabaseURL: address, Embedded: b.pool == nil, Parameters: checkpointsAway(),
	})
	if err != nil {
		return err
	}
	defer stop(ctx, postgres.Stop, &err)
	kafka, err := servers.StartKafka(ctx, servers.KafkaOptions{Brokers: b.brokers, Embedded: len(b.brokers) == 0})
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
		return printJSON(cmd.OutOrStdout(), found)
	}
	return found.WriteTable(cmd.OutOrStdout())
}
