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

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// order is what an operator wants to do with rows.
type order struct {
	by        operator.By
	discard   bool
	wholeKeys bool // discard
	all       bool
	limit     int
	dryRun    bool
	yes       bool // discard: without asking
	rate      int  // rows per second; 0: no limit
	wait      bool
	waitMax   time.Duration
	json      bool
}

func (o *order) verb() string {
	if o.discard {
		return "discarded"
	}
	return "retried"
}

// newRetry makes cmd hand rows back.
func newRetry[P, R any](s *cli.Settings, w waiting[P, R], cmd *cobra.Command) *cobra.Command {
	o := &order{by: operator.By{Why: "retried by hand"}}
	cli.AddText(cmd.Flags(), "why", 2048, "reason", func(text string) error { o.by.Why = text; return nil })
	cli.AddBool(cmd.Flags(), &o.wait, "wait", "wait until "+w.words().wait)
	cli.AddDuration(cmd.Flags(), &o.waitMax, "wait-max", time.Minute, time.Second, 24*time.Hour, "how long --wait waits")
	return newAct(s, w, o, cmd)
}

// newDiscard makes cmd discard rows.
func newDiscard[P, R any](s *cli.Settings, w waiting[P, R], cmd *cobra.Command) *cobra.Command {
	o, words := &order{discard: true}, w.words()
	cli.AddText(cmd.Flags(), "why", 2048, "reason; required", func(text string) error { o.by.Why = text; return nil })
	cli.AddBool(cmd.Flags(), &o.wholeKeys, "all-of-key", "also the "+words.rows()+" behind: all "+words.command+" "+words.rows()+" of the key")
	cli.AddBool(cmd.Flags(), &o.yes, "yes", "do not ask before discarding more than one "+words.row)
	cli.CommandLineOnly(cmd.Flags(), "all-of-key", "yes")
	return newAct(s, w, o, cmd)
}

func newAct[P, R any](s *cli.Settings, w waiting[P, R], o *order, cmd *cobra.Command) *cobra.Command {
	flags, words := cmd.Flags(), w.words()
	w.add(flags)
	addLimit(flags, &o.limit, queue.TargetsMax, words)
	cli.AddBool(flags, &o.all, flagAll, "all "+words.command+" "+words.rows()+", without a filter")
	cli.AddBool(flags, &o.dryRun, "dry-run", "only show what would be done")
	cli.AddInt(flags, &o.rate, "rate", 0, 0, 100_000, words.rows()+" per second; 0: no limit")
	cli.AddText(flags, "by", 255, "operator; default: user@host", func(text string) error { o.by.Who = text; return nil })
	cli.AddJSON(cmd, &o.json)
	cli.CommandLineOnly(flags, flagAll, "dry-run", "why")
	s.Check(cmd, func() error {
		var problems []error
		if o.by.Why == "" && o.discard {
			problems = append(problems, fmt.Errorf("--why is missing: say why the %s are discarded", words.rows()))
		}
		if !o.all && w.choice() == chooseAll {
			problems = append(problems, fmt.Errorf("no filter is given: choose %s by %s or age, or say --all", words.rows(), words.filters))
		}
		return errors.Join(problems...)
	})
	cmd.Args = cli.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.by.Who == "" {
			o.by.Who = whoami()
		}
		return s.WithTables(cmd.Context(), true, func(ctx context.Context, conn *pgx.Conn) error {
			if err := w.resolve(ctx, conn, flags); err != nil {
				return err
			}
			return act(ctx, conn, w, o, streams{cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()})
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func act[P, R any](ctx context.Context, conn *pgx.Conn, w waiting[P, R], o *order, std streams) error {
	places, err := chosen(ctx, conn, w, o)
	if err != nil {
		return err
	}
	if len(places) == 0 && w.choice() == chooseOne {
		return errors.New(w.nothing())
	}
	work := &work[P, R]{waiting: w, order: o, matched: len(places)}
	switch {
	case len(places) == 0 && !o.json:
		return terminal.Say(std.out, "%s\n", w.nothing())
	case len(places) == 0:
		return terminal.PrintJSON(std.out, work.json())
	case o.dryRun:
		return work.preview(ctx, conn, places, std.out)
	}
	if err := work.confirm(ctx, conn, places, std); err != nil {
		return err
	}
	work.screen = terminal.NewScreen(std.progress)
	err = work.do(ctx, conn, places)
	work.screen.End()
	// Print it also after an error: earlier transactions are committed.
	if said := work.print(std.out); err == nil {
		err = said
	}
	return err
}

// apply retries or discards rows in one transaction.
func apply[P comparable, R any, F queue.Filter](ctx context.Context, conn *pgx.Conn, t *queue.Table[P, R, F], o *order, places []P) (*queue.Result[P], error) {
	if o.discard {
		return t.Discard(ctx, conn, o.by, places, o.wholeKeys)
	}
	return t.Retry(ctx, conn, o.by, places)
}

// streams are those of a command.
type streams struct {
	in            io.Reader
	out, progress io.Writer
}

// chosen returns the rows to act on. If an ID names a row behind another one, the error names that
// one.
func chosen[P, R any](ctx context.Context, conn *pgx.Conn, w waiting[P, R], o *order) ([]P, error) {
	if !w.named() {
		return w.targets(ctx, conn, o.limit)
	}
	rows, err := w.list(ctx, conn, o.limit)
	if err != nil {
		return nil, err
	}
	var places []P
	heads := map[uuid.UUID]bool{}
	for i := len(rows) - 1; i >= 0; i-- { // the oldest first
		r := w.queued(rows[i])
		if r.head == nil {
			places, heads[r.id] = append(places, r.place), true
		} else if !heads[*r.head] {
			return nil, fmt.Errorf("%s %s (%s) waits behind %s: only the first of a key can be retried or discarded, and the others follow it", w.words().row, r.id, r.at, r.head)
		}
	}
	return places, nil
}
