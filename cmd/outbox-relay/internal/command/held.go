package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newDead(s *cli.Settings) *cobra.Command {
	return newHeld(s, held.Dead, "Show, retry or discard rows that Kafka did not accept",
		`Rows that Kafka did not accept wait in outbox_dead. The first dead row of a key holds the key: later rows of the key
wait behind it, in order. An operator decides:

  outbox-relay dead list                # what waits, and why
  outbox-relay dead show ID             # all about one row, and what to do
  outbox-relay dead retry ID --wait     # publish it, and the rows behind it
  outbox-relay dead discard ID --why …  # never publish it; the rows behind it continue`,
		helpText{"List dead rows, the newest first", `List dead rows, the newest first, with the number of rows behind each, and totals by reason. --state behind, or an ID,
lists rows behind others. Without --relay it lists rows of all relays.

--json has the same keys as for parked messages: what dead rows do not have is empty or null.`},
		helpText{"Show all about a dead row, and what to do", `Show a dead row: error, rows behind it, operators' actions, and what to do. ID is the row's id or seq, as in the
relay's log. If several relays have it, all are shown.

Headers and payload need --payload, which is cut at 4 KiB without --full. Headers that hold secrets (authorization,
cookie, token, and the like) are never shown.`},
		helpText{"Hand dead rows back to the running relay", `Hand dead rows back to the running relay. It publishes them within about a second, then the rows behind them, in
order. A row that Kafka refuses again is held again. Only the first row of a key can be retried; the others follow.
Rows of a missing topic need no retry: they follow once it exists.

With --wait, exit status 1 if a row is held again, or not done within --wait-max. Retries are recorded.

  outbox-relay dead retry 0199a0c4-… --wait
  outbox-relay dead retry --reason too_large --topic orders --why "limit raised to 4 MiB" --wait`},
		helpText{"Discard dead rows: they are never published", `Discard dead rows: they are never published. The rows behind them go to the relay, in order, or are discarded too with
--all-of-key. Only the first row of a key can be discarded alone, and none that was handed back: the relay may be
publishing it. Discards are recorded without the payload: see "dead show" first.

  outbox-relay dead discard 0199a0c4-… --why "test order"
  outbox-relay dead discard --topic oders --all-of-key --yes --why "misspelt topic"`})
}

func newParked(s *cli.Settings) *cobra.Command {
	return newHeld(s, held.Parked, "Show, retry or discard messages that could not be handled",
		`Messages that a consumer could not handle wait in parked_messages. The first parked message of a key holds the key:
later messages of the key wait behind it, in order. An operator decides:

  outbox-relay parked list                # what waits, and why
  outbox-relay parked show ID             # all about one message, and what to do
  outbox-relay parked retry ID --wait     # handle it, and the messages behind it
  outbox-relay parked discard ID --why …  # never handle it; the messages behind it continue`,
		helpText{"List parked messages, the newest first", `List parked messages, the newest first, with the number of messages behind each, and totals by reason. --reason behind,
or an ID, lists messages behind others.

--json has the same keys as for dead rows: what parked messages do not have is empty or null.`},
		helpText{"Show all about a parked message, and what to do", `Show a parked message: error, messages behind it, operators' actions, and what to do. ID is the message's ID, as in the
log or as the message carried it, or topic/partition/offset. If several consumers parked it, all are shown.

Headers and payload are as in "dead show".`},
		helpText{"Hand parked messages back to the running consumers", `Hand parked messages back to the running consumers. The partition's holder handles them within about a second, then the
messages behind them, in order. A message that fails again is parked again. Only the first message of a key can be
retried; the others follow.

With --wait, exit status 1 if a message fails again, or is not done within --wait-max. Retries are recorded.`},
		helpText{"Discard parked messages: they are never handled", `Discard parked messages: they are never handled, and their rows are deleted. The messages behind them go to the
consumers, in order, or are discarded too with --all-of-key. Only the first message of a key can be discarded alone.
Discards are recorded without the payload: see "parked show" first.`})
}

// helpText is the short and the long text of a command.
type helpText struct{ short, long string }

func newHeld(s *cli.Settings, kind held.Kind, short, long string, list, show, retry, discard helpText) *cobra.Command {
	command := func(use string, h helpText) *cobra.Command {
		return &cobra.Command{Use: use, Short: h.short, Long: h.long}
	}
	return group(command(string(kind), helpText{short, long}),
		newList(s, kind, command("list [ID]", list)),
		newShow(s, kind, command("show ID", show)),
		newRetry(s, kind, command("retry {ID | filter}", retry)),
		newDiscard(s, kind, command("discard {ID | filter}", discard)))
}

// selection is the rows of a kind that a command's flags choose.
type selection struct {
	held.Words
	s      *cli.Settings
	kind   held.Kind
	filter held.Filter
	limit  int
}

func newSelection(s *cli.Settings, kind held.Kind) *selection {
	return &selection{Words: kind.Words(), s: s, kind: kind}
}

const flagLimit = "limit"

// add adds flags. They only come from the command line: a deployment's environment must not decide
// what is discarded.
func (c *selection) add(flags *pflag.FlagSet, limit int) {
	f := &c.filter
	cli.AddText(flags, "key", 1<<20, "key, as text or as base64:...", func(text string) (err error) {
		f.Key, err = human.ParseKey(text)
		return err
	})
	cli.AddText(flags, "topic", 249, "topic", cli.Into(&f.Topic))
	cli.AddOneOf(flags, &f.Reason, "reason", "reason", c.kind.Reasons())
	cli.AddAge(flags, &f.OlderThan, "older-than", string(c.kind)+" for longer")
	cli.AddAge(flags, &f.YoungerThan, "younger-than", string(c.kind)+" for less")
	cli.AddInt(flags, &c.limit, flagLimit, limit, 1, held.TargetsMax, "at most this many "+c.Rows())
	cli.CommandLineOnly(flags, "key", "topic", "reason", "older-than", "younger-than", flagLimit)
	if c.kind == held.Dead {
		cli.AddOneOf(flags, &f.State, "state", "state", c.kind.States())
		cli.CommandLineOnly(flags, "state")
		return
	}
	cli.AddText(flags, "consumer", 600, "consumer, such as billing/orders", cli.Into(&f.Consumer))
	cli.AddText(flags, "group", 255, "consumer group", cli.Into(&f.Group))
	cli.CommandLineOnly(flags, "consumer", "group")
}

// name chooses rows by an ID as people have it.
func (c *selection) name(id string) error { return c.kind.SetID(&c.filter, id) }

// with runs work with a connection, after it has completed the choice from the database and from
// --relay, which may come from the environment.
func (c *selection) with(ctx context.Context, flags *pflag.FlagSet, acts bool, work func(context.Context, *pgx.Conn) error) error {
	if c.kind == held.Dead && flags.Changed("relay") {
		c.filter.Relay = &c.s.Relay
	}
	// Rows that wait behind others are only listed, and never acted on alone, on request.
	behind := func(text *string) bool { return text != nil && *text == "behind" }
	c.filter.Behind = c.filter.Named() || behind(c.filter.State) || behind(c.filter.Reason) && (c.kind == held.Dead || !acts)
	run := func(ctx context.Context, conn *pgx.Conn) error {
		if err := c.filter.Find(ctx, conn, c.s.Schema); err != nil {
			return err
		}
		return work(ctx, conn)
	}
	if acts {
		return c.s.WithTables(ctx, true, run)
	}
	return c.s.Read(ctx, run)
}

// nothing is the text if no row matches.
func (c *selection) nothing() string {
	text := "no " + string(c.kind) + " " + c.Rows()
	if c.filter.Narrows() || c.filter.Relay != nil {
		text += " match: \"outbox-relay " + string(c.kind) + " list\" shows all"
	}
	return text
}

// these are the first of the rows to act on, as a list has them.
func (c *selection) these(ctx context.Context, conn *pgx.Conn, refs []held.Ref) ([]held.Row, error) {
	seqs := make([]int64, len(refs))
	for i, ref := range refs {
		seqs[i] = ref.Seq
	}
	return c.kind.List(ctx, conn, c.s.Schema, held.Filter{Seqs: seqs, Relay: c.filter.Relay, Behind: true}, listMax)
}

// listMax is the default limit of a list.
const listMax = 50

// newList makes cmd list rows.
func newList(s *cli.Settings, kind held.Kind, cmd *cobra.Command) *cobra.Command {
	c := newSelection(s, kind)
	c.add(cmd.Flags(), listMax)
	s.AddJSONLines(cmd)
	cmd.Args = cli.OptionalID(c.name)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.with(cmd.Context(), cmd.Flags(), false, func(ctx context.Context, conn *pgx.Conn) error {
			return c.list(ctx, conn, s.JSON, cmd.OutOrStdout())
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func (c *selection) list(ctx context.Context, conn *pgx.Conn, asJSON bool, out io.Writer) error {
	rows, err := c.kind.List(ctx, conn, c.s.Schema, c.filter, c.limit+1)
	if err != nil {
		return err
	}
	more := len(rows) > c.limit
	rows = rows[:min(len(rows), c.limit)]
	switch {
	case asJSON:
		return terminal.PrintObjects(out, rows)
	case len(rows) == 0:
		return terminal.Say(out, "%s\n", c.nothing())
	}
	totals, err := c.kind.Totals(ctx, conn, c.s.Schema, c.filter)
	if err != nil {
		return err
	}
	text := c.table(rows)
	if more {
		text += fmt.Sprintf("the newest %d: --%s shows more\n", len(rows), flagLimit)
	}
	return terminal.Write(out, text+c.totalsText(totals))
}

func (c *selection) table(rows []held.Row) string {
	place := "seq\tid\ttopic"
	if c.kind == held.Parked {
		place = "consumer\tid\ttopic/partition/offset"
	}
	return table(rows, place+"\tkey\treason\tattempts\tage\tbehind it\terror", func(r held.Row) string {
		text := terminal.Fill("%d\t%s\t%s", r.Seq, r.ID, r.Topic)
		if c.kind == held.Parked {
			text = terminal.Fill("%s\t%s\t%s", consumerText(r.Consumer), r.ID, r.At())
		}
		return text + terminal.Fill("\t%s\t%s\t%d\t%s\t%d\t%s",
			keyText(r.Key), stateText(&r), r.Attempts, human.Seconds(r.AgeSeconds), r.Behind, terminal.Clip(r.Error, errorWidth))
	})
}

// stateText is the reason, and the progress of a retry.
func stateText(r *held.Row) string {
	switch {
	case r.State == "retry" && r.RetryInSeconds != nil && *r.RetryInSeconds > 0:
		return r.Reason + " (retried in " + human.Seconds(*r.RetryInSeconds) + ")"
	case r.State == "retry":
		return r.Reason + " (being retried)"
	case r.State == "behind" && r.Reason != "behind":
		return r.Reason + " (behind)"
	}
	return r.Reason
}

// consumerText quotes a name that is no plain group/topic.
func consumerText(name string) string {
	if dotted := strings.ReplaceAll(name, "/", "."); terminal.Plain(dotted) == dotted {
		return name
	}
	return strconv.Quote(name)
}

// totalsText is one line per relay or consumer. The totals are sorted by it. They count what the
// filter selects, also beyond --limit.
func (c *selection) totalsText(totals []held.Total) string {
	var text strings.Builder
	counted := "in all"
	if c.filter.Narrows() {
		counted = "with this filter"
	}
	for len(totals) > 0 {
		var reasons []string
		var count, keys, retrying int64
		of := totals[0].Of
		for len(totals) > 0 && totals[0].Of == of {
			t := totals[0]
			reasons = append(reasons, fmt.Sprintf("%s %d", t.Reason, t.Count))
			count, keys, retrying, totals = count+t.Count, keys+t.HeldKeys, retrying+t.Retrying, totals[1:]
		}
		name := consumerText(of)
		if c.kind == held.Dead {
			name = "relay " + terminal.Plain(of)
		}
		terminal.Add(&text, "%s: %d %s %s (%s), %s held, %d being retried\n", name, count, string(c.kind), counted, strings.Join(reasons, ", "), human.Count(keys, "key"), retrying)
	}
	return text.String()
}

// payloadShown is how much of a payload is shown without --full.
const payloadShown = 4 << 10

// newShow makes cmd show all about one row.
func newShow(s *cli.Settings, kind held.Kind, cmd *cobra.Command) *cobra.Command {
	var p payloadFlags
	c := newSelection(s, kind)
	if kind == held.Parked {
		cli.AddText(cmd.Flags(), "consumer", 600, "only what this consumer parked", cli.Into(&c.filter.Consumer))
	}
	p.add(cmd.Flags(), "headers and payload")
	s.AddJSON(cmd)
	cmd.Args = cli.OneID(c.name)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.with(cmd.Context(), cmd.Flags(), false, func(ctx context.Context, conn *pgx.Conn) error {
			return c.show(ctx, conn, p.bytesMax(), s.JSON, cmd.OutOrStdout())
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func (c *selection) show(ctx context.Context, conn *pgx.Conn, payloadMax int64, asJSON bool, out io.Writer) error {
	refs, err := c.kind.Targets(ctx, conn, c.s.Schema, c.filter, listMax)
	if err != nil {
		return err
	}
	shown := 0
	for _, ref := range refs {
		d, err := c.kind.Show(ctx, conn, c.s.Schema, ref, payloadMax)
		if errors.Is(err, held.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		var shownPayload *payload
		if payloadMax > 0 {
			shownPayload = new(newPayload(d.Payload, d.PayloadBytes))
		} else {
			d.Headers = nil
		}
		err = answer(out, asJSON, struct {
			*held.Detail
			*payload
		}{d, shownPayload}, strings.Repeat("\n", min(shown, 1))+c.detail(d, shownPayload), true)
		if err != nil {
			return err
		}
		shown++
	}
	if shown == 0 {
		return errors.New(c.nothing())
	}
	return nil
}

func (c *selection) detail(d *held.Detail, p *payload) string {
	var text strings.Builder
	for _, fact := range c.facts(d) {
		terminal.Add(&text, "%-10s %s\n", fact[0], fact[1])
	}
	terminal.Block(&text, "error", d.Error)
	printHeaders(&text, d.Headers)
	switch {
	case d.PayloadBytes != nil && p == nil:
		terminal.Add(&text, "%-10s %s: --payload shows them, and the headers\n", "payload", human.Count(*d.PayloadBytes, "byte"))
	case d.PayloadBytes != nil:
		p.printAs(&text, "payload")
	case c.kind == held.Parked && d.Reason == held.ReasonTooLarge:
		terminal.Block(&text, "payload", "not stored")
	default:
		terminal.Block(&text, "payload", "none (a tombstone)")
	}
	if d.Behind > 0 {
		terminal.Add(&text, "behind it  %s\n", human.Count(d.Behind, c.Row))
		for _, n := range d.Next {
			terminal.Add(&text, "  %s  %s", n.ID, n.At())
			if c.kind == held.Parked {
				terminal.Add(&text, "  %s", n.Reason)
			}
			text.WriteString("\n")
		}
		if d.Behind > int64(len(d.Next)) {
			terminal.Add(&text, "  and %d more\n", d.Behind-int64(len(d.Next)))
		}
	}
	text.WriteString(actionsText(d.Actions))
	terminal.Add(&text, "%-10s %s\n", "what to do", d.Do)
	for _, command := range d.Commands {
		terminal.Add(&text, "%-10s %s\n", "", command)
	}
	return text.String()
}

// facts are names and values.
func (c *selection) facts(d *held.Detail) [][2]string {
	facts, written := [][2]string{{"id", d.ID.String()}}, ""
	since := fmt.Sprintf("%s, %s ago", d.HeldAt.UTC().Format(time.RFC3339), human.Seconds(d.AgeSeconds))
	if d.CreatedAt != nil {
		written = ", written " + d.CreatedAt.UTC().Format(time.RFC3339)
	}
	if c.kind == held.Dead {
		since = "since " + since
		facts = append(facts, [2]string{"row", fmt.Sprintf("seq %d of relay %s%s", d.Seq, terminal.Plain(d.Relay), written)}, [2]string{"topic", d.Topic})
	} else {
		facts = append(facts, [2]string{"consumer", fmt.Sprintf("%s (group %s)", consumerText(d.Consumer), terminal.Plain(d.Group))}, [2]string{"record", d.At() + written})
	}
	return append(facts, [][2]string{
		{"key", fullKey(d.Key)}, {"reason", d.Reason + ": " + d.What}, {"state", stateDetail(&d.Row)}, {"attempts", strconv.Itoa(int(d.Attempts))}, {string(c.kind), since},
	}...)
}

// stateDetail says who acts next.
func stateDetail(r *held.Row) string {
	dead := r.Partition == nil
	switch {
	case r.Head != nil:
		return fmt.Sprintf("behind %s, which has to be retried or discarded first", r.Head)
	case dead && r.State != "held":
		return "handed back; the relay publishes it next"
	case dead && r.Reason == "unknown_topic":
		return "waits for the topic, or for an operator"
	case dead && r.Reason == "not_authorized":
		return "waits for the right to use its topic, or for an operator"
	case r.State == "retry" && r.RetryInSeconds != nil && *r.RetryInSeconds > 0:
		return "handed back; tried again in " + human.Seconds(*r.RetryInSeconds)
	case r.State == "retry":
		return "handed back; the consumer that holds the partition handles it next"
	}
	return "waits for an operator"
}
