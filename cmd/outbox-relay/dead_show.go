package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// shownDead is what "dead show --json" prints of a row.
type shownDead struct {
	*queue.DeadDetail
	payload
	What string `json:"what"`
	Do   string `json:"do"`
}

func (d *deadRows) show(ctx context.Context, conn *pgx.Conn, place queue.DeadPlace, payloadMax int64) (*detail, error) {
	r, err := queue.ShowDead(ctx, conn, d.s.Schema, place, payloadMax)
	if err != nil {
		return nil, err
	}
	advice, payload := d.table().Advice(r.Reason), newPayload(r.Payload, r.PayloadBytes)
	shown := &detail{
		json: shownDead{r, payload, advice.What, advice.Do},
		id:   r.ID,
		facts: [][2]string{
			{"row", fmt.Sprintf("seq %d of relay %s, written %s", r.Seq, terminal.Plain(r.Relay), r.CreatedAt.UTC().Format(time.RFC3339))},
			{"topic", r.Topic},
			{"key", fullKey(r.Key)},
			{"reason", r.Reason + ": " + advice.What},
			{"state", deadState(&r.DeadRow)},
			{"attempts", strconv.Itoa(int(r.Attempts))},
			{"dead", fmt.Sprintf("since %s, %s ago", r.DiedAt.UTC().Format(time.RFC3339), seconds(r.AgeSeconds))},
		},
		err: r.Error, headers: r.Headers, payload: payload, behind: r.Behind, row: "row", actions: r.Actions, advice: advice,
	}
	for _, n := range r.Next {
		shown.next = append(shown.next, fmt.Sprintf("%s  seq %d", n.ID, n.Seq))
	}
	return shown, nil
}

// deadState says who acts next.
func deadState(r *queue.DeadRow) string {
	switch {
	case r.Head != nil:
		return fmt.Sprintf("behind %s, which has to be retried or discarded first", r.Head)
	case r.State != "held":
		return "handed back; the relay publishes it next"
	case r.Reason == "unknown_topic":
		return "waits for the topic, or for an operator"
	case r.Reason == "not_authorized":
		return "waits for the right to use its topic, or for an operator"
	}
	return "waits for an operator"
}
