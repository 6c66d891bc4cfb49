package command

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newKeys(s *cli.Settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Show requests by their idempotency keys, and resolve those that need a decision",
		Long: `A request is executed once per idempotency key. An operator decides on two states: indeterminate (a foreign system may
or may not have acted) and abandoned (no phase was done for too long).

  outbox-relay keys list                # unfinished keys
  outbox-relay keys show KEY            # all about one key, and what to do
  outbox-relay keys retry KEY --why …   # continue from the recovery point
  outbox-relay keys finish KEY --status 201 --window 24h --why …   # nothing more is executed: requests get this outcome

KEY is what the client sent or, for an unfinished key, the eight digits that logs show instead.`,
	}
	cmd.AddCommand(newKeysList(s), newKeysShow(s), newKeysUnlock(s), newKeysRetry(s), newKeysFinish(s), newKeysReap(s))
	return cmd
}

func keyStates() []string {
	return []string{keys.Running, keys.Finished, keys.Indeterminate, keys.Abandoned, keys.Stuck}
}

func newKeysList(s *cli.Settings) *cobra.Command {
	var filter keys.Filter
	var state *string
	var limit int
	cmd := cli.Needs(&cobra.Command{
		Use:   "list",
		Short: "List idempotency keys, the newest first",
		Long: `List idempotency keys, the newest first: unfinished ones, or those of --state. A stuck key is running, but it is
overdue and nothing works on it: its client does not retry, and no completer runs, or it fails.

Keys appear as clients sent them (up to 36 characters in the table), to find a customer's request; they are worth
nothing without the scope. A list of finished keys without --scope reads the whole table.`,
		Example: `  outbox-relay keys list
  outbox-relay keys list --state stuck --older-than 15m
  outbox-relay keys list --state finished --scope tenant-7 --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if state != nil {
				filter.States = []string{*state}
			}
			return s.Read(cmd.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				_, err := listKeys(ctx, conn, s.Schema, filter, limit, s.JSON, cmd.OutOrStdout())
				return err
			})
		},
	}, cli.FlagDatabaseURL)
	flags := cmd.Flags()
	cli.AddOneOf(flags, &state, "state", "state", keyStates())
	addPlace(flags, &filter.Scope, &filter.Operation)
	cli.AddAge(flags, &filter.OlderThan, "older-than", "first requested longer ago than this")
	cli.AddInt(flags, &limit, flagLimit, listMax, 1, 100_000, "list at most this many")
	cli.CommandLineOnly(flags, "state", "older-than")
	s.AddJSONLines(cmd)
	return cmd
}

// addPlace adds the flags of a key's scope and operation. They only come from the command line: a
// deployment's environment must not decide which key is meant.
func addPlace(flags *pflag.FlagSet, scope, operation **string) {
	for _, part := range []struct {
		name, usage string
		into        **string
	}{{"scope", "the key's scope: the tenant", scope}, {"operation", "the requested operation", operation}} {
		cli.AddOption(flags, part.name, "string", "", part.usage, func(text string) error {
			*part.into = &text
			return checkName(text)
		})
	}
	cli.CommandLineOnly(flags, "scope", "operation")
}

// checkName refuses what cannot be a scope, an operation or a key in the table. Programs in other
// languages write to it too: their names may be longer than this library's 255 bytes if not ASCII.
func checkName(text string) error {
	if text == "" || !utf8.ValidString(text) || utf8.RuneCountInString(text) > 255 || strings.ContainsRune(text, 0) {
		return errors.New("want 1 to 255 characters of UTF-8")
	}
	return nil
}

// noKeys is the text for an empty list.
func noKeys(filter keys.Filter) string {
	if filter.States == nil && filter.Scope == nil && filter.Operation == nil && filter.OlderThan == nil {
		return "no unfinished keys: --state finished lists the others"
	}
	return "no keys match"
}

// listKeys prints keys, and reports whether there are any.
func listKeys(ctx context.Context, conn operator.Querier, schema string, filter keys.Filter, limit int, asJSON bool, out io.Writer) (some bool, err error) {
	rows, err := keys.List(ctx, conn, schema, filter, limit+1)
	if err != nil {
		return false, err
	}
	more := len(rows) > limit
	err = list(out, asJSON, rows[:min(len(rows), limit)], noKeys(filter), "key\tin logs\tscope\toperation\tstate\tage\tattempts\tdone\terror", func(r keys.Row) string {
		failure, done := "", "-"
		if r.Error != nil {
			failure = terminal.Clip(*r.Error, errorWidth)
		}
		if len(r.Phases) > 0 {
			done = terminal.Clip(strings.Join(r.Phases, ","), keyWidth)
		}
		return terminal.Fill("%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s", terminal.Clip(r.Key, 36), r.Mark, terminal.Clip(r.Scope, keyWidth), terminal.Clip(r.Operation, keyWidth), stateOf(r),
			human.Seconds(r.AgeSeconds), r.Attempts, done, failure)
	})
	if err == nil && more && !asJSON {
		err = terminal.Say(out, "the newest %d: --%s shows more\n", limit, flagLimit)
	}
	return len(rows) > 0, err
}

// stateOf is the state, and who acts next.
func stateOf(r keys.Row) string {
	switch {
	case r.Stuck:
		return keys.Stuck
	case r.Locked:
		return r.State + " (locked)"
	case r.State == keys.Running:
		return r.State + " (put off)"
	}
	return r.State
}

// utc writes a time that may be missing.
func utc(at *time.Time, missing string) string {
	if at == nil {
		return missing
	}
	return at.UTC().Format(time.RFC3339)
}
