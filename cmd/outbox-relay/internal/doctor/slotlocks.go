package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// SlotHolder is a session, or a prepared transaction, whose lock keeps published rows in the
// outbox.
type SlotHolder struct {
	PID   *int32  `json:"pid"` // null: a prepared transaction
	Who   string  `json:"who"`
	Slots []int16 `json:"slots"`
	// HeldSeconds is the time since its transaction began; null: the role may not see that.
	HeldSeconds *float64 `json:"held_seconds"`
	Bytes       int64    `json:"bytes"`   // of the slots
	Overdue     bool     `json:"overdue"` // one of the slots should be empty already
}

// A transaction younger than slotHeldMin is not reported: those of writers and readers are shorter.
// If the role may not see how old it is, only a slot counts that writers left slotLeftMin ago.
const (
	slotHeldMin = time.Minute
	slotLeftMin = 20 * time.Minute
)

// readSlotHolders adds a note for each lock that blocks the truncation of a slot that is not being
// filled.
func (s *Status) readSlotHolders(ctx context.Context, db operator.Querier, schema string) error {
	rows, err := db.Query(ctx, inSchema(slotHoldersSQL, schema), slotLeftMin, slotHeldMin)
	if err == nil {
		s.SlotHolders, err = pgx.CollectRows(rows, pgx.RowToStructByPos[SlotHolder])
	}
	if err != nil {
		return fmt.Errorf("read locks on the slots of the outbox: %w", err)
	}
	for _, h := range s.SlotHolders {
		s.Notes = append(s.Notes, h.text())
	}
	return nil
}

func (h *SlotHolder) text() string {
	held := "for an unknown time"
	if h.HeldSeconds != nil {
		held = "for " + age(*h.HeldSeconds).String()
	}
	return fmt.Sprintf("%s holds a lock on slots %v of the outbox (%d MiB) %s: published rows there cannot be removed before its transaction ends; nothing else waits",
		oneLine(h.Who), h.Slots, h.Bytes>>20, held)
}
