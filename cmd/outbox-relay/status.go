package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/doctor"
	"github.com/effectonce/effectonce/migrations"
)

// statusMax is how long the database may take for an answer.
const statusMax = 30 * time.Second

type statusOptions struct {
	interval, ageMax time.Duration
	json             bool
	relay            string // empty: all
}

func newStatus(s *settings) *cobra.Command {
	var opts statusOptions
	cmd := needs(&cobra.Command{
		Use:   "status",
		Short: "Show what waits, how fast it goes and who relays",
		Long: `Show what waits, how fast it goes and who relays. With --relay only that relay, else all.

Exit status 1 if it is not well: rows wait and nobody holds the lease, a row waits for longer than
--age-max, or rows are in outbox_dead.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("relay") {
				opts.relay = s.relay
			}
			return s.status(cmd.Context(), opts, cmd.OutOrStdout())
		},
	}, flagDatabaseURL)
	addDuration(cmd.Flags(), &opts.interval, "interval", time.Second, 0, time.Minute, "how long the rate is measured; 0s: not at all")
	addDuration(cmd.Flags(), &opts.ageMax, "age-max", time.Minute, time.Millisecond, 24*time.Hour, "how long a row may wait")
	addJSON(cmd, &opts.json)
	return cmd
}

func (s *settings) status(ctx context.Context, opts statusOptions, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, statusMax+opts.interval)
	defer cancel()
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(ctx, conn)
	if err := migrations.Check(ctx, conn, migrations.Options{Schema: s.schema}); err != nil {
		return err
	}
	status, err := readStatus(ctx, conn, s.schema, opts)
	if err != nil {
		return err
	}
	if opts.json {
		err = printJSON(out, status)
	} else {
		err = printStatus(out, status)
	}
	if err == nil && !status.Well {
		return errNotWell
	}
	return err
}

func readStatus(ctx context.Context, conn *pgx.Conn, schema string, opts statusOptions) (*doctor.Status, error) {
	want := doctor.StatusOptions{Relay: opts.relay, AgeMax: opts.ageMax}
	if opts.interval > 0 {
		before, err := doctor.ReadProgress(ctx, conn, schema)
		if err != nil {
			return nil, err
		}
		want.Before = before
		timer := time.NewTimer(opts.interval)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return doctor.ReadStatus(ctx, conn, schema, want)
}

func printStatus(out io.Writer, status *doctor.Status) error {
	var text strings.Builder
	text.WriteString("relay\twaiting\toldest\trows/s\tpublished\tdead\trelayed by\tlease left\tepoch\n")
	for _, r := range status.Relays {
		waiting, oldest, rate, owner, left := strconv.FormatInt(r.Waiting, 10), "-", "-", "nobody", "-"
		if !r.WaitingExact {
			waiting = "about " + waiting
		}
		if r.Waiting > 0 {
			oldest = seconds(r.OldestWaitingSeconds)
		}
		if r.RowsPerSecond != nil {
			rate = fmt.Sprintf("%.0f", *r.RowsPerSecond)
		}
		if r.Live {
			owner, left = plain(r.Owner), seconds(r.LeaseLeftSeconds)
		}
		fmt.Fprintf(&text, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%d\n", plain(r.Relay), waiting, oldest, rate, r.Published, deadText(r.Dead), owner, left, r.Epoch)
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if _, err := io.WriteString(table, text.String()); err != nil {
		return err
	}
	if err := table.Flush(); err != nil {
		return err
	}
	text.Reset()
	fmt.Fprintf(&text, "consumers: %d, with %d partition positions\n", status.Consumers, status.Positions)
	for _, problem := range status.Problems {
		fmt.Fprintln(&text, "not well:", problem)
	}
	if status.Well {
		fmt.Fprintln(&text, "well")
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// deadText is the number of dead rows and their reasons, in a fixed order.
func deadText(dead map[string]int64) string {
	var total int64
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(dead)) {
		total += dead[reason]
		reasons = append(reasons, fmt.Sprintf("%s %d", reason, dead[reason]))
	}
	if total == 0 {
		return "0"
	}
	return fmt.Sprintf("%d (%s)", total, strings.Join(reasons, ", "))
}
