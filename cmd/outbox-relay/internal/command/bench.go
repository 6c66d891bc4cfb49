//go:build !lean

package command

import (
	"bytes"
	"context"
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newBench(s *cli.Settings) *cobra.Command {
	return group(&cobra.Command{
		Use:   "bench",
		Short: "Measure the consumer, the relay or idempotency keys against the textbook way",
		Long: `Measure the consumer, the relay or idempotency keys against the textbook way, in turns in one run.

Without addresses it starts PostgreSQL (downloaded at the first run) and an in-process Kafka. With
--database-url and --brokers it uses a schema, topics and groups of its own there, and removes them at
the end. Run it on an idle machine; only the ratios count.`,
	}, newBenchConsume(s), newBenchKeys(s), newBenchRelay(s))
}

func newBenchConsume(s *cli.Settings) *cobra.Command {
	b := &benchmark{Settings: s, measure: bench.Consume}
	return b.command("messages", &b.options.Messages, bench.MessagesDefault, bench.MessagesMin, bench.MessagesMax,
		"messages per round; textbook takes a fortieth of them", &cobra.Command{
			Use:   "consume",
			Short: "Measure messages per second, each with one insert as its effect",
			Long: `Measure messages per second, each with one insert as its effect. Figures are medians of the rounds.

  textbook        one message per transaction, in sequence: claim, effect, commit
  no_dedup        by_id without claims
  by_id           the engine; the effects of a batch go in one round trip
  by_position     by_id with the position instead of claims

  bytes_per_message      growth of the claims' table and index, with four partitions at once
  wal_bytes_per_message  write-ahead log per claim: by_id less no_dedup, each right after a checkpoint; of the
                         whole server, so too high on a busy one; needs the right to run CHECKPOINT

The textbook needs four round trips and a commit per message: its ratio is small where commits are cheap (no
fsync, a disk with a write cache), else large.`,
		})
}

func newBenchKeys(s *cli.Settings) *cobra.Command {
	b := &benchmark{Settings: s, measure: bench.Keys}
	cmd := b.command("requests", &b.options.Requests, bench.RequestsDefault, bench.RequestsMin, bench.RequestsMax, "requests per round", &cobra.Command{
		Use:   "keys",
		Short: "Measure requests per second under idempotency keys",
		Long: `Measure requests per second under idempotency keys, 32 at a time. A request inserts effects and updates one of
10,000 accounts; its response has 200 bytes. Figures are medians of the rounds.

  without         the work alone
  textbook        one transaction: insert the key, the work, store the response
  once            Operation.Once; the request is compared with the key's
  flow            Flow.Do: a call that takes no time, then the work
  replay          Operation.Once, with one of 1,000 finished keys

  bytes_per_key      growth of the table and its indexes
  wal_bytes_per_key  write-ahead log per key: once less without, each right after a checkpoint; of the whole
                     server, so too high on a busy one; needs the right to run CHECKPOINT
  xids_per_key       transaction IDs per key, beside the work's own
  forgotten          keys per second that the reaper forgets

Round trips are what a key costs: compare with --delay, as between real servers.`,
	})
	cli.AddInt(cmd.Flags(), &b.options.Statements, "statements", bench.StatementsDefault, bench.StatementsMin, bench.StatementsMax, "statements of a request")
	return cmd
}

func newBenchRelay(s *cli.Settings) *cobra.Command {
	b := &benchmark{Settings: s, measure: bench.Relay}
	return b.command("rows", &b.options.Rows, bench.RowsDefault, bench.RowsMin, bench.RowsMax, "rows of the backlog", &cobra.Command{
		Use:   "relay",
		Short: "Measure rows per second of a backlog, and the time from commit to consumable",
		Long: `Measure rows per second of a backlog, and the time from commit to consumable. Rows have 256 bytes of
payload and one of 1,000 keys. All variants produce with the same settings. Figures are medians of the rounds.

  skip_locked     textbook poller: SELECT ... FOR UPDATE SKIP LOCKED, produce, DELETE, commit
  bare_cursor     reads by row number and produces; stores nothing, loses late commits: a ceiling
  relay           the relay
  exactly_once    the relay with --exactly-once
  p50_ms, p99_ms  from the return of COMMIT until a consumer has the record, at 500 messages per second`,
	})
}

// benchmark is one run of a bench command.
type benchmark struct {
	*cli.Settings
	options bench.Options
	plot    string // a file; empty: none
	measure func(context.Context, bench.Options) (*bench.Report, error)
}

// command completes cmd; size is the flag that says how much a round measures.
func (b *benchmark) command(size string, value *int, standard, lowest, highest int, usage string, cmd *cobra.Command) *cobra.Command {
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return b.run(cmd) }
	cli.PlainKafka(cmd)
	cli.AddInt(cmd.Flags(), value, size, standard, lowest, highest, usage)
	cli.AddInt(cmd.Flags(), &b.options.Rounds, "rounds", bench.RoundsDefault, bench.RoundsMin, bench.RoundsMax, "how many rounds")
	cli.AddDuration(cmd.Flags(), &b.options.Delay, "delay", 0, 0, bench.DelayMax, "time that PostgreSQL is away, as by a network")
	cli.AddText(cmd.Flags(), "plot", plotNameMax, "write the figures to this file as well, as an SVG picture", func(file string) error {
		b.plot = file
		return b.writePlot(nil) // a wrong name is refused now, not after minutes
	})
	b.AddJSON(cmd)
	cmd.Flags().Lookup("json").Usage = "print one line of JSON instead of the table"
	return cmd
}

const plotNameMax = 4096

func (b *benchmark) writePlot(picture []byte) error {
	if b.plot == "" {
		return nil
	}
	return os.WriteFile(b.plot, picture, 0o644) //nolint:gosec // for anybody
}

func (b *benchmark) run(cmd *cobra.Command) (err error) {
	ctx, begin := cmd.Context(), time.Now()
	progress := func(line string) {
		_ = terminal.Say(cmd.ErrOrStderr(), "%s\n", line) // a failed write does not stop the run
	}
	// No checkpoint during a run; everything else, durability above all, keeps its default.
	on, err := startServers(ctx, b.Settings, map[string]string{"max_wal_size": "8GB", "checkpoint_timeout": "1h"}, progress)
	if err != nil {
		return err
	}
	defer on.stop(ctx, &err)
	b.options.DatabaseURL, b.options.Brokers, b.options.Progress = on.postgres.URL, on.kafka.Brokers, progress
	found, err := b.measure(ctx, b.options)
	if err != nil {
		return err
	}
	found.Postgres, found.Kafka, found.Took = on.postgres.Description, on.kafka.Description, time.Since(begin)
	var picture bytes.Buffer
	if err := errors.Join(found.WritePlot(&picture), b.writePlot(picture.Bytes())); err != nil {
		return err
	}
	if b.JSON {
		return terminal.PrintJSON(cmd.OutOrStdout(), found)
	}
	return found.WriteTable(cmd.OutOrStdout())
}
