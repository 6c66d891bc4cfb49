package held

import (
	"context"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// lookMax bounds how many rows one statement of Look queries.
const lookMax = 1000

// Progress is that of rows that were handed back.
type Progress struct {
	Finished  int `json:"finished"`  // including all rows that were behind them
	Discarded int `json:"discarded"` // discarded by an operator since then
	Pending   int `json:"pending"`
	// Held again: rows that were handed back, or were behind them
	Failed []Failure `json:"failed"`
}

// Failure is a row that is held again: one that was handed back, or one behind it.
type Failure struct {
	ID     uuid.UUID `json:"id"`
	Reason string    `json:"reason"`
	Error  string    `json:"error"`
}

// Wait follows rows that were handed back until none of them, and none of the rows behind them,
// remain. It is for one goroutine.
type Wait struct {
	pending  []Done
	began    time.Time
	progress Progress
}

// Add adds rows to follow.
func (w *Wait) Add(done []Done) {
	if w.began.IsZero() && len(done) > 0 {
		w.began = done[0].at
	}
	w.pending = append(w.pending, done...)
}

// Look reads the progress of the rows that w follows.
func (k Kind) Look(ctx context.Context, db operator.Querier, schema string, w *Wait) (Progress, error) {
	now, left := w.progress, []Done{}
	now.Failed = append([]Failure{}, now.Failed...)
	for page := range slices.Chunk(w.pending, lookMax) {
		rows, seqs, lasts, all := make([]Row, len(page)), make([]int64, len(page)), make([]int64, len(page)), map[Ref]Done{}
		for i, d := range page {
			rows[i], seqs[i], lasts[i], all[d.Ref] = d.Row, d.Seq, d.last, d
		}
		found, err := read[struct {
			Ref
			ID                   *uuid.UUID
			State, Reason, Error *string
			Discarded            bool
		}](ctx, db, k, schema, k.sql().progress, append(queueArgs(rows), seqs, lasts, string(k)+".discard", w.began)...)
		if err != nil {
			return Progress{}, err
		}
		for _, o := range found {
			switch {
			case o.Discarded:
				now.Discarded++
			case o.ID == nil:
				now.Finished++
			case *o.State == k.States()[0]:
				now.Failed = append(now.Failed, Failure{*o.ID, *o.Reason, *o.Error})
			default:
				left = append(left, all[o.Ref])
			}
		}
	}
	now.Pending = len(left)
	w.pending, w.progress = left, now
	return now, nil
}
