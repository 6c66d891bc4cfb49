package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// action is what an operator wants done with the chosen rows.
type action struct {
	*selection
	decision          held.Decision
	all, dryRun, wait bool
	yes               bool // discard without asking
	in                io.Reader
	out, progress     io.Writer
}

// newRetry makes cmd hand rows back.
func newRetry(s *cli.Settings, kind held.Kind, cmd *cobra.Command) *cobra.Command {
	a := &action{selection: newSelection(s, kind)}
	addBy(s, cmd, &a.decision.By, "retried by hand")
	cli.AddBool(cmd.Flags(), &a.wait, "wait", "wait until "+a.WaitFor)
	cli.AddDuration(cmd.Flags(), &a.decision.WaitMax, "wait-max", time.Minute, time.Second, 24*time.Hour, "how long --wait waits")
	return a.command(cmd)
}

// newDiscard makes cmd discard rows.
func newDiscard(s *cli.Settings, kind held.Kind, cmd *cobra.Command) *cobra.Command {
	a := &action{selection: newSelection(s, kind), decision: held.Decision{Discard: true}}
	addBy(s, cmd, &a.decision.By, "")
	cli.AddBool(cmd.Flags(), &a.decision.WholeKeys, "all-of-key", "also the "+a.Rows()+" behind: all "+string(kind)+" "+a.Rows()+" of the key")
	cli.AddBool(cmd.Flags(), &a.yes, "yes", "do not ask before discarding more than one "+a.Row)
	cli.CommandLineOnly(cmd.Flags(), "all-of-key", "yes")
	return a.command(cmd)
}

func (a *action) command(cmd *cobra.Command) *cobra.Command {
	flags := cmd.Flags()
	a.add(flags, held.TargetsMax)
	cli.AddBool(flags, &a.all, "all", "all "+string(a.kind)+" "+a.Rows()+", without a filter")
	cli.AddBool(flags, &a.dryRun, "dry-run", "only show what would be done")
	cli.AddInt(flags, &a.decision.Rate, "rate", 0, 0, 100_000, a.Rows()+" per second; 0: no limit")
	cli.CommandLineOnly(flags, "all", "dry-run")
	a.s.Check(cmd, func() error {
		if !a.all && !a.filter.Narrows() {
			return fmt.Errorf("no filter is given: choose %s by %s or age, or say --all", a.Rows(), a.Filters)
		}
		return nil
	})
	cmd.Args = cli.OptionalID(a.name)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !a.wait {
			a.decision.WaitMax = 0
		}
		a.in, a.out, a.progress = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
		return a.with(cmd.Context(), flags, true, a.run)
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func (a *action) run(ctx context.Context, conn *pgx.Conn) error {
	refs, err := a.kind.Choose(ctx, conn, a.s.Schema, a.filter, a.limit)
	if err != nil {
		return err
	}
	if len(refs) == 0 && a.filter.Named() {
		return errors.New(a.nothing())
	}
	report := a.kind.NewReport(a.decision, len(refs))
	report.DryRun = a.dryRun
	switch {
	case len(refs) == 0 && !a.s.JSON:
		return terminal.Say(a.out, "%s\n", a.nothing())
	case len(refs) == 0, a.dryRun && a.s.JSON:
		return terminal.PrintJSON(a.out, report)
	case a.dryRun:
		rows, err := a.these(ctx, conn, refs)
		if err != nil {
			return err
		}
		return terminal.Write(a.out, a.table(rows)+terminal.Fill("%s would be %s; nothing was done (--dry-run)\n", a.what(len(refs)), a.decision.Verb()))
	}
	if err := a.confirm(ctx, conn, refs); err != nil {
		return err
	}
	screen := terminal.NewScreen(a.progress)
	err = a.kind.Run(ctx, conn, a.s.Schema, a.decision, refs, report, screen.Step)
	screen.End()
	// Print it also after an error: earlier transactions are committed.
	if said := a.say(report); err == nil {
		err = said
	}
	return err
}

// what counts the rows to act on, as the subject of a sentence.
func (a *action) what(n int) string {
	what := human.Count(n, a.Row)
	if a.decision.WholeKeys {
		what += ", and all " + a.Rows() + " behind them,"
	}
	return what
}

// confirm asks before more than one row is discarded, which cannot be undone. Without a terminal,
// --yes is required. The rows discarded are those counted here, even if others match the filter
// later.
func (a *action) confirm(ctx context.Context, conn *pgx.Conn, refs []held.Ref) error {
	if !a.decision.Discard || a.yes || len(refs) == 1 && !a.decision.WholeKeys {
		return nil
	}
	what := a.what(len(refs))
	refused := usageError{fmt.Errorf("%s would be discarded, and are %s: --dry-run shows them, --yes confirms", what, a.Lost)}
	if !terminal.IsTerminal(a.in) || a.s.JSON {
		return refused
	}
	rows, err := a.these(ctx, conn, refs)
	if err != nil {
		return err
	}
	_ = terminal.Write(a.progress, a.table(rows))
	if len(refs) > len(rows) {
		_ = terminal.Say(a.progress, "… and %d more\n", len(refs)-len(rows))
	}
	_ = terminal.Say(a.progress, "discard %s? They are %s. Type yes: ", strings.TrimSuffix(what, ","), a.Lost)
	answer := make(chan string, 1)
	go func() { // if nothing is typed it ends with the program
		line, _ := bufio.NewReader(a.in).ReadString('\n')
		answer <- strings.TrimSpace(line)
	}()
	select {
	case typed := <-answer:
		if typed != "yes" {
			return refused
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// say prints what was done, and returns errUnhealthy if not everything was.
func (a *action) say(r *held.Report) error {
	left := a.left(r)
	return answer(a.out, a.s.JSON, r, a.text(r, left), len(left) == 0 && (r.Waited == nil || len(r.Waited.Failed) == 0 && r.Waited.Pending == 0))
}

// left are the rows that were left alone, each with the reason.
func (a *action) left(r *held.Report) (left []string) {
	add := func(ids []uuid.UUID, why string) {
		for _, id := range ids {
			left = append(left, terminal.Fill("%s: %s", id, strings.ReplaceAll(why, "ID", id.String())))
		}
	}
	if a.decision.Discard {
		add(r.Retrying, "it was handed back, and the relay may be publishing it")
	}
	add(r.NoPayload, "its payload was too large to be stored: \"outbox-relay parked show ID\"")
	add(r.Behind, a.Behind)
	return left
}

func (a *action) text(r *held.Report, left []string) string {
	var text strings.Builder
	terminal.Add(&text, "%s %s", human.Count(r.Done, a.Row), a.decision.Verb())
	if r.Released > 0 {
		terminal.Add(&text, "; %s released", human.Count(r.Released, "key"))
	}
	if len(r.Retrying) > 0 && !a.decision.Discard {
		terminal.Add(&text, "; before: %d", len(r.Retrying))
	}
	if gone := r.Tried - r.Done - len(r.Retrying) - len(r.NoPayload) - len(r.Behind); gone > 0 {
		terminal.Add(&text, "; %d already gone", gone)
	}
	if undone := r.Matched - r.Tried; undone > 0 {
		terminal.Add(&text, "; %d not done", undone)
	}
	text.WriteString("\n")
	for _, row := range left {
		terminal.Add(&text, "not %s: %s\n", a.decision.Verb(), row)
	}
	if w := r.Waited; w != nil {
		terminal.Add(&text, "%d %s, %d %s again\n", w.Finished, a.Finished, len(w.Failed), a.Failed)
		for _, f := range w.Failed {
			terminal.Add(&text, "%s: %s: %s: %s\n", a.Failed, f.ID, f.Reason, terminal.Clip(f.Error, 200))
		}
		if w.Discarded > 0 {
			terminal.Add(&text, "%d were discarded while waiting\n", w.Discarded)
		}
		if w.Pending > 0 {
			terminal.Add(&text, "not done within %s: %d; %s \"outbox-relay status\" shows it\n", human.Duration(a.decision.WaitMax), w.Pending, a.Unfinished)
		}
	}
	return text.String()
}
