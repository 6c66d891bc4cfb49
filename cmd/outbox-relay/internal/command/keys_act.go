package command

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
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/dedup/idempotency"
)

// keyAct holds the argument and the flags of a command that changes a key.
type keyAct struct {
	theKey
	by operator.By
}

// newKeyAct makes cmd change one key.
func newKeyAct(s *cli.Settings, cmd *cobra.Command, a *keyAct, act func(ctx context.Context, pool *pgxpool.Pool, place keys.Place) (*keys.Changed, error), said func(changed *keys.Changed) string) *cobra.Command {
	a.on(cmd)
	addBy(s, cmd, &a.by, "")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
			row, err := a.one(ctx, pool, s.Schema)
			if err != nil {
				return err
			}
			changed, err := act(ctx, pool, row.Place)
			if err != nil {
				return err
			}
			printed := struct {
				What string `json:"what"`
				*keys.Changed
			}{"key." + cmd.Name(), changed}
			return say(cmd.OutOrStdout(), s.JSON, printed, "key %s of %s, scope %s: %s\n", terminal.Clip(row.Key, 255), terminal.Plain(row.Operation), terminal.Plain(row.Scope), said(changed))
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func newKeysUnlock(s *cli.Settings) *cobra.Command {
	a := &keyAct{}
	return newKeyAct(s, &cobra.Command{
		Use:   "unlock KEY",
		Short: "End the lock of a running key now",
		Long: `End the lock of a running key whose holder hangs. The holder can store nothing afterwards. The next request, or the
completer, continues from the recovery point. If a foreign call that must not be made twice was under way, the key then
becomes indeterminate: see "keys show". The lock of a dead holder expires by itself. Unlocks are recorded.`,
		Example: `  outbox-relay keys unlock 0192f0c1-2b3c-7def-8123-456789abcdef --why "pod 3 hangs"`,
	}, a, func(ctx context.Context, pool *pgxpool.Pool, place keys.Place) (*keys.Changed, error) {
		return keys.Unlock(ctx, pool, s.Schema, a.by, place)
	}, unlocked)
}

// bodyMax is the largest outcome that package idempotency stores.
const bodyMax = 64 << 20

// finishing holds the flags of finish.
type finishing struct {
	keys.Outcome

	file    string
	forever bool
}

func newKeysFinish(s *cli.Settings) *cobra.Command {
	a, f := &keyAct{}, &finishing{Outcome: keys.Outcome{Status: -1, Header: map[string][]string{}}}
	cmd := &cobra.Command{
		Use:   "finish KEY",
		Short: "Store the outcome of a key: every request with it gets that",
		Long: `Store the outcome of a key: every request with it gets that, and nothing more is executed. For indeterminate and
abandoned keys, and for running ones whose lock is free. A finished key is not changed.

Only the answer is stored. Effects of finished phases stay, even if the answer is a failure. First write by hand what
the phase whose call may have been made, and the phases after it, would have written.

The outcome is stored unencrypted. The stored request stays until the key is forgotten.

--window is the operation's Config.Window; give --forever if it has Config.Forever. Once the key is forgotten, a late
request is executed again, and pays again. Finishes are recorded.`,
		Example: `  outbox-relay keys finish order-4127 --status 201 --header 'Content-Type: application/json' --body-file paid.json \
    --window 24h --why "the bank's statement has it, ticket 88"
  outbox-relay keys finish order-4128 --status 409 --forever --why "the customer withdrew it"`,
	}
	cli.AddOption(cmd.Flags(), "status", "int", "", "status of the outcome (0, or 200 to 999); required", func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n != 0 && (n < 200 || n > 999) {
			return errors.New("want a number: 0, or 200 to 999")
		}
		f.Status = n
		return nil
	})
	addRepeated(cmd.Flags(), "header", "header of the outcome, as 'Name: value'; repeatable", f.addHeader)
	cli.AddText(cmd.Flags(), "body-file", 4096, "file with the body of the outcome; -: standard input; default: no body", func(text string) error { f.file = text; return nil })
	const bounds = "1m to 87600h"
	cli.AddOption(cmd.Flags(), "window", "duration", "", "how long the key is remembered: Config.Window of the operation ("+bounds+"); this or --forever", func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d < time.Minute || d > cli.AgeMax {
			return errors.New("want a duration such as 24h, " + bounds)
		}
		f.Window = &d
		return nil
	})
	cli.AddBool(cmd.Flags(), &f.forever, "forever", "never forget the key: Config.Forever of the operation")
	cli.CommandLineOnly(cmd.Flags(), "status", "body-file", "window", "forever")
	newKeyAct(s, cmd, a, func(ctx context.Context, pool *pgxpool.Pool, place keys.Place) (*keys.Changed, error) {
		var err error
		if f.Body, err = f.body(cmd.InOrStdin()); err != nil {
			return nil, err
		}
		return keys.Finish(ctx, pool, s.Schema, a.by, place, f.Outcome)
	}, f.said)
	s.Check(cmd, f.Validate)
	return cmd
}

// Validate returns all problems of flags that depend on each other.
func (f *finishing) Validate() error {
	var problems []error
	if f.Status < 0 {
		problems = append(problems, errors.New("--status is missing: want the status that requests get"))
	}
	switch window := f.Window != nil; {
	case f.forever && window:
		problems = append(problems, errors.New("--forever and --window: want one of them"))
	case !f.forever && !window:
		problems = append(problems, errors.New("--window or --forever is missing: want how long the outcome is remembered, as in Config.Window or Config.Forever "+
			"of the operation; a request that comes after too short a window is executed again"))
	}
	return errors.Join(problems...)
}

// said says what happens next, as unlocked and retried do.
func (f *finishing) said(changed *keys.Changed) string {
	was := changed.Was
	text := fmt.Sprintf("it was %s, and is finished: every request with it gets status %d; ", was.State, f.Status)
	if at := changed.Now.ExpiresAt; at == nil {
		text += "the key is never forgotten"
	} else {
		text += "the key is forgotten at " + utc(at, "") + ", and a request that comes later is executed again"
	}
	if len(was.Phases) > 0 {
		text += fmt.Sprintf("; what %s did stays, and the phases after that are not executed", terminal.Printable(strings.Join(was.Phases, ", ")))
	} else if was.Calling != nil {
		text += fmt.Sprintf("; what phase %q and those behind it would have written is not written", *was.Calling)
	}
	if was.Sealed && (len(f.Header) > 0 || f.file != "") {
		text += "; its texts were encrypted, this outcome is not"
	}
	return text
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

// repeated is a flag that may be given several times.
type repeated func(text string) error

func (repeated) String() string            { return "" }
func (repeated) Type() string              { return "string" }
func (add repeated) Set(text string) error { return add(text) }

// addRepeated adds a flag that calls add with each text, when the command line is parsed.
func addRepeated(flags *pflag.FlagSet, name, usage string, add func(text string) error) {
	flags.Var(repeated(add), name, usage)
	cli.CommandLineOnly(flags, name)
}

// addHeader refuses headers that must not be replayed to other clients.
func (f *finishing) addHeader(text string) error {
	name, value, found := strings.Cut(text, ":")
	name, value = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)), strings.TrimSpace(value)
	if !found || name == "" || !utf8.ValidString(text) || strings.ContainsAny(name, " \t") || strings.ContainsFunc(name+value, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return errors.New("want 'Name: value'")
	}
	if idempotency.NeverStored(name) {
		return errors.New("such a header is not stored: it belongs to one client, connection or moment")
	}
	f.Header[name] = append(f.Header[name], value)
	return nil
}

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
	}, retried)
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

// keyAdvice returns the situation of a key, and what to do. Its reader was woken up, and the next
// command may move money: so it first says what to find out, and it says what a command leaves
// undone. Each of several steps has its own line.
func keyAdvice(r keys.Row) (what, do string) {
	finish := "store what the client is to get" + stays(r) + ":\n" + keyCommand(r, "finish", " --status … --window …")
	switch {
	case r.State == keys.Finished:
		return "its outcome is stored", "nothing: every request with it gets the outcome"
	case r.Locked && r.InDoubt():
		return "a request or completer works on it, and calls a foreign system", "wait; if the holder hangs, end its lock; with the next request it then becomes indeterminate:\n" + keyCommand(r, "unlock", "")
	case r.Locked:
		return "a request or completer works on it", "wait; if the holder hangs, end its lock:\n" + keyCommand(r, "unlock", "")
	case r.InDoubt():
		return adviceOnCall(r)
	case r.State == keys.Indeterminate:
		return "it may or may not have happened",
			soon(r) + "the error says what is in doubt; find out from the foreign system, or in the database: --child with the phase that the error names, or the step of the work, " +
				"shows the ID that its call was given;\nif it happened, write by hand what is missing, then " + finish + "\nonly if nothing happened, let it be executed again:\n" + keyCommand(r, "retry", " --call-did-not-happen")
	case r.State == keys.Abandoned:
		return "it was given up: no phase was done for too long", "remove the cause, then let it continue, which repeats a repeatable call:\n" + keyCommand(r, "retry", "") + "\nor " + finish
	case r.Error != nil && strings.HasPrefix(*r.Error, idempotency.ErrUnknownRecoveryPoint.Error()):
		return "it waits for a program that knows the phases that are done", "the error says which phases the current program knows; deploy one whose list begins with those that are done;\nor, when you know what they did, " + finish
	case r.Stuck && r.RequestBytes == nil:
		return "no request and no completer works on it", "let its client retry; no completer can continue it, since the request is not stored;\nor " + finish
	case r.Stuck:
		return "no request and no completer works on it", "let its client retry, or the completer (Flow.Run) continue it: check that one runs, and its log;\nor " + finish
	case r.RequestBytes == nil:
		return "it failed, and is put off", "nothing: it continues when its client retries; no completer can continue it, since the request is not stored"
	}
	return "it failed, and is put off", "nothing: its client retries, or the completer continues it"
}

// keyCommand is a command line on the key; "…" stands for what only a person knows.
func keyCommand(r keys.Row, verb, flags string) string {
	return fmt.Sprintf("  outbox-relay keys %s %s --scope %s --operation %s%s --why …", verb, human.Word(r.Key), human.Word(r.Scope), human.Word(r.Operation), flags)
}

// adviceOnCall is for an unlocked key whose foreign call may have been made and must not be made
// twice. Finding out comes first, also for an abandoned key: a retry would make the call
// again.
func adviceOnCall(r keys.Row) (what, do string) {
	what = "a foreign system may or may not have acted, and must not be asked twice"
	do = soon(r) + "first find out from the foreign system whether it acted, by the child ID if the program sends it, else by amount and time;\n"
	switch r.State {
	case keys.Abandoned:
		what = "it was given up, and " + what
	case keys.Running:
		do += "let the next request, or the completer, make it indeterminate;\n"
	}
	return what, do + fmt.Sprintf("if it acted, continue with what phase %q writes, and those behind it:\n", *r.Calling) + keyCommand(r, "retry", " --call-happened") +
		"\nif they need the call's answer, write by hand what they would have written, then store what the client is to get:\n" + keyCommand(r, "finish", " --status … --window …") +
		"\nonly if it did not act, let the call be made again:\n" + keyCommand(r, "retry", " --call-did-not-happen")
}

// soon warns of asking too early: the foreign system does not know a call that is still on its way
// to it.
func soon(r keys.Row) string {
	if !r.OnItsWay() {
		return ""
	}
	return "not before " + utc(r.RetryAt, "") + ", since the call may still be on its way:\n"
}

// stays reminds of effects that an outcome does not undo.
func stays(r keys.Row) string {
	if len(r.Phases) == 0 {
		return ""
	}
	return fmt.Sprintf(" (what %s did stays: if that is a failure, undo it by hand first)", terminal.Printable(strings.Join(r.Phases, ", ")))
}

// unlocked and retried say what happens next.
func unlocked(changed *keys.Changed) string {
	was, text := changed.Was, "the lock is ended, the next request continues it"
	if was.InDoubt() {
		text = fmt.Sprintf("the lock is ended; the call of phase %q was under way, so it becomes indeterminate with the next request: then \"outbox-relay keys show\" says what to find out", *was.Calling)
	}
	if was.LockedBy != nil {
		text += "; it was held by " + terminal.Printable(*was.LockedBy)
	}
	return text
}

func retried(changed *keys.Changed) string {
	was := changed.Was
	text := "it was " + was.State + ", and continues with the next request, or by the completer"
	switch {
	case changed.Now == nil:
		return "it was " + was.State + ", and is forgotten: the next request executes it from the start"
	case was.RequestBytes == nil:
		text = "it was " + was.State + ", and continues when its client retries: the request is not stored, so no completer can continue it"
	}
	switch {
	case changed.Now.Call == "happened":
		text += fmt.Sprintf("; behind the call of phase %q, which is not made again", *was.Calling)
	case was.Calling != nil:
		text += fmt.Sprintf("; the call of phase %q is made again", *was.Calling)
	}
	return text
}
