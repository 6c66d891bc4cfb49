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
	"github.com/effectonce/effectonce/internal/parked"
)

// parkedAct is what retry and discard have in common.
type parkedAct struct {
	filter    parkedFilter
	by        operator.By
	all       bool
	wholeKeys bool // discard
	discard   bool
	dryRun    bool
	rate      int // messages a second; 0: as fast as it goes
	wait      bool
	waitMax   time.Duration
	json      bool
}

func (a *parkedAct) add(s *settings, cmd *cobra.Command) *cobra.Command {
	flags := cmd.Flags()
	a.filter.add(cmd, operator.TargetsMax)
	addBool(flags, &a.all, flagAll, "every parked message, where no filter is given")
	addBool(flags, &a.dryRun, "dry-run", "show what would be done, and do nothing")
	addInt(flags, &a.rate, "rate", 0, 0, 100_000, "how many messages a second; 0: as fast as it goes")
	addText(flags, "by", 255, "who does it; default: the user and the machine", func(text string) error { a.by.Who = text; return nil })
	addJSON(cmd, &a.json)
	commandLineOnly(flags, flagAll, "dry-run", "why")
	s.checks[cmd] = func() error {
		if !a.all && !a.filter.given() {
			return errors.New("no filter is given: choose messages by --id, --key, --topic, --consumer, --group, --reason or age, or say --all")
		}
		return nil
	}
	return needs(cmd, flagDatabaseURL)
}

func newParkedRetry(s *settings) *cobra.Command {
	a := &parkedAct{by: operator.By{Why: "retried by hand"}}
	cmd := &cobra.Command{
		Use:   "retry",
		Short: "Hand parked messages back to the running consumers",
		Long: `Hand parked messages back to the running consumers: the one that holds the partition handles the message
within about a second, and then what waits behind it, in order. One that fails again is parked again.
Only the first message of a key can be retried; the others follow it.

With --wait it reports how many were handled; exit status 1 if one failed again, or is not done within
--wait-max. Every retry is written down: see "outbox-relay actions list".`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.act(cmd.Context(), a, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	addText(cmd.Flags(), "why", 2048, "why it is retried", func(text string) error { a.by.Why = text; return nil })
	addBool(cmd.Flags(), &a.wait, "wait", "wait until the consumers have handled them, and report")
	addDuration(cmd.Flags(), &a.waitMax, "wait-max", time.Minute, time.Second, 24*time.Hour, "how long --wait waits")
	return a.add(s, cmd)
}

func newParkedDiscard(s *settings) *cobra.Command {
	a := &parkedAct{discard: true}
	cmd := &cobra.Command{
		Use:   "discard",
		Short: "Give parked messages up: they are never handled",
		Long: `Give parked messages up: they are never handled, and their rows are deleted. What waits behind one is
handed back to the consumers, in order; with --all-of-key it is given up as well.
Only the first message of a key can be discarded alone.

Every discard is written down, with --why: see "outbox-relay actions list". The payload is not kept there:
look at it with "outbox-relay parked show" before.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.act(cmd.Context(), a, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	addText(cmd.Flags(), "why", 2048, "why it is given up; required", func(text string) error { a.by.Why = text; return nil })
	addBool(cmd.Flags(), &a.wholeKeys, "all-of-key", "also what waits behind, that is all parked messages of the key")
	a.add(s, cmd)
	commandLineOnly(cmd.Flags(), "all-of-key")
	check := s.checks[cmd]
	s.checks[cmd] = func() error {
		if a.by.Why == "" {
			return errors.Join(errors.New("--why is missing: say why the messages are given up"), check())
		}
		return check()
	}
	return cmd
}

// actReport is what retry and discard print.
type actReport struct {
	What      string         `json:"what"`
	DryRun    bool           `json:"dry_run"`
	Matched   int            `json:"matched"`
	Done      int            `json:"done"`
	Retrying  int            `json:"retrying"`   // handed back before
	Released  int64          `json:"released"`   // keys that go on after a discard
	NoPayload []uuid.UUID    `json:"no_payload"` // left alone: too large to be stored, so it cannot be retried
	Behind    []uuid.UUID    `json:"behind"`     // left alone: behind another message meanwhile
	Waited    *parked.Report `json:"waited"`
}

func (r *actReport) well() bool {
	return len(r.NoPayload) == 0 && len(r.Behind) == 0 && (r.Waited == nil || len(r.Waited.Failed) == 0 && r.Waited.Pending == 0)
}

func (s *settings) act(ctx context.Context, a *parkedAct, out, progress io.Writer) error {
	if a.by.Who == "" {
		a.by.Who = whoami()
	}
	return s.withTables(ctx, true, func(ctx context.Context, conn *pgx.Conn) error {
		seqs, err := a.targets(ctx, conn, s.schema)
		if err != nil {
			return err
		}
		if len(seqs) == 0 {
			return a.filter.nothing()
		}
		if a.dryRun {
			return a.preview(ctx, conn, s.schema, seqs, out)
		}
		report := &actReport{What: "parked.retry", Matched: len(seqs), NoPayload: []uuid.UUID{}, Behind: []uuid.UUID{}}
		if a.discard {
			report.What = "parked.discard"
		}
		screen := newScreen(progress)
		err = a.work(ctx, conn, s.schema, seqs, report, screen)
		screen.end()
		// Also after an error: what is done is done, each transaction by itself.
		if said := a.print(out, report); err == nil {
			err = said
		}
		return err
	})
}

// targets chooses what is acted on. Whoever names a message that is behind another learns which one.
func (a *parkedAct) targets(ctx context.Context, conn *pgx.Conn, schema string) ([]int64, error) {
	if err := a.filter.find(ctx, conn, schema); err != nil {
		return nil, err
	}
	if a.filter.Seqs == nil {
		a.filter.Behind = false
		return parked.Targets(ctx, conn, schema, a.filter.Filter, a.filter.limit)
	}
	named, err := parked.List(ctx, conn, schema, a.filter.Filter, a.filter.limit)
	if err != nil {
		return nil, err
	}
	var seqs []int64
	heads := map[uuid.UUID]bool{}
	for i := len(named) - 1; i >= 0; i-- { // the oldest first
		m := named[i]
		if m.Head == nil {
			seqs, heads[m.ID] = append(seqs, m.Seq), true
		} else if !heads[*m.Head] {
			return nil, fmt.Errorf("message %s (%s) waits behind %s: only the first of a key can be retried or discarded, and the others follow it", m.ID, m.At(), m.Head)
		}
	}
	return seqs, nil
}

// preview shows what would be done.
func (a *parkedAct) preview(ctx context.Context, conn *pgx.Conn, schema string, seqs []int64, out io.Writer) error {
	messages, err := parked.List(ctx, conn, schema, parked.Filter{Seqs: seqs, Behind: true}, parkedListMax)
	if err != nil {
		return err
	}
	if a.json {
		return printJSON(out, actReport{What: a.verb(), DryRun: true, Matched: len(seqs), NoPayload: []uuid.UUID{}, Behind: []uuid.UUID{}})
	}
	if err := printParked(out, messages); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%d messages would be %s; nothing was done (--dry-run)\n", len(seqs), a.verb())
	return err
}
