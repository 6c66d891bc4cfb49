package dead

import (
	"context"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Wait follows rows that were handed back until the relay is done with them and with the rows
// behind them. It is for one goroutine.
type Wait struct {
	operator.Wait[Place, *lockedRow]
}

// Report is the relay's progress, in rows that were handed back.
type Report struct {
	Published int `json:"published"` // including all rows that were behind them
	Discarded int `json:"discarded"` // discarded by an operator since then
	Pending   int `json:"pending"`
	// Held again: rows that were handed back, or were behind them
	Failed []operator.Failure `json:"failed"`
}

// Look reads the progress once.
func (w *Wait) Look(ctx context.Context, db operator.Querier, schema string) (Report, error) {
	r, err := w.Wait.Look(ctx, db, table(schema))
	return Report{r.Finished, r.Discarded, r.Pending, r.Failed}, err
}
