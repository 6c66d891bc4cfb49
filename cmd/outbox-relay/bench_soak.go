//go:build !lean

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

const benchSoakHelp = `Run steadily for long, restart relays and consumers in turns, and see whether anything grows.

Requests under idempotency keys publish messages, two relays send them exactly once, and two groups of two
consumers handle them, by ID and by position. Every 7 seconds one of these is stopped and started, or its sessions
on the server are ended. Every 5 seconds it samples memory, live heap, goroutines and connections of the process
with all of them, dead tuples and sizes of tables, and the latency from commit to handler.

A fifth of the time, 5 minutes at most, is for starting. In the second half of the rest a figure may rise by 10 %
of its median in the first half (dead tuples 25 %, sizes 15 %, goroutines 5 %, latencies 50 %), or by an amount below
which a rise means nothing. The slope is that of Theil and Sen, which single peaks do not change. Claims are kept
for a day at least and are not judged.

Exit status 1 if a figure grows.`

func newBenchSoak(s *cli.Settings) *cobra.Command {
	b := &benchmark{Settings: s, checkpoints: true}
	var options bench.SoakOptions
	var minutes int
	var svg, save string
	cmd := &cobra.Command{
		Use:   "soak",
		Short: "Run steadily with restarts for long, and see whether memory, connections, tables or latencies grow",
		Long:  benchSoakHelp,
		Args:  cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program, to start it as the process that is watched: %w", err)
			}
			var found *bench.SoakReport
			err = b.run(cmd, func(ctx context.Context, on bench.Servers, progress func(string)) (report, error) {
				options.Servers, options.Progress, options.For = on, progress, time.Duration(minutes)*time.Minute
				options.Command = b.ChildCommand(program, "bench", "relay", "--"+flagBenchProcess)
				var err error
				found, err = bench.Soak(ctx, options)
				return found, err
			})
			if err != nil {
				return err
			}
			if save != "" {
				if err := bench.Save(save, found); err != nil {
					return err
				}
			}
			if svg != "" {
				if err := os.WriteFile(filepath.Join(svg, "soak.svg"), found.SVG(), 0o644); err != nil { //nolint:gosec // figures are no secret
					return err
				}
			}
			if !found.Flat {
				return errUnhealthy
			}
			return nil
		},
	}
	flags := cmd.Flags()
	cli.AddInt(flags, &minutes, "minutes", bench.SoakMinutesDefault, bench.SoakMinutesMin, bench.SoakMinutesMax, "how long samples are taken")
	cli.AddInt(flags, &options.Rate, "rate", bench.SoakRateDefault, bench.SoakRateMin, bench.SoakRateMax, "requests per second")
	cli.PlainKafka(cmd)
	cli.AddJSON(cmd, &b.json)
	flags.Lookup("json").Usage = "print one line of JSON instead of the table"
	addPictures(flags, &svg, &save)
	return cmd
}
