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

	"github.com/effectonce/effectonce/internal/operator"
)

// order is what an operator wants done with rows.
type order struct {
	by        operator.By
	discard   bool
	wholeKeys bool // discard
	all       bool
	limit     int
	dryRun    bool
	rate      int // rows a second; 0: as fast as it goes
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
func newRetry[P, R any](s *settings, w waiting[P, R], cmd *cobra.Command) *cobra.Command {
	o := &order{by: operator.By{Why: "retried by hand"}}
	addText(cmd.Flags(), "why", 2048, "why it is retried", func(text string) error { o.by.Why = text; return nil })
	addBool(cmd.Flags(), &o.wait, "wait", "wait until "+w.words().wait+", and report")
	addDuration(cmd.Flags(), &o.waitMax, "wait-max", time.Minute, time.Second, 24*time.Hour, "how long --wait waits")
	return newAct(s, w, o, cmd)
}

// newDiscard makes cmd give rows up.
func newDiscard[P, R any](s *settings, w waiting[P, R], cmd *cobra.Command) *cobra.Command {
	o, words := &order{discard: true}, w.words()
	addText(cmd.Flags(), "why", 2048, "why it is given up; required", func(text string) error { o.by.Why = text; return nil })
	addBool(cmd.Flags(), &o.wholeKeys, "all-of-key", "also what waits behind, that is all "+words.command+" "+words.rows()+" of the key")
	commandLineOnly(cmd.Flags(), "all-of-key")
	return newAct(s, w, o, cmd)
}

func newAct[P, R any](s *settings, w waiting[P, R], o *order, cmd *cobra.Command) *cobra.Command {
	flags, words := cmd.Flags(), w.words()
	w.add(flags)
	addLimit(flags, &o.limit, operator.TargetsMax, words)
	addBool(flags, &o.all, flagAll, "every "+words.command+" "+words.row+", where no filter is given")
	addBool(flags, &o.dryRun, "dry-run", "show what would be done, and do nothing")
	addInt(flags, &o.rate, "rate", 0, 0, 100_000, "how many "+words.rows()+" a second; 0: as fast as it goes")
	addText(flags, "by", 255, "who does it; default: the user and the machine", func(text string) error { o.by.Who = text; return nil })
	addJSON(cmd, &o.json)
	commandLineOnly(flags, flagAll, "dry-run", "why")
	s.checks[cmd] = func() error {
		var problems []error
		if o.by.Why == "" && o.discard {
			problems = append(problems, fmt.Errorf("--why is missing: say why the %s are given up", words.rows()))
		}
		if !o.all && !w.given() {
			problems = append(problems, fmt.Errorf("no filter is given: choose %s by %s or age, or say --all", words.rows(), words.filters))
		}
		return errors.Join(problems...)
	}
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.by.Who == "" {
			o.by.Who = whoami()
		}
		return s.withTables(cmd.Context(), true, func(ctx context.Context, conn *pgx.Conn) error {
			if err := w.resolve(ctx, conn, flags); err != nil {
				return err
			}
			return act(ctx, conn, w, o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		})
	}
	return needs(cmd, flagDatabaseURL)
}

func act[P, R any](ctx context.Context, conn *pgx.Conn, w waiting[P, R], o *order, out, progress io.Writer) error {
	places, err := chosen(ctx, conn, w, o)
	if err != nil {
		return err
	}
	if len(places) == 0 {
		return w.nothing()
	}
	work := &work[P, R]{waiting: w, order: o, matched: len(places)}
	if o.dryRun {
		return work.preview(ctx, conn, places, out)
	}
	work.screen = newScreen(progress)
	err = work.do(ctx, conn, places)
	work.screen.end()
	// Also after an error: what is done is done, each transaction by itself.
	if said := work.print(out); err == nil {
		err = said
	}
	return err
}

// chosen names what is acted on. Whoever names a row that is behind another learns which one.
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
