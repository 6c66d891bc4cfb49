package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newParkedShow(s *cli.Settings, cmd *cobra.Command) *cobra.Command {
	p := newParkedMessages(s)
	cli.AddText(cmd.Flags(), "consumer", 600, "only what this consumer parked", cli.Into(&p.Consumer))
	return newShow(s, p, cmd)
}

// shownMessage is what "parked show --json" prints of a message.
type shownMessage struct {
	*queue.ParkedDetail
	payload
	What string `json:"what"`
	Do   string `json:"do"`
}

func (p *parkedMessages) show(ctx context.Context, conn *pgx.Conn, seq, payloadMax int64) (*detail, error) {
	m, err := queue.ShowParked(ctx, conn, p.s.Schema, seq, payloadMax)
	if err != nil {
		return nil, err
	}
	advice, payload := p.table().Advice(m.Reason), newPayload(m.Payload, m.PayloadBytes)
	shown := &detail{
		json: shownMessage{m, payload, advice.What, advice.Do},
		id:   m.ID,
		facts: [][2]string{
			{"consumer", fmt.Sprintf("%s (group %s)", consumerText(m.Consumer), terminal.Plain(m.Group))},
			{"record", m.At() + recordTime(m.RecordTime)},
			{"key", fullKey(m.Key)},
			{"reason", m.Reason + ": " + advice.What},
			{"state", stateDetail(&m.ParkedMessage)},
			{"attempts", strconv.Itoa(int(m.Attempts))},
			{"parked", fmt.Sprintf("%s, %s ago", m.ParkedAt.UTC().Format(time.RFC3339), seconds(m.AgeSeconds))},
		},
		err: m.Error, headers: m.Headers, payload: payload, unstored: m.Reason == queue.ReasonTooLarge,
		behind: m.Behind, row: "message", actions: m.Actions, advice: advice,
	}
	for _, n := range m.Next {
		shown.next = append(shown.next, fmt.Sprintf("%s  %s  %s", n.ID, n.At(), n.Reason))
	}
	return shown, nil
}

func recordTime(at *time.Time) string {
	if at == nil {
		return ""
	}
	return ", written " + at.UTC().Format(time.RFC3339)
}

// stateDetail says who acts next.
func stateDetail(m *queue.ParkedMessage) string {
	switch {
	case m.Head != nil:
		return fmt.Sprintf("behind %s, which has to be retried or discarded first", m.Head)
	case m.State == "retry" && m.RetryInSeconds != nil && *m.RetryInSeconds > 0:
		return "handed back; tried again in " + seconds(*m.RetryInSeconds)
	case m.State == "retry":
		return "handed back; the consumer that holds the partition handles it next"
	}
	return "waits for an operator"
}
