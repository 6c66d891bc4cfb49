//go:build !lean

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

const benchFiguresHelp = `Measure parts of the system against other ways in turns, and write JSON and plots. Figures are medians of the
rounds, with the smallest and the largest. A ratio is made of the ratios of each round.

  throughput  consumer against the textbook and Watermill; relay against a SKIP LOCKED poller; CPU time of process
              and PostgreSQL and write-ahead log per message
  keys        a handler of two and of eight statements, bare, under Once, and replayed; also over HTTP
  network     consumer, relay and Once with PostgreSQL 0, 1 and 3 ms away, all through one proxy
  latency     from commit to consumable at 500 and 5,000 messages per second, beside a poller
  growth      the consumer with --claims in the table (also bytes and pages of a look-up), the relay with backlogs of
              --rows; 10 million claims take about 4 GB and ten minutes, 10 million rows 12 GB and an hour

--save adds the plots to those of an existing file. --from draws the plots of a file and measures nothing. --against
prints which ratios fell against those of a file beyond the spread of both; the exit status stays 0.`

// figuresCommand is one run of the command.
type figuresCommand struct {
	options                  bench.MeasureOptions
	svg, save, against, from string
}

func newBenchFigures(s *cli.Settings) *cobra.Command {
	b := &benchmark{Settings: s}
	f := &figuresCommand{}
	cmd := &cobra.Command{
		Use:   "figures",
		Short: "Measure consumer, relay and idempotency keys against other ways, as JSON and plots",
		Long:  benchFiguresHelp,
		Args:  cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.from != "" {
				found, err := bench.LoadResults(f.from)
				if err != nil {
					return err
				}
				return errors.Join(found.WriteTable(cmd.OutOrStdout()), f.files(cmd, found))
			}
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program, to start it as the relay that is measured: %w", err)
			}
			var found *bench.Results
			err = b.run(cmd, func(ctx context.Context, on bench.Servers, progress func(string)) (report, error) {
				f.options.Servers, f.options.Progress = on, progress
				f.options.Command = b.ChildCommand(program, "bench", "relay", "--"+flagBenchProcess)
				var err error
				found, err = bench.Measure(ctx, f.options)
				return found, err
			})
			if err != nil {
				return err
			}
			return f.files(cmd, found)
		},
	}
	flags := cmd.Flags()
	cli.AddOption(flags, "parts", "string", "throughput,keys", "comma-separated list of "+strings.Join(bench.Parts(), ", "), func(text string) (err error) {
		f.options.Parts, err = bench.ParseParts(text)
		return err
	})
	cli.AddOption(flags, "claims", "string", "0,100000,1000000", "comma-separated numbers of claims, for growth", func(text string) (err error) {
		f.options.Claims, err = bench.ParseSizes(text)
		return err
	})
	cli.AddOption(flags, "rows", "string", "10000,100000,1000000", "comma-separated sizes of backlogs, for growth", func(text string) (err error) {
		f.options.Rows, err = bench.ParseSizes(text)
		return err
	})
	cli.AddBool(flags, &f.options.Short, "short", "a quarter of the messages")
	flags.StringVar(&f.against, "against", "", "`file` of earlier results to compare ratios with")
	flags.StringVar(&f.from, "from", "", "`file` of results to show; nothing is measured")
	addPictures(flags, &f.svg, &f.save)
	b.addFlags(cmd, &f.options.Rounds)
	flags.Lookup("rounds").DefValue = "5"
	_ = flags.Set("rounds", "5") // any text is taken
	return cmd
}

// files compares with a file, and writes those that were asked for.
func (f *figuresCommand) files(cmd *cobra.Command, found *bench.Results) error {
	if f.against != "" {
		earlier, err := bench.LoadResults(f.against)
		if err != nil {
			return err
		}
		fell, compared := found.Fell(earlier)
		for _, line := range fell {
			_ = terminal.Say(cmd.ErrOrStderr(), "fell: %s\n", line) // a failed write does not matter
		}
		_ = terminal.Say(cmd.ErrOrStderr(), "%d of %d ratios fell\n", len(fell), compared)
	}
	if f.save != "" {
		all, err := bench.LoadResults(f.save)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			all = found
		case err != nil:
			return err
		default:
			all.Merge(found)
		}
		if err := bench.Save(f.save, all); err != nil {
			return err
		}
	}
	if f.svg != "" {
		return found.Draw(f.svg)
	}
	return nil
}
