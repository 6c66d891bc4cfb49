package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/internal/keys"
)

func newKeys(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keys",
		Short: "Look at requests by their idempotency keys, and decide what became of them",
		Long: `Requests are executed once for each idempotency key. Where that cannot be decided by a program, it waits for
a person: a key is indeterminate where a foreign system may have acted or not, and abandoned where its attempts
are used up.

  outbox-relay keys list                          # what is not finished
  outbox-relay keys show KEY                      # everything about one, and what to do
  outbox-relay keys retry KEY --why …             # it did not happen: it goes on from its recovery point
  outbox-relay keys finish KEY --status 201 --window 24h --why …   # it happened: every request with it gets this

KEY is what the client sent, or, of a key that is not finished, the eight digits that logs have instead of it.`,
	}
	cmd.AddCommand(newKeysList(s), newKeysShow(s), newKeysUnlock(s), newKeysRetry(s), newKeysFinish(s), newKeysReap(s))
	return cmd
}

func keyStates() []string {
	return []string{keys.Running, keys.Finished, keys.Indeterminate, keys.Abandoned, keys.Stuck}
}

func newKeysList(s *settings) *cobra.Command {
	var filter keys.Filter
	var state *string
	var limit int
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "list",
		Short: "List idempotency keys, the newest first",
		Long: `List idempotency keys, the newest first: those that are not finished, or those of --state. Stuck ones are
running, nobody works on them, and it is time that somebody did: their client does not come back, and no
completer runs, or it fails. A list of finished keys without --scope reads the whole table.

Keys are shown as clients sent them, in the table up to 36 characters: they are needed to find a customer's
request, and are worth nothing without the scope. What was asked and answered is only in "keys show".

With --json there is one object a line and nothing else; its cursor is what --after takes. Exit status 1 if no
key fits.`,
		Example: `  outbox-relay keys list
  outbox-relay keys list --state stuck --older-than 15m
  outbox-relay keys list --state finished --scope tenant-7 --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if state != nil {
				filter.States = []string{*state}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				rows, err := keys.List(ctx, conn, s.schema, filter, limit+1)
				if err != nil {
					return err
				}
				if len(rows) == 0 {
					return noKey(filter)
				}
				return printKeys(cmd.OutOrStdout(), rows, limit, asJSON)
			})
		},
	}, flagDatabaseURL)
	flags := cmd.Flags()
	addOneOf(flags, &state, "state", "what became of it", keyStates())
	addPlace(flags, &filter.Scope, &filter.Operation)
	addAge(flags, &filter.OlderThan, "older-than", "first asked for longer ago than this")
	addInt(flags, &limit, flagLimit, parkedListMax, 1, 100_000, "how many keys at most")
	addText(flags, "after", 4096, "go on behind the cursor that an earlier list ended with", func(text string) error {
		filter.After = &keys.Cursor{}
		return filter.After.UnmarshalText([]byte(text))
	})
	commandLineOnly(flags, "state", "older-than", "after")
	addJSON(cmd, &asJSON)
	return cmd
}

// addPlace adds the flags of what a key belongs to. They come from the command line alone: what a deployment put into
// the environment must not decide which key is meant.
func addPlace(flags *pflag.FlagSet, scope, operation **string) {
	for _, part := range []struct {
		name, usage string
		into        **string
	}{{"scope", "the key's scope: the tenant", scope}, {"operation", "the operation that was asked for", operation}} {
		addOption(flags, part.name, "string", "", part.usage, func(text string) error {
			*part.into = &text
			return checkName(text)
		})
	}
	commandLineOnly(flags, "scope", "operation")
}

// checkName refuses what cannot be a scope, an operation or a key in the table, which also has those of programs in other
// languages: longer ones than this library's 255 bytes, where they are not ASCII.
func checkName(text string) error {
	if text == "" || !utf8.ValidString(text) || utf8.RuneCountInString(text) > 255 || strings.ContainsRune(text, 0) {
		return errors.New("want 1 to 255 characters of UTF-8")
	}
	return nil
}

func noKey(filter keys.Filter) error {
	switch {
	case filter.After != nil:
		return errors.New("no more keys")
	case filter.States == nil && filter.Scope == nil && filter.Operation == nil && filter.OlderThan == nil:
		return errors.New("every key is finished: --state finished lists them")
	}
	return errors.New("no key fits")
}

func printKeys(out io.Writer, rows []keys.Row, limit int, asJSON bool) error {
	more := len(rows) > limit
	rows = rows[:min(len(rows), limit)]
	var text strings.Builder
	text.WriteString("key\tin logs\tscope\toperation\tstate\tage\tattempts\tdone\terror\n")
	for _, r := range rows {
		if asJSON {
			if err := printJSON(out, r); err != nil {
				return err
			}
			continue
		}
		failure := ""
		if r.Error != nil {
			failure = clip(*r.Error, errorWidth)
		}
		done := "-"
		if len(r.Phases) > 0 {
			done = clip(strings.Join(r.Phases, ","), keyWidth)
		}
		fmt.Fprintf(&text, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", clip(r.Key, 36), r.Mark, clip(r.Scope, keyWidth), clip(r.Operation, keyWidth), stateOf(r),
			seconds(r.AgeSeconds), r.Attempts, done, failure)
	}
	if asJSON {
		return nil
	}
	if err := printTable(out, text.String()); err != nil || !more {
		return err
	}
	cursor, err := rows[len(rows)-1].Cursor.MarshalText()
	if err == nil {
		_, err = fmt.Fprintf(out, "there are more: --%s shows more at once, --after %s goes on\n", flagLimit, cursor)
	}
	return err
}

// stateOf says who has to do something next.
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
