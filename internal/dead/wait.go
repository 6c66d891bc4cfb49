package dead

import (
	"context"

	"github.com/effectonce/effectonce/internal/operator"
)

// Wait follows rows that were handed back until the relay is done with them and with what was behind them.
// It is for one goroutine.
type Wait struct {
	operator.Wait[Place, *lockedRow]
}

// Report is how far the relay is, in rows that were handed back.
type Report struct {
	Published int                `json:"published"` // with everything that was behind them
	Discarded int                `json:"discarded"` // somebody gave them up meanwhile
	Pending   int                `json:"pending"`
	Failed    []operator.Failure `json:"failed"` // held again: those that were handed back, or were behind them
}

// Look asks once.
func (w *Wait) Look(ctx context.Context, db operator.Querier, schema string) (Report, error) {
	r, err := w.Wait.Look(ctx, db, table(schema))
	return Report{r.Finished, r.Discarded, r.Pending, r.Failed}, err
}
