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
	What string `json:"what"`
	*keys.Changed
}

// newKeyAct makes cmd change one key.
func newKeyAct(s *settings, cmd *cobra.Command, act func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Changed, error), said func(changed *keys.Changed) string, check func() error) *cobra.Command {
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
			changed, err := act(ctx, pool, by, row.Place)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), changedKey{"key." + cmd.Name(), changed})
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "key %s of %s, scope %s: %s\n", clip(row.Key, 255), plain(row.Operation), plain(row.Scope), said(changed))
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
was under way that must not be made twice, the key becomes indeterminate then: see "keys show" again.

A holder that died needs no unlock: its lock runs out by itself. Every unlock is written down: see "outbox-relay
actions list".`,
		Example: `  outbox-relay keys unlock 0192f0c1-2b3c-7def-8123-456789abcdef --why "pod 3 hangs"`,
	}, func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Changed, error) {
		return keys.Unlock(ctx, pool, s.schema, by, place)
	}, unlocked, nothingMore)
}

func newKeysRetry(s *settings) *cobra.Command {
	var callDidNotHappen bool
	cmd := &cobra.Command{
		Use:   "retry KEY",
		Short: "Say of an indeterminate or abandoned key that it did not happen",
		Long: `Say of an indeterminate or abandoned key that it did not happen: it is running again, and goes on from its
recovery point with the next request, or by the completer. Its attempts are counted from the start.

Where a foreign call that must not be made twice may have been made ("keys show" calls it "calling"), it is made
again. So ask the foreign system, by the child ID that "keys show" has, and say --call-did-not-happen: without that
such a key stays as it is. "It does not know the payment" counts only when the call cannot be on its way any more.
A call that may be made again is, while it is younger than its phase's CallAgainMax: with --call-did-not-happen, its
age begins anew.

Every retry is written down, with --why: see "outbox-relay actions list".`,
		Example: `  outbox-relay keys retry order-4127 --call-did-not-happen --why "the bank has no such transfer, ticket 88"
  outbox-relay keys retry order-4131 --why "the stock service is mended"`,
	}
	addBool(cmd.Flags(), &callDidNotHappen, "call-did-not-happen", "the foreign system was asked, and did nothing")
	commandLineOnly(cmd.Flags(), "call-did-not-happen")
	return newKeyAct(s, cmd, func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Changed, error) {
		return keys.Retry(ctx, pool, s.schema, by, place, callDidNotHappen)
	}, retried, nothingMore)
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
more. For indeterminate and abandoned keys, and for running ones that nobody holds. A finished key stays as it is.

Only the answer is stored. What the phases that are done did stays, also where the answer is a failure. What the
phase whose call may have been made, and those behind it, would have written is not written: do so by hand, before.

The outcome is stored as it is given, not encrypted. What was asked for stays beside it until it is forgotten.

Say how long it is remembered: --window with what the operation's program has as Config.Window, or --forever where
it has Config.Forever. There is no default: once the key is forgotten, a request that comes late is executed again,
and pays again. Every finish is written down, with --why: see "outbox-relay actions list".`,
		Example: `  outbox-relay keys finish order-4127 --status 201 --header 'Content-Type: application/json' --body-file paid.json \
    --window 24h --why "the bank's statement has it, ticket 88"
  outbox-relay keys finish order-4128 --status 409 --forever --why "the customer withdrew it"`,
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
	const bounds = "1m to 87600h"
	addOption(cmd.Flags(), "window", "duration", "", "how long it is remembered: Config.Window of the operation ("+bounds+"); this or --forever", func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d < time.Minute || d > ageMax {
			return errors.New("want a duration such as 24h, " + bounds)
		}
		f.window = d
		return nil
	})
	addBool(cmd.Flags(), &f.forever, "forever", "remember it without end: Config.Forever of the operation")
	commandLineOnly(cmd.Flags(), "status", "header", "body-file", "window", "forever")
	return newKeyAct(s, cmd, func(ctx context.Context, pool *pgxpool.Pool, by operator.By, place keys.Place) (*keys.Changed, error) {
		outcome := keys.Outcome{Status: f.status, Header: f.headers, Window: &f.window}
		if f.forever {
			outcome.Window = nil
		}
		var err error
		if outcome.Body, err = f.body(cmd.InOrStdin()); err != nil {
			return nil, err
		}
		return keys.Finish(ctx, pool, s.schema, by, place, outcome)
	}, func(changed *keys.Changed) string {
		return finished(changed, f.status)
	}, func() error {
		var problems []error
		if f.status < 0 {
			problems = append(problems, errors.New("--status is missing: say what requests get"))
		}
		switch window := cmd.Flags().Changed("window"); {
		case f.forever && window:
			problems = append(problems, errors.New("--forever and --window: want one of them"))
		case !f.forever && !window:
			problems = append(problems, errors.New("--window or --forever is missing: say how long the outcome is remembered, as Config.Window or Config.Forever "+
				"of the operation say in its program; a request that comes after a window that is too short is executed again"))
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
