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

// slotHeldMin is the minimum age of a transaction that is reported: those of writers and readers
// are shorter.
const slotHeldMin = time.Minute

// readSlotHolders finds locks that block the truncation of slots that are not being filled. If the
// role may not see how old a transaction is, only an overdue slot counts: rows are kept for keep.
func readSlotHolders(ctx context.Context, db operator.Querier, schema string, keep time.Duration) ([]SlotHolder, error) {
	rows, err := db.Query(ctx, inSchema(slotHoldersSQL, schema), keep+slotSlack, slotHeldMin)
	if err != nil {
		return nil, fmt.Errorf("read locks on the slots of the outbox: %w", err)
	}
	holders, err := pgx.CollectRows(rows, pgx.RowToStructByPos[SlotHolder])
	if err != nil {
		return nil, fmt.Errorf("read locks on the slots of the outbox: %w", err)
	}
	return holders, nil
}

func (h *SlotHolder) text() string {
	held := "for an unknown time"
	if h.HeldSeconds != nil {
		held = "for " + age(*h.HeldSeconds).String()
	}
	return fmt.Sprintf("%s holds a lock on slots %v of the outbox (%d MiB) %s: published rows there cannot be removed before its transaction ends; nothing else waits",
		oneLine(h.Who), h.Slots, h.Bytes>>20, held)
}

// remedy only shows the transaction: a pg_dump should not be cancelled without thought.
func (h *SlotHolder) remedy() string {
	if h.PID == nil {
		return "SELECT * FROM pg_prepared_xacts ORDER BY prepared; -- its coordinator knows how it has to end: docs/runbook.md, \"Long transactions\""
	}
	return fmt.Sprintf("SELECT pid, usename, application_name, state, xact_start, query FROM pg_stat_activity WHERE pid = %d; -- wait until it ends (such as a pg_dump); "+
		"the outbox then shrinks automatically", *h.PID)
}

// readSlotHolders adds a note for each holder of a lock that keeps published rows.
func (s *Status) readSlotHolders(ctx context.Context, db operator.Querier, schema string) (err error) {
	if s.SlotHolders, err = readSlotHolders(ctx, db, schema, slotSlack); err != nil {
		return err
	}
	for _, h := range s.SlotHolders {
		s.Notes = append(s.Notes, h.text())
	}
	return nil
}
