package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// parkedMessages are the messages that a command's flags choose, and what the command did with
// them.
type parkedMessages struct {
	s *cli.Settings
	parked.Filter
	id   string
	wait parked.Wait
	did  parkedReport
}

// parkedReport is what retry and discard print with --json.
type parkedReport struct {
	actReport
	Retrying  int            `json:"retrying"`   // handed back before
	NoPayload []uuid.UUID    `json:"no_payload"` // left alone: too large to be stored, so it cannot be retried
	Behind    []uuid.UUID    `json:"behind"`     // left alone: now behind another message
	Waited    *parked.Report `json:"waited"`
}

func newParkedMessages(s *cli.Settings) *parkedMessages {
	return &parkedMessages{s: s, did: parkedReport{NoPayload: []uuid.UUID{}, Behind: []uuid.UUID{}}}
}

func (p *parkedMessages) words() words {
	return words{
		command: "parked", row: "message", filters: "--id, --key, --topic, --consumer, --group, --reason", why: "reason",
		wait: "the consumers have handled them", lost: "never handled", finished: "handled", failed: "failed", unfinished: "does a consumer hold their partitions?",
		gone: parked.ErrNotFound,
	}
}

func (p *parkedMessages) add(flags *pflag.FlagSet) {
	cli.AddText(flags, "id", 1024, "message ID, or topic/partition/offset", p.name)
	filter{&p.Key, &p.Topic, &p.Reason, &p.OlderThan, &p.YoungerThan}.add(flags, p.words(), parked.Reasons())
	cli.AddText(flags, "consumer", 600, "consumer, such as billing/orders", cli.Into(&p.Consumer))
	cli.AddText(flags, "group", 255, "consumer group", cli.Into(&p.Group))
	cli.CommandLineOnly(flags, "consumer", "group")
}

func (p *parkedMessages) name(id string) error {
	p.id = id
	return nil
}

// resolve finds the messages of an ID, also those that are behind others.
func (p *parkedMessages) resolve(ctx context.Context, conn *pgx.Conn, _ *pflag.FlagSet) error {
	if p.id == "" {
		// Messages that wait behind others are only listed on request.
		p.Behind = p.Reason != nil && *p.Reason == "behind"
		return nil
	}
	seqs, err := parked.Find(ctx, conn, p.s.Schema, p.id)
	if errors.Is(err, parked.ErrNotFound) {
		seqs, err = []int64{0}, nil // no message has it
	}
	p.Seqs, p.Behind = seqs, true
	return err
}

func (p *parkedMessages) choice() choice {
	switch {
	case p.id != "":
		return chooseOne
	case p.Key != nil || p.Topic != nil || p.Consumer != nil || p.Group != nil || p.Reason != nil || p.OlderThan != nil || p.YoungerThan != nil:
		return chooseSome
	}
	return chooseAll
}

func (p *parkedMessages) nothing() string {
	if p.choice() != chooseAll {
		return "no parked messages match: \"outbox-relay parked list\" shows all"
	}
	return "no parked messages"
}

func (p *parkedMessages) list(ctx context.Context, conn *pgx.Conn, limit int) ([]parked.Message, error) {
	return parked.List(ctx, conn, p.s.Schema, p.Filter, limit)
}

func (p *parkedMessages) these(ctx context.Context, conn *pgx.Conn, seqs []int64, limit int) ([]parked.Message, error) {
	return parked.List(ctx, conn, p.s.Schema, parked.Filter{Seqs: seqs, Behind: true}, limit)
}

// targets are heads, unless an ID names others.
func (p *parkedMessages) targets(ctx context.Context, conn *pgx.Conn, limit int) ([]int64, error) {
	heads := p.Filter
	heads.Behind = p.named()
	return parked.Targets(ctx, conn, p.s.Schema, heads, limit)
}

func (p *parkedMessages) totals(ctx context.Context, conn *pgx.Conn) (string, error) {
	found, err := parked.Totals(ctx, conn, p.s.Schema, p.Filter)
	totals := make([]total, len(found))
	for i, t := range found {
		totals[i] = total{consumerText(t.Consumer), t.Reason, t.Count, t.Retrying, t.HeldKeys}
	}
	return totalsText(totals, "parked"), err
}

func (*parkedMessages) print(out io.Writer, messages []parked.Message) error {
	var text strings.Builder
	text.WriteString("id\ttopic/partition/offset\tkey\treason\tattempts\tage\tbehind it\terror\n")
	for _, m := range messages {
		terminal.Add(&text, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", m.ID, m.At(), keyText(m.Key), stateText(&m), m.Attempts, seconds(m.AgeSeconds), m.Behind, terminal.Clip(m.Error, errorWidth))
	}
	return terminal.PrintTable(out, text.String())
}

// stateText is the reason, and the progress of a retry.
func stateText(m *parked.Message) string {
	switch {
	case m.State == "retry" && m.RetryInSeconds != nil && *m.RetryInSeconds > 0:
		return m.Reason + " (retried in " + seconds(*m.RetryInSeconds) + ")"
	case m.State == "retry":
		return m.Reason + " (being retried)"
	case m.State == "behind" && m.Reason != "behind":
		return m.Reason + " (behind)"
	}
	return m.Reason
}

// consumerText quotes a name that is no plain group/topic.
func consumerText(name string) string {
	if dotted := strings.ReplaceAll(name, "/", "."); terminal.Plain(dotted) == dotted {
		return name
	}
	return strconv.Quote(name)
}

func (p *parkedMessages) named() bool { return p.id != "" }

func (p *parkedMessages) queued(m parked.Message) queued[int64] {
	return queued[int64]{m.Seq, m.ID, m.At(), m.Head}
}

func (p *parkedMessages) act(ctx context.Context, conn *pgx.Conn, o *order, seqs []int64) (outcome, error) {
	var result *parked.Result
	var err error
	if o.discard {
		result, err = parked.Discard(ctx, conn, p.s.Schema, o.by, seqs, o.wholeKeys)
	} else {
		result, err = parked.Retry(ctx, conn, p.s.Schema, o.by, seqs)
	}
	if err != nil {
		return outcome{}, err
	}
	p.wait.Add(result.Done)
	p.did.Retrying += result.Retrying
	sum := outcome{done: len(result.Done), released: result.Released, before: result.Retrying}
	for _, m := range result.NoPayload {
		p.did.NoPayload = append(p.did.NoPayload, m.ID)
		sum.leave(fmt.Sprintf("its payload was too large to be stored: \"outbox-relay parked show %s\"", m.ID), m.ID)
	}
	for _, m := range result.Behind {
		p.did.Behind = append(p.did.Behind, m.ID)
		sum.leave("it now waits behind another message", m.ID)
	}
	return sum, nil
}

func (p *parkedMessages) look(ctx context.Context, conn *pgx.Conn) (operator.Report, error) {
	r, err := p.wait.Look(ctx, conn, p.s.Schema)
	p.did.Waited = &r
	return operator.Report{Finished: r.Succeeded, Discarded: r.Discarded, Pending: r.Pending, Failed: r.Failed}, err
}

func (p *parkedMessages) report(common actReport) any {
	p.did.actReport = common
	return p.did
}
