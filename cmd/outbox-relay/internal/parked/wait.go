package parked

import (
	"context"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Wait follows messages that were handed back until the consumers are done with them and with the
// messages behind them. It is for one goroutine.
type Wait struct {
	operator.Wait[int64, *lockedRow]
}

// Report is the consumers' progress, in messages that were handed back.
type Report struct {
	Succeeded int `json:"succeeded"` // including all messages that were behind them
	Discarded int `json:"discarded"` // discarded by an operator since then
	Pending   int `json:"pending"`
	// Parked again: messages that were handed back, or were behind them
	Failed []operator.Failure `json:"failed"`
}

// Look reads the progress once.
func (w *Wait) Look(ctx context.Context, db operator.Querier, schema string) (Report, error) {
	r, err := w.Wait.Look(ctx, db, table(schema))
	return Report{r.Finished, r.Discarded, r.Pending, r.Failed}, err
}
