//go:build !lean

package command

import (
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/integration/torture"
)

func newTorture(s *cli.Settings) *cobra.Command {
	var opts torture.Options
	var minutes int
	cmd := &cobra.Command{
		Use:   "torture",
		Short: "Run random consumers, relays and requests under random faults, and judge what is left",
		Long: `Run random consumers, relays and requests under random faults, and judge what is left: every acknowledged order
must have taken effect once in each group, with its messages, in order; every request with an idempotency key must have
happened once, also at the bank that it charged; and everything must drain behind the last fault.

It starts servers of its own: PostgreSQL and Kafka in containers where a Docker engine answers, else PostgreSQL (downloaded
at the first run) and an in-process Kafka. Handlers do what people write: errors, panics, calls that hang, roles, savepoints.
Processes are killed, frozen and cut off, servers crash, operators retry, pause and rewind.
The same seed gives the same plan, which the log begins with. Exit status 1 unless the promise held.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Duration = time.Duration(minutes) * time.Minute
			opts.Progress = func(line string) {
				_ = terminal.Say(cmd.ErrOrStderr(), "%s\n", line) // a failed write does not stop the run
			}
			report, err := torture.Run(cmd.Context(), opts)
			if err != nil {
				return err
			}
			return answer(cmd.OutOrStdout(), s.JSON, report, terminal.Fill("%s\n", report), report.Held())
		},
	}
	cli.AddInt(cmd.Flags(), &minutes, "minutes", 3, 1, 1440, "how long faults happen")
	addSeed(cmd.Flags(), &opts.Seed, "seed of the plan")
	cli.AddInt(cmd.Flags(), &opts.Shrink, "shrink", 0, 0, 100, "repeat a failed run with fewer kinds of faults and habits: a cut counts if one of so many runs fails; 0: do not")
	cli.AddText(cmd.Flags(), "log", plotNameMax, "write the plan, the faults and the processes' logs to this file", func(name string) (err error) {
		opts.Log, err = os.Create(name) //nolint:gosec // of the person who asks; the end of the process closes it
		return err
	})
	s.AddJSON(cmd)
	return cmd
}
