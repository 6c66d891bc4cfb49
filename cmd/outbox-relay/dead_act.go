package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/dead"
	"github.com/effectonce/effectonce/internal/operator"
)

// deadAct is what retry and discard have in common.
type deadAct struct {
	filter    deadFilter
	by        operator.By
	all       bool
	wholeKeys bool // discard
	discard   bool
	dryRun    bool
	rate      int // rows a second; 0: as fast as it goes
	wait      bool
	waitMax   time.Duration
	json      bool
}

func (a *deadAct) add(s *settings, cmd *cobra.Command) *cobra.Command {
	flags := cmd.Flags()
	a.filter.add(cmd, operator.TargetsMax)
	addBool(flags, &a.all, flagAll, "every dead row, where no filter is given")
	addBool(flags, &a.dryRun, "dry-run", "show what would be done, and do nothing")
	addInt(flags, &a.rate, "rate", 0, 0, 100_000, "how many rows a second; 0: as fast as it goes")
	addText(flags, "by", 255, "who does it; default: the user and the machine", func(text string) error { a.by.Who = text; return nil })
	addJSON(cmd, &a.json)
	commandLineOnly(flags, flagAll, "dry-run", "why")
	s.checks[cmd] = func() error {
		a.filter.settle(s, cmd)
		if !a.all && !a.filter.given() {
			return errors.New("no filter is given: choose rows by --id, --key, --topic, --reason, --state or age, or say --all")
		}
		return nil
	}
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return s.actOnDead(cmd.Context(), a, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return needs(cmd, flagDatabaseURL)
}

func newDeadRetry(s *settings) *cobra.Command {
	a := &deadAct{by: operator.By{Why: "retried by hand"}}
	cmd := &cobra.Command{
		Use:   "retry",
		Short: "Hand dead rows back to the running relay",
		Long: `Hand dead rows back to the running relay: it publishes them within about a second, and then what waits
behind them, in order. One that Kafka still does not take is held again, with the new error.
Only the first row of a key can be retried; the others follow it. Rows of a topic that did not exist need
no retry: they follow by themselves once it does.

With --wait it reports how many were published; exit status 1 if one is held again, or is not done within
--wait-max. Every retry is written down: see "outbox-relay actions list".

  outbox-relay dead retry --id 0199a0c4-… --wait
  outbox-relay dead retry --reason too_large --topic orders --why "limit raised to 4 MiB" --wait`,
	}
	addText(cmd.Flags(), "why", 2048, "why it is retried", func(text string) error { a.by.Why = text; return nil })
	addBool(cmd.Flags(), &a.wait, "wait", "wait until the relay has published them, and report")
	addDuration(cmd.Flags(), &a.waitMax, "wait-max", time.Minute, time.Second, 24*time.Hour, "how long --wait waits")
	return a.add(s, cmd)
}

func newDeadDiscard(s *settings) *cobra.Command {
	a := &deadAct{discard: true}
	cmd := &cobra.Command{
		Use:   "discard",
		Short: "Give dead rows up: they are never published",
		Long: `Give dead rows up: they are never published. What waits behind one is handed back to the relay, in order;
with --all-of-key it is given up as well. Only the first row of a key can be discarded alone. One that was
handed back already cannot be discarded: the relay may be publishing it.

Every discard is written down, with --why: see "outbox-relay actions list". The payload is not kept there:
look at it with "outbox-relay dead show" before.

  outbox-relay dead discard --id 0199a0c4-… --why "test order"
  outbox-relay dead discard --topic oders --all-of-key --why "the name was a typing mistake"`,
	}
	addText(cmd.Flags(), "why", 2048, "why it is given up; required", func(text string) error { a.by.Why = text; return nil })
	addBool(cmd.Flags(), &a.wholeKeys, "all-of-key", "also what waits behind, that is all dead rows of the key")
	a.add(s, cmd)
	commandLineOnly(cmd.Flags(), "all-of-key")
	check := s.checks[cmd]
	s.checks[cmd] = func() error {
		if a.by.Why == "" {
			return errors.Join(errors.New("--why is missing: say why the rows are given up"), check())
		}
		return check()
	}
	return cmd
}

func (s *settings) actOnDead(ctx context.Context, a *deadAct, out, progress io.Writer) error {
	if a.by.Who == "" {
		a.by.Who = whoami()
	}
	return s.withTables(ctx, true, func(ctx context.Context, conn *pgx.Conn) error {
		places, err := a.targets(ctx, conn, s.schema)
		if err != nil {
			return err
		}
		if len(places) == 0 {
			return a.filter.nothing()
		}
		report := a.newReport(len(places))
		if a.dryRun {
			return a.preview(ctx, conn, s.schema, places, report, out)
		}
		screen := newScreen(progress)
		err = a.work(ctx, conn, s.schema, places, report, screen)
		screen.end()
		// Also after an error: what is done is done, each transaction by itself.
		if said := a.print(out, report); err == nil {
			err = said
		}
		return err
	})
}

// targets chooses what is acted on. Whoever names a row that is behind another learns which one.
func (a *deadAct) targets(ctx context.Context, conn *pgx.Conn, schema string) ([]dead.Place, error) {
	if !a.filter.Behind {
		return dead.Targets(ctx, conn, schema, a.filter.Filter, a.filter.limit)
	}
	named, err := dead.List(ctx, conn, schema, a.filter.Filter, a.filter.limit)
	if err != nil {
		return nil, err
	}
	var places []dead.Place
	heads := map[uuid.UUID]bool{}
	for i := len(named) - 1; i >= 0; i-- { // the oldest first
		r := named[i]
		if r.Head == nil {
			places, heads[r.ID] = append(places, r.Place()), true
		} else if !heads[*r.Head] {
			return nil, fmt.Errorf("row %s (seq %d) waits behind %s: only the first of a key can be retried or discarded, and the others follow it", r.ID, r.Seq, r.Head)
		}
	}
	return places, nil
}

// preview shows what would be done.
func (a *deadAct) preview(ctx context.Context, conn *pgx.Conn, schema string, places []dead.Place, report *deadReport, out io.Writer) error {
	if a.json {
		report.DryRun = true
		return printJSON(out, report)
	}
	seqs := make([]int64, len(places))
	for i, place := range places {
		seqs[i] = place.Seq
	}
	rows, err := dead.List(ctx, conn, schema, dead.Filter{Seqs: seqs, Relay: a.filter.Relay, Behind: true}, parkedListMax)
	if err != nil {
		return err
	}
	if err := printDead(out, rows); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%d rows would be %s; nothing was done (--dry-run)\n", len(places), a.verb())
	return err
}
