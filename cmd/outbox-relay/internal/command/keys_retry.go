package command

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// keyRetry is what keys retry does, with one key or with all that match.
type keyRetry struct {
	keyAct
	didNotHappen, happened, all, yes bool
	filter                           keys.Filter
	state                            *string
	limit                            int
}

func newKeysRetry(s *cli.Settings) *cobra.Command {
	r := &keyRetry{}
	cmd := &cobra.Command{
		Use:   "retry {KEY | --all --operation OPERATION}",
		Short: "Let an indeterminate or abandoned key continue",
		Long: `Let an indeterminate or abandoned key continue, from its recovery point, with the next request or by the completer.

Whether an indeterminate key acted is a person's decision; so is a foreign call that must not be made twice ("calling"
in "keys show"). First ask the foreign system, by the child ID of "keys show". If it did not act, --call-did-not-happen makes the call
again; the answer "unknown" only counts once the call cannot be on its way any more. If it acted, --call-happened
continues behind the call, with what its phase writes and the phases after it: they see what was stored before the
call, and nothing of its answer. A repeatable call is made again while it is younger than the flow's GiveUpAfter;
--call-did-not-happen restarts its age.

--all decides in the same way on all keys of an operation, each in a transaction of its own. It lists them; with --yes
it acts, on those that match then, at most 100,000. Left alone are keys whose call may still be on its way, those in
doubt where neither flag says what happened, and those for which a retry by itself would be refused. Retries are
recorded.`,
		Example: `  outbox-relay keys retry order-4127 --call-did-not-happen --why "the bank has no such transfer, ticket 88"
  outbox-relay keys retry order-4128 --call-happened --why "the bank's statement has it, ticket 88"
  outbox-relay keys retry --all --operation order --state abandoned --why "the stock service works again" --yes`,
	}
	newKeyAct(s, cmd, &r.keyAct, func(ctx context.Context, pool *pgxpool.Pool, place keys.Place) (*keys.Changed, error) {
		return keys.Retry(ctx, pool, s.Schema, r.by, place, r.call())
	}, func(changed *keys.Changed) string { return retried(changed) })
	flags := cmd.Flags()
	cli.AddBool(flags, &r.didNotHappen, "call-did-not-happen", "the foreign system was asked, and it did not act")
	cli.AddBool(flags, &r.happened, "call-happened", "the foreign system was asked, and it acted")
	cli.AddBool(flags, &r.all, "all", "all indeterminate and abandoned keys of --operation")
	cli.AddBool(flags, &r.yes, "yes", "with --all: do it; without it they are only listed")
	cli.AddOneOf(flags, &r.state, "state", "state", []string{keys.Indeterminate, keys.Abandoned})
	cli.AddInt(flags, &r.limit, flagLimit, listMax, 1, keys.RetryMax, "with --all: list at most this many; with --yes all continue")
	cli.AddAge(flags, &r.filter.OlderThan, "older-than", "with --all: first requested longer ago than this")
	cli.CommandLineOnly(flags, "call-did-not-happen", "call-happened", "all", "yes", "state", "older-than", flagLimit)
	one, oneKey := cmd.RunE, cmd.Args
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if cmd.Flags().Changed("all") { // r.all is not set yet
			return cli.NoArgs(cmd, args)
		}
		return oneKey(cmd, args)
	}
	s.Check(cmd, r.check)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !r.all {
			return one(cmd, args)
		}
		return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error { return r.runAll(ctx, s, cmd, pool) })
	}
	return cmd
}

func (r *keyRetry) check() error {
	var problems []error
	if r.didNotHappen && r.happened {
		problems = append(problems, errors.New("give --call-did-not-happen or --call-happened, not both"))
	}
	if r.all && r.Operation == nil {
		problems = append(problems, errors.New("--operation is missing: want the operation of which all keys are meant"))
	}
	if !r.all && (r.yes || r.state != nil || r.filter.OlderThan != nil) {
		problems = append(problems, errors.New("--yes, --state and --older-than are for --all"))
	}
	return errors.Join(problems...)
}

func (r *keyRetry) call() keys.Call {
	switch {
	case r.didNotHappen:
		return keys.CallDidNotHappen
	case r.happened:
		return keys.CallHappened
	}
	return keys.CallUnknown
}

// runAll retries what matches, the newest first.
func (r *keyRetry) runAll(ctx context.Context, s *cli.Settings, cmd *cobra.Command, pool *pgxpool.Pool) error {
	r.filter.Scope, r.filter.Operation, r.filter.States = r.Scope, r.Operation, []string{keys.Indeterminate, keys.Abandoned}
	if r.state != nil {
		r.filter.States = []string{*r.state}
	}
	out := cmd.OutOrStdout()
	if !r.yes {
		some, err := listKeys(ctx, pool, s.Schema, r.filter, r.limit, s.JSON, out)
		if err != nil || s.JSON || !some {
			return err
		}
		doubt := "but none of which a call is in doubt"
		if r.call() != keys.CallUnknown {
			doubt = "also each one of which a call is in doubt: ask the foreign system about every one of them"
		}
		return terminal.Say(out, "nothing was done: --yes lets these keys, and others that match then, continue, %s\n", doubt)
	}
	screen := terminal.NewScreen(cmd.ErrOrStderr())
	report, err := keys.RetryAll(ctx, pool, s.Schema, r.by, r.filter, r.call(), func(done int) {
		if screen.Overwrites() {
			screen.Step("%s continue", human.Count(done, "key"))
		}
	})
	screen.End()
	// Print it also after an error: earlier transactions are committed.
	if said := answer(out, s.JSON, report, retriedText(report), len(report.Left) == 0); err == nil {
		err = said
	}
	return err
}

func retriedText(report *keys.Report) string {
	var text strings.Builder
	terminal.Add(&text, "%s to continue, with the next request or by the completer; %d left alone\n", human.Count(report.Done, "key"), len(report.Left))
	for _, left := range report.Left {
		terminal.Add(&text, "%s of scope %s: %s\n", left.Key, left.Scope, left.Why)
	}
	return text.String()
}
