package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/textproto"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/keys"
	"github.com/effectonce/effectonce/internal/operator"
)

// changedKey is what unlock, retry and finish print with --json.
type changedKey struct {
	What string    `json:"what"`
	Was  *keys.Row `json:"was"`
}

// newKeyAct makes cmd change one key.
func newKeyAct(s *settings, cmd *cobra.Command, act func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Row, error), said func(was *keys.Row) string, check func() error) *cobra.Command {
	var k theKey
	var by operator.By
	var asJSON bool
	k.on(cmd)
	addText(cmd.Flags(), "why", 2048, "why; required", func(text string) error { by.Why = text; return nil })
	addText(cmd.Flags(), "by", 255, "who does it; default: the user and the machine", func(text string) error { by.Who = text; return nil })
	addJSON(cmd, &asJSON)
	commandLineOnly(cmd.Flags(), "why")
	s.checks[cmd] = func() error {
		var problem error
		if by.Why == "" {
			problem = errors.New("--why is missing: say how you know")
		}
		return errors.Join(problem, check())
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if by.Who == "" {
			by.Who = whoami()
		}
		return s.onSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
			row, err := k.one(ctx, pool, s.schema)
			if err != nil {
				return err
			}
			was, err := act(ctx, pool, by, row.Place)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), changedKey{"key." + cmd.Name(), was})
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "key %s of %s, scope %s: %s\n", clip(was.Key, 255), plain(was.Operation), plain(was.Scope), said(was))
			return err
		})
	}
	return needs(cmd, flagDatabaseURL)
}

func nothingMore() error { return nil }

func newKeysUnlock(s *settings) *cobra.Command {
	return newKeyAct(s, &cobra.Command{
		Use:   "unlock KEY",
		Short: "End the lock of a running key now",
		Long: `End the lock of a running key now, where its holder hangs. The holder can store nothing afterwards, not even
the phase that it works on; the next request, or the completer, goes on from the recovery point. If a foreign call
was under way that must not be made twice, the key becomes indeterminate then.

A holder that died needs no unlock: its lock runs out by itself. Every unlock is written down: see "outbox-relay
actions list".`,
		Example: `  outbox-relay keys unlock 0192f0c1-2b3c-7def-8123-456789abcdef --why "pod 3 hangs"`,
	}, func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Row, error) {
		return keys.Unlock(ctx, pool, s.schema, by, place)
	}, func(was *keys.Row) string {
		text := "the lock is ended, the next request goes on with it"
		if was.Calling != nil {
			text = "the lock is ended; a call was under way, so that it becomes indeterminate with the next request"
		}
		if was.LockedBy != nil {
			text += "; it was held by " + printable(*was.LockedBy)
		}
		return text
	}, nothingMore)
}

func newKeysRetry(s *settings) *cobra.Command {
	var callDidNotHappen bool
	cmd := &cobra.Command{
		Use:   "retry KEY",
		Short: "Say of an indeterminate or abandoned key that it did not happen",
		Long: `Say of an indeterminate or abandoned key that it did not happen: it is running again, and goes on from its
recovery point with the next request, or by the completer. Its attempts are counted from the start.

Where a foreign call that must not be made twice may have been made ("keys show" calls it "calling"), it is made
again. So ask the foreign system, and say --call-did-not-happen: without that such a key stays as it is.

Every retry is written down, with --why: see "outbox-relay actions list".`,
		Example: `  outbox-relay keys retry order-4127 --call-did-not-happen --why "the bank has no such transfer, ticket 88"
  outbox-relay keys retry order-4131 --why "the stock service is mended"`,
	}
	addBool(cmd.Flags(), &callDidNotHappen, "call-did-not-happen", "the foreign system was asked, and did nothing")
	commandLineOnly(cmd.Flags(), "call-did-not-happen")
	return newKeyAct(s, cmd, func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Row, error) {
		return keys.Retry(ctx, pool, s.schema, by, place, callDidNotHappen)
	}, func(was *keys.Row) string {
		return "it was " + was.State + ", and goes on with the next request, or by the completer"
	}, nothingMore)
}

// bodyMax is the largest outcome that package idempotency stores.
const bodyMax = 64 << 20

// finishing is what the flags of finish say.
type finishing struct {
	status  int
	headers headerFlag
	file    string
	window  time.Duration
	forever bool
}

func newKeysFinish(s *settings) *cobra.Command {
	f := &finishing{status: -1, headers: headerFlag{}}
	cmd := &cobra.Command{
		Use:   "finish KEY",
		Short: "Say what the outcome of a key is, so that every request with it gets that",
		Long: `Say what the outcome of a key is, so that every request with it gets that, and nothing of it is executed any
more. For indeterminate and abandoned keys, and for running ones that nobody holds. What is left of its phases is
not executed: write what they would have by hand. A finished key stays as it is.

The outcome is stored as it is given, not encrypted, and is remembered for --window, which should be that of the
operation. What was asked for stays beside it until then. Every finish is written down, with --why: see "outbox-relay actions list".`,
		Example: `  outbox-relay keys finish order-4127 --status 201 --header 'Content-Type: application/json' --body-file paid.json \
    --why "the bank's statement has it, ticket 88"
  outbox-relay keys finish order-4128 --status 409 --why "the customer withdrew it"`,
	}
	addOption(cmd.Flags(), "status", "int", "", "the status that requests get (0, or 200 to 999); required", func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n != 0 && (n < 200 || n > 999) {
			return errors.New("want a number: 0, or 200 to 999")
		}
		f.status = n
		return nil
	})
	cmd.Flags().Var(f.headers, "header", "a header that requests get, as 'Name: value'; may be given again")
	addText(cmd.Flags(), "body-file", 4096, "file with the body that requests get; -: standard input; default: no body", func(text string) error { f.file = text; return nil })
	addDuration(cmd.Flags(), &f.window, "window", 24*time.Hour, time.Minute, ageMax, "how long it is remembered")
	addBool(cmd.Flags(), &f.forever, "forever", "remember it without end")
	commandLineOnly(cmd.Flags(), "status", "header", "body-file", "window", "forever")
	return newKeyAct(s, cmd, func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Row, error) {
		outcome := keys.Outcome{Status: f.status, Header: f.headers, Window: &f.window}
		if f.forever {
			outcome.Window = nil
		}
		var err error
		if outcome.Body, err = f.body(cmd.InOrStdin()); err != nil {
			return nil, err
		}
		return keys.Finish(ctx, pool, s.schema, by, place, outcome)
	}, func(was *keys.Row) string {
		return fmt.Sprintf("it was %s, and is finished: every request with it gets status %d", was.State, f.status)
	}, func() error {
		var problems []error
		if f.status < 0 {
			problems = append(problems, errors.New("--status is missing: say what requests get"))
		}
		if f.forever && cmd.Flags().Changed("window") {
			problems = append(problems, errors.New("--forever and --window: want one of them"))
		}
		return errors.Join(problems...)
	})
}

func (f *finishing) body(stdin io.Reader) (body []byte, err error) {
	from := stdin
	switch f.file {
	case "":
		return nil, nil
	case "-":
	default:
		file, err := os.Open(f.file)
		if err != nil {
			return nil, usageError{fmt.Errorf("--body-file: %w", err)}
		}
		defer func() { _ = file.Close() }()
		from = file
	}
	body, err = io.ReadAll(io.LimitReader(from, bodyMax+1))
	if err != nil {
		return nil, usageError{fmt.Errorf("--body-file: %w", err)}
	}
	if len(body) > bodyMax {
		return nil, usageError{fmt.Errorf("--body-file: want at most %d bytes", bodyMax)}
	}
	return body, nil
}

// headerFlag is a flag that may be given again.
type headerFlag map[string][]string

func (headerFlag) String() string { return "" }
func (headerFlag) Type() string   { return "string" }

// Set refuses what would be replayed to clients and should not be.
func (h headerFlag) Set(text string) error {
	name, value, found := strings.Cut(text, ":")
	name, value = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)), strings.TrimSpace(value)
	if !found || name == "" || !utf8.ValidString(text) || strings.ContainsAny(name, " \t") || strings.ContainsFunc(name+value, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return errors.New("want 'Name: value'")
	}
	if idempotency.NeverStored(name) {
		return errors.New("want none that belongs to one client or one connection")
	}
	h[name] = append(h[name], value)
	return nil
}
