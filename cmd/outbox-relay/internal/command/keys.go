package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/dedup/idempotency"
)

func newKeys(s *cli.Settings) *cobra.Command {
	return group(&cobra.Command{
		Use:   "keys",
		Short: "Show requests by their idempotency keys, and resolve those that need a decision",
		Long: `A request is executed once per idempotency key. An operator decides on two states: indeterminate (a foreign system may
or may not have acted) and abandoned (no phase was done for too long).

  outbox-relay keys list                # unfinished keys
  outbox-relay keys show KEY            # all about one key, and what to do
  outbox-relay keys retry KEY --why …   # continue from the recovery point
  outbox-relay keys finish KEY --status 201 --window 24h --why …   # nothing more is executed: requests get this outcome

KEY is what the client sent or, for an unfinished key, the eight digits that logs show instead.`,
	}, newKeysList(s), newKeysShow(s), newKeysUnlock(s), newKeysRetry(s), newKeysFinish(s), newKeysReap(s))
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
	cli.AddOneOf(flags, &state, "state", "state", []string{keys.Running, keys.Finished, keys.Indeterminate, keys.Abandoned, keys.Stuck})
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

// theKey is the argument KEY, with the flags that distinguish it from other keys of the same value.
type theKey struct{ keys.Name }

func (k *theKey) on(cmd *cobra.Command) {
	addPlace(cmd.Flags(), &k.Scope, &k.Operation)
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("%s takes one key: see %s --help", cmd.CommandPath(), cmd.CommandPath())
		}
		if err := checkName(args[0]); err != nil {
			return fmt.Errorf("key: %w", err)
		}
		k.Key = args[0]
		return nil
	}
}

// one finds the key. If several match, its error lists them.
func (k *theKey) one(ctx context.Context, conn operator.Querier, schema string) (keys.Row, error) {
	rows, err := keys.Find(ctx, conn, schema, k.Name)
	switch {
	case err != nil:
		return keys.Row{}, err
	case len(rows) == 0:
		return keys.Row{}, errors.New("no such key: it was never used, or its window is over and it is forgotten; the eight digits of logs only find unfinished keys, which \"outbox-relay keys list\" shows")
	case len(rows) == 1:
		return rows[0], nil
	}
	several := "several keys match: choose one with --scope and --operation:"
	for _, r := range rows {
		several += fmt.Sprintf(" %q of %q,", r.Scope, r.Operation)
	}
	return keys.Row{}, errors.New(strings.TrimSuffix(several, ","))
}

func newKeysShow(s *cli.Settings) *cobra.Command {
	var k theKey
	var p payloadFlags
	var children []string
	cmd := cli.Needs(&cobra.Command{
		Use:   "show KEY",
		Short: "Show all about an idempotency key, and what to do",
		Long: `Show an idempotency key: finished phases, a foreign call that may be under way, lock, attempts, error, outcome,
operators' actions, and what to do. Without --scope and --operation it reads the whole table.

A child ID is what a phase's call got as its own idempotency key or reference (Step.ChildID, Key.ChildID): ask the
foreign system by it. --child shows that of any other phase or step.

Request, data of phases and answer need --payload, and are cut at 4 KiB each without --full. Encrypted ones are never
shown; of a finished key only the answer is.`,
		Example: `  outbox-relay keys show 0192f0c1-2b3c-7def-8123-456789abcdef
  outbox-relay keys show 1f00c3aa --payload
  outbox-relay keys show order-4127 --child reserve --child pay
  outbox-relay keys show order-4127 --scope tenant-7 --operation charge --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.Read(cmd.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				row, err := k.one(ctx, conn, s.Schema)
				if err != nil {
					return err
				}
				d, err := keys.Show(ctx, conn, s.Schema, row, p.bytesMax())
				if err != nil {
					return err
				}
				shown := newShownKey(d, p.payload, children)
				return answer(cmd.OutOrStdout(), s.JSON, shown, shown.text(), true)
			})
		},
	}, cli.FlagDatabaseURL)
	k.on(cmd)
	addRepeated(cmd.Flags(), "child", "also show the child ID of this phase or step; repeatable", func(step string) error { children = append(children, step); return nil })
	p.add(cmd.Flags(), "request, data of phases and answer")
	s.AddJSON(cmd)
	return cmd
}

// shownKey is what "keys show --json" prints.
type shownKey struct {
	*keys.Detail
	Request *payload `json:"request,omitempty"` // with --payload, and not sealed
	Data    *payload `json:"data,omitempty"`
	Body    *payload `json:"body,omitempty"`
	// ChildIDs of the finished phases, of the one that may be under way, and of those of --child.
	ChildIDs map[string]uuid.UUID `json:"child_ids"`
	What     string               `json:"what"`
	Do       string               `json:"do"`
	children []string             // to show as text
}

func newShownKey(d *keys.Detail, withPayload bool, children []string) shownKey {
	shown := shownKey{Detail: d, ChildIDs: map[string]uuid.UUID{}, children: children}
	if d.Calling != nil && !slices.Contains(children, *d.Calling) {
		shown.children = append([]string{*d.Calling}, children...)
	}
	for _, step := range append(slices.Clone(d.Phases), shown.children...) {
		shown.ChildIDs[step] = d.ChildID(step)
	}
	shown.What, shown.Do = keyAdvice(d.Row)
	if withPayload && !d.Sealed {
		for _, p := range []struct {
			into  **payload
			read  []byte
			bytes *int64
		}{{&shown.Request, d.Request, d.RequestBytes}, {&shown.Data, d.Data, d.DataBytes}, {&shown.Body, d.Body, d.BodyBytes}} {
			if p.bytes != nil && (p.into == &shown.Body || d.State != keys.Finished) {
				*p.into = new(newPayload(p.read, p.bytes))
			}
		}
	}
	return shown
}

func (k shownKey) text() string {
	var text strings.Builder
	fact := func(name, format string, args ...any) {
		terminal.Add(&text, "%-10s %s\n", name, terminal.Fill(format, args...))
	}
	fact("key", "%s (%s in logs)", k.Key, k.Mark)
	fact("scope", "%s", k.Scope)
	fact("operation", "%s", k.Operation)
	fact("state", "%s: %s", k.State, k.What)
	fact("requested", "%s, %s ago", k.CreatedAt.UTC().Format(time.RFC3339), human.Seconds(k.AgeSeconds))
	if k.Flow != nil {
		fact("flow", "%s", *k.Flow)
	}
	if len(k.Phases) > 0 {
		fact("done", "%s", terminal.Printable(strings.Join(k.Phases, ", ")))
	}
	if k.Calling != nil {
		fact("calling", "%s: %s", *k.Calling, map[string]string{
			"repeatable": "the foreign system may have been asked, and may be asked again for some time",
			"once":       "the foreign system may have been asked, and must not be asked twice",
			"happened":   "it happened, as was decided; what it writes comes next",
		}[k.Call])
	}
	for _, step := range k.children {
		fact("child ID", "%s: what the call of %s gets as its key or reference", k.ChildIDs[step], step)
	}
	if k.LockedBy != nil {
		fact("lock", "%s, until %s (token %d)", *k.LockedBy, utc(k.LockedUntil, "it released it"), k.LockToken)
	} else {
		fact("lock", "token %d", k.LockToken)
	}
	fact("attempts", "%d since the last phase that is done", k.Attempts)
	switch {
	case k.RetryAt == nil:
	case k.State == keys.Indeterminate:
		fact("put off", "until %s: then the program's reconciler, if any, asks the foreign system", utc(k.RetryAt, ""))
	default:
		fact("put off", "until %s", utc(k.RetryAt, ""))
	}
	if k.Error != nil {
		terminal.Block(&text, "error", *k.Error)
	}
	k.outcome(&text)
	text.WriteString(actionsText(k.Actions))
	name := "what to do"
	for line := range strings.SplitSeq(k.Do, "\n") {
		fact(name, "%s", line)
		name = ""
	}
	return text.String()
}

func (k shownKey) outcome(text *strings.Builder) {
	if k.State == keys.Finished {
		status := "none"
		if k.Status != nil {
			status = fmt.Sprint(*k.Status)
		}
		terminal.Add(text, "%-10s status %s, since %s, forgotten %s\n", "outcome", status, utc(k.FinishedAt, "-"), utc(k.ExpiresAt, "never"))
		printHeaders(text, k.Headers)
	}
	for _, p := range []struct {
		name  string
		shown *payload
		bytes *int64
	}{{"request", k.Request, k.RequestBytes}, {"data", k.Data, k.DataBytes}, {"body", k.Body, k.BodyBytes}} {
		switch {
		case p.bytes == nil:
		case k.Sealed:
			terminal.Add(text, "%-10s %s, encrypted\n", p.name, human.Count(*p.bytes, "byte"))
		case k.State == keys.Finished && p.name != "body":
			terminal.Add(text, "%-10s %s, not needed any more: removed with the key, and not shown, since they may be encrypted\n", p.name, human.Count(*p.bytes, "byte"))
		case p.shown == nil:
			terminal.Add(text, "%-10s %s: --payload shows them\n", p.name, human.Count(*p.bytes, "byte"))
		default:
			p.shown.printAs(text, p.name)
		}
	}
	if k.BodyDropped {
		terminal.Add(text, "%-10s not stored: it was too large\n", "body")
	}
}

// requestText is a request in a timeline.
func requestText(r keys.Row) string {
	text := fmt.Sprintf("%s of %s, scope %s, is requested; it is %s", terminal.Clip(r.Key, errorWidth), terminal.Plain(r.Operation), terminal.Plain(r.Scope), stateOf(r))
	if r.Status != nil {
		text += fmt.Sprintf(", with status %d", *r.Status)
	}
	if len(r.Phases) > 0 {
		text += ", done: " + terminal.Printable(strings.Join(r.Phases, ", "))
	}
	if r.Calling != nil {
		text += ", calling: " + terminal.Printable(*r.Calling)
	}
	return text
}

// reapMax bounds a run; the next run continues.
const reapMax = time.Hour

func newKeysReap(s *cli.Settings) *cobra.Command {
	cmd := cli.Needs(&cobra.Command{
		Use:   "reap",
		Short: "Forget keys whose window is over",
		Long: `Forget keys whose window is over, of all operations, in small transactions. A later request with such a key is executed
again. Unfinished keys stay while something can finish them. One whose request is not stored is forgotten if nothing of
it happened, and else becomes abandoned.

Programs with Flow.Run or Operation.Run do this by themselves. Where none does, run it every hour. It is not recorded.`,
		Example: `  outbox-relay keys reap
  outbox-relay keys reap --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), reapMax)
			defer cancel()
			return s.WithTables(ctx, true, func(ctx context.Context, conn *pgx.Conn) error {
				reaped, err := idempotency.Reap(ctx, conn, s.Schema)
				// Print it also after an error: keys are already forgotten then.
				text := human.Count(reaped.Forgotten, "key") + " forgotten"
				if reaped.Doubted > 0 {
					text += fmt.Sprintf("; %d need a decision now: \"outbox-relay keys list\"", reaped.Doubted)
				}
				if s.JSON {
					return errors.Join(err, terminal.PrintJSON(cmd.OutOrStdout(), map[string]any{"keys": reaped.Forgotten, "undecided": reaped.Doubted}))
				}
				return errors.Join(err, terminal.Say(cmd.OutOrStdout(), "%s\n", text))
			})
		},
	}, cli.FlagDatabaseURL)
	s.AddJSON(cmd)
	return cmd
}
