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
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/dead"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// deadRows are the rows of outbox_dead that a command's flags choose, and what the command did with
// them.
type deadRows struct {
	s *cli.Settings
	dead.Filter
	id   bool
	wait dead.Wait
	did  deadReport
}

// deadReport is what retry and discard print with --json.
type deadReport struct {
	actReport
	Retrying []uuid.UUID  `json:"retrying"` // left alone: handed back before
	Behind   []uuid.UUID  `json:"behind"`   // left alone: now behind another row
	Waited   *dead.Report `json:"waited"`
}

func newDeadRows(s *cli.Settings) *deadRows {
	return &deadRows{s: s, did: deadReport{Retrying: []uuid.UUID{}, Behind: []uuid.UUID{}}}
}

func (d *deadRows) words() words {
	return words{
		command: "dead", row: "row", filters: "--id, --key, --topic, --reason, --state", why: "reason",
		wait: "the relay has published them", lost: "never published", finished: "published", failed: "held", unfinished: "does a relay run?",
		gone: dead.ErrNotFound,
	}
}

func (d *deadRows) add(flags *pflag.FlagSet) {
	cli.AddText(flags, "id", 255, "row's id or seq, as in the relay's log", d.name)
	filter{&d.Key, &d.Topic, &d.Reason, &d.OlderThan, &d.YoungerThan}.add(flags, d.words(), dead.Reasons())
	cli.AddOneOf(flags, &d.State, "state", "state", dead.States())
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

func (d *deadRows) list(ctx context.Context, conn *pgx.Conn, limit int) ([]dead.Row, error) {
	return dead.List(ctx, conn, d.s.Schema, d.Filter, limit)
}

func (d *deadRows) these(ctx context.Context, conn *pgx.Conn, places []dead.Place, limit int) ([]dead.Row, error) {
	seqs := make([]int64, len(places))
	for i, place := range places {
		seqs[i] = place.Seq
	}
	return dead.List(ctx, conn, d.s.Schema, dead.Filter{Seqs: seqs, Relay: d.Relay, Behind: true}, limit)
}

func (d *deadRows) targets(ctx context.Context, conn *pgx.Conn, limit int) ([]dead.Place, error) {
	return dead.Targets(ctx, conn, d.s.Schema, d.Filter, limit)
}

func (d *deadRows) totals(ctx context.Context, conn *pgx.Conn) (string, error) {
	found, err := dead.Totals(ctx, conn, d.s.Schema, d.Filter)
	totals := make([]total, len(found))
	for i, t := range found {
		totals[i] = total{"relay " + terminal.Plain(t.Relay), t.Reason, t.Count, t.Retrying, t.HeldKeys}
	}
	return totalsText(totals, "dead"), err
}

func (*deadRows) print(out io.Writer, rows []dead.Row) error {
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

func (d *deadRows) queued(r dead.Row) queued[dead.Place] {
	return queued[dead.Place]{r.Place(), r.ID, fmt.Sprintf("seq %d", r.Seq), r.Head}
}

func (d *deadRows) act(ctx context.Context, conn *pgx.Conn, o *order, places []dead.Place) (outcome, error) {
	var result *dead.Result
	var err error
	if o.discard {
		result, err = dead.Discard(ctx, conn, d.s.Schema, o.by, places, o.wholeKeys)
	} else {
		result, err = dead.Retry(ctx, conn, d.s.Schema, o.by, places)
	}
	if err != nil {
		return outcome{}, err
	}
	d.wait.Add(result.Done)
	d.did.Retrying, d.did.Behind = append(d.did.Retrying, result.Retrying...), append(d.did.Behind, result.Behind...)
	sum := outcome{done: len(result.Done), released: result.Released}
	if o.discard {
		sum.leave("it was handed back, and the relay may be publishing it", result.Retrying...)
	} else {
		sum.before = len(result.Retrying) // they are on their way
	}
	sum.leave("it waits behind another row, or the relay may be publishing it", result.Behind...)
	return sum, nil
}

func (d *deadRows) look(ctx context.Context, conn *pgx.Conn) (operator.Report, error) {
	r, err := d.wait.Look(ctx, conn, d.s.Schema)
	d.did.Waited = &r
	return operator.Report{Finished: r.Published, Discarded: r.Discarded, Pending: r.Pending, Failed: r.Failed}, err
}

func (d *deadRows) report(common actReport) any {
	d.did.actReport = common
	return d.did
}
