package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// deadRows are the rows of outbox_dead that a command's flags choose, and what the command did with
// them.
type deadRows struct {
	s *cli.Settings
	queue.DeadFilter
	id   bool
	wait queue.Wait[queue.DeadPlace]
	did  deadReport
}

// deadReport is what retry and discard print with --json.
type deadReport struct {
	actReport
	Retrying []uuid.UUID `json:"retrying"` // left alone: handed back before
	Behind   []uuid.UUID `json:"behind"`   // left alone: now behind another row
	Waited   *published  `json:"waited"`
}

// published is the relay's progress, in rows that were handed back.
type published struct {
	Published int `json:"published"`
	queue.Report
}

func newDeadRows(s *cli.Settings) *deadRows {
	return &deadRows{s: s, did: deadReport{Retrying: []uuid.UUID{}, Behind: []uuid.UUID{}}}
}

func (d *deadRows) table() *queue.DeadTable { return queue.Dead(d.s.Schema) }

func (d *deadRows) words() words {
	return words{
		command: "dead", row: "row", filters: "--id, --key, --topic, --reason, --state", why: "reason",
		wait: "the relay has published them", lost: "never published", finished: "published", failed: "held", unfinished: "does a relay run?",
	}
}

func (d *deadRows) add(flags *pflag.FlagSet) {
	cli.AddText(flags, "id", 255, "row's id or seq, as in the relay's log", d.name)
	filter{&d.Key, &d.Topic, &d.Reason, &d.OlderThan, &d.YoungerThan}.add(flags, d.words(), d.table().Reasons())
	cli.AddOneOf(flags, &d.State, "state", "state", queue.DeadStates())
	cli.CommandLineOnly(flags, "state")
}

func (d *deadRows) name(id string) error {
	d.id = true
	return d.SetID(id)
}

// resolve makes --relay a filter too, whether it comes from a flag or from the environment.
func (d *deadRows) resolve(_ context.Context, _ *pgx.Conn, flags *pflag.FlagSet) error {
	if flags.Changed("relay") {
		d.Relay = &d.s.Relay
	}
	// Rows that wait behind others are only listed on request.
	d.Behind = d.id || d.Reason != nil && *d.Reason == "behind" || d.State != nil && *d.State == "behind"
	return nil
}

// choice ignores --relay: a deployment may have set it in the environment.
func (d *deadRows) choice() choice {
	switch {
	case d.id:
		return chooseOne
	case d.Key != nil || d.Topic != nil || d.Reason != nil || d.State != nil || d.OlderThan != nil || d.YoungerThan != nil:
		return chooseSome
	}
	return chooseAll
}

func (d *deadRows) nothing() string {
	if d.choice() != chooseAll || d.Relay != nil {
		return "no dead rows match: \"outbox-relay dead list\" shows all"
	}
	return "no dead rows"
}

func (d *deadRows) list(ctx context.Context, conn *pgx.Conn, limit int) ([]queue.DeadRow, error) {
	return d.table().List(ctx, conn, d.DeadFilter, limit)
}

func (d *deadRows) these(ctx context.Context, conn *pgx.Conn, places []queue.DeadPlace, limit int) ([]queue.DeadRow, error) {
	seqs := make([]int64, len(places))
	for i, place := range places {
		seqs[i] = place.Seq
	}
	return d.table().List(ctx, conn, queue.DeadFilter{Seqs: seqs, Relay: d.Relay, Behind: true}, limit)
}

func (d *deadRows) targets(ctx context.Context, conn *pgx.Conn, limit int) ([]queue.DeadPlace, error) {
	return d.table().Targets(ctx, conn, d.DeadFilter, limit)
}

func (d *deadRows) totals(ctx context.Context, conn *pgx.Conn) (string, error) {
	found, err := d.table().Totals(ctx, conn, d.DeadFilter)
	totals := make([]total, len(found))
	for i, t := range found {
		totals[i] = total{"relay " + terminal.Plain(t.Of), t.Reason, t.Count, t.Retrying, t.HeldKeys}
	}
	return totalsText(totals, "dead"), err
}

func (*deadRows) print(out io.Writer, rows []queue.DeadRow) error {
	var text strings.Builder
	text.WriteString("seq\tid\ttopic\tkey\treason\tattempts\tage\tbehind it\terror\n")
	for _, r := range rows {
		reason := r.Reason
		if r.State == "retry" {
			reason += " (being retried)"
		}
		terminal.Add(&text, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", r.Seq, r.ID, r.Topic, keyText(r.Key), reason, r.Attempts, seconds(r.AgeSeconds), r.Behind, terminal.Clip(r.Error, errorWidth))
	}
	return terminal.PrintTable(out, text.String())
}

func (d *deadRows) named() bool { return d.Behind }

func (d *deadRows) queued(r queue.DeadRow) queued[queue.DeadPlace] {
	return queued[queue.DeadPlace]{r.Place(), r.ID, fmt.Sprintf("seq %d", r.Seq), r.Head}
}

func (d *deadRows) act(ctx context.Context, conn *pgx.Conn, o *order, places []queue.DeadPlace) (outcome, error) {
	result, err := apply(ctx, conn, d.table(), o, places)
	if err != nil {
		return outcome{}, err
	}
	d.wait.Add(result.Done)
	sum := outcome{done: len(result.Done), released: result.Released}
	for _, r := range result.Retrying {
		d.did.Retrying = append(d.did.Retrying, r.ID())
		if o.discard {
			sum.leave("it was handed back, and the relay may be publishing it", r.ID())
		}
	}
	if !o.discard {
		sum.before = len(result.Retrying)
		d.wait.Add(result.Retrying)
	}
	d.did.Behind = append(d.did.Behind, result.Behind...)
	sum.leave("it waits behind another row, or the relay may be publishing it", result.Behind...)
	return sum, nil
}

func (d *deadRows) look(ctx context.Context, conn *pgx.Conn) (queue.Report, error) {
	r, err := d.table().Look(ctx, conn, &d.wait)
	d.did.Waited = &published{r.Finished, r}
	return r, err
}

func (d *deadRows) report(common actReport) any {
	d.did.actReport = common
	return d.did
}
