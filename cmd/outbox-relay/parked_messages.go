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
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// parkedMessages are the messages that a command's flags choose, and what the command did with
// them.
type parkedMessages struct {
	s *cli.Settings
	queue.ParkedFilter
	id   string
	wait queue.Wait[int64]
	did  parkedReport
}

// parkedReport is what retry and discard print with --json.
type parkedReport struct {
	actReport
	Retrying  int         `json:"retrying"`   // handed back before
	NoPayload []uuid.UUID `json:"no_payload"` // left alone: too large to be stored, so it cannot be retried
	Behind    []uuid.UUID `json:"behind"`     // left alone: now behind another message
	Waited    *succeeded  `json:"waited"`
}

// succeeded is the consumers' progress, in messages that were handed back.
type succeeded struct {
	Succeeded int `json:"succeeded"`
	queue.Report
}

func newParkedMessages(s *cli.Settings) *parkedMessages {
	return &parkedMessages{s: s, did: parkedReport{NoPayload: []uuid.UUID{}, Behind: []uuid.UUID{}}}
}

func (p *parkedMessages) table() *queue.ParkedTable { return queue.Parked(p.s.Schema) }

func (p *parkedMessages) words() words {
	return words{
		command: "parked", row: "message", filters: "--id, --key, --topic, --consumer, --group, --reason", why: "reason",
		wait: "the consumers have handled them", lost: "never handled", finished: "handled", failed: "failed", unfinished: "does a consumer hold their partitions?",
	}
}

func (p *parkedMessages) add(flags *pflag.FlagSet) {
	cli.AddText(flags, "id", 1024, "message ID, or topic/partition/offset", p.name)
	filter{&p.Key, &p.Topic, &p.Reason, &p.OlderThan, &p.YoungerThan}.add(flags, p.words(), p.table().Reasons())
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
	seqs, err := queue.FindParked(ctx, conn, p.s.Schema, p.id)
	if errors.Is(err, queue.ErrNotFound) {
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

func (p *parkedMessages) list(ctx context.Context, conn *pgx.Conn, limit int) ([]queue.ParkedMessage, error) {
	return p.table().List(ctx, conn, p.ParkedFilter, limit)
}

func (p *parkedMessages) these(ctx context.Context, conn *pgx.Conn, seqs []int64, limit int) ([]queue.ParkedMessage, error) {
	return p.table().List(ctx, conn, queue.ParkedFilter{Seqs: seqs, Behind: true}, limit)
}

// targets are heads, unless an ID names others.
func (p *parkedMessages) targets(ctx context.Context, conn *pgx.Conn, limit int) ([]int64, error) {
	heads := p.ParkedFilter
	heads.Behind = p.named()
	return p.table().Targets(ctx, conn, heads, limit)
}

func (p *parkedMessages) totals(ctx context.Context, conn *pgx.Conn) (string, error) {
	found, err := p.table().Totals(ctx, conn, p.ParkedFilter)
	totals := make([]total, len(found))
	for i, t := range found {
		totals[i] = total{consumerText(t.Of), t.Reason, t.Count, t.Retrying, t.HeldKeys}
	}
	return totalsText(totals, "parked"), err
}

func (*parkedMessages) print(out io.Writer, messages []queue.ParkedMessage) error {
	var text strings.Builder
	text.WriteString("id\ttopic/partition/offset\tkey\treason\tattempts\tage\tbehind it\terror\n")
	for _, m := range messages {
		terminal.Add(&text, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", m.ID, m.At(), keyText(m.Key), stateText(&m), m.Attempts, seconds(m.AgeSeconds), m.Behind, terminal.Clip(m.Error, errorWidth))
	}
	return terminal.PrintTable(out, text.String())
}

// stateText is the reason, and the progress of a retry.
func stateText(m *queue.ParkedMessage) string {
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

func (p *parkedMessages) queued(m queue.ParkedMessage) queued[int64] {
	return queued[int64]{m.Seq, m.ID, m.At(), m.Head}
}

func (p *parkedMessages) act(ctx context.Context, conn *pgx.Conn, o *order, seqs []int64) (outcome, error) {
	result, err := apply(ctx, conn, p.table(), o, seqs)
	if err != nil {
		return outcome{}, err
	}
	p.wait.Add(result.Done)
	p.wait.Add(result.Retrying)
	p.did.Retrying += len(result.Retrying)
	p.did.NoPayload, p.did.Behind = append(p.did.NoPayload, result.NoPayload...), append(p.did.Behind, result.Behind...)
	sum := outcome{done: len(result.Done), released: result.Released, before: len(result.Retrying)}
	for _, id := range result.NoPayload {
		sum.leave(fmt.Sprintf("its payload was too large to be stored: \"outbox-relay parked show %s\"", id), id)
	}
	sum.leave("it now waits behind another message", result.Behind...)
	return sum, nil
}

func (p *parkedMessages) look(ctx context.Context, conn *pgx.Conn) (queue.Report, error) {
	r, err := p.table().Look(ctx, conn, &p.wait)
	p.did.Waited = &succeeded{r.Finished, r}
	return r, err
}

func (p *parkedMessages) report(common actReport) any {
	p.did.actReport = common
	return p.did
}
