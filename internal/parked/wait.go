package parked

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// lookMax bounds how many messages one look asks for.
const lookMax = 1000

// Wait follows messages that were handed back until the consumers are done with them and with what was
// behind them. It is for one goroutine.
type Wait struct {
	pending []Done
	began   time.Time
	report  Report
}

// Report is how far the consumers are, in messages that were handed back.
type Report struct {
	Succeeded int       `json:"succeeded"` // with everything that was behind them
	Discarded int       `json:"discarded"` // somebody gave them up meanwhile
	Pending   int       `json:"pending"`
	Failed    []Failure `json:"failed"`
}

// Failure is a message that is parked again: one that was handed back, or one that was behind it.
type Failure struct {
	ID     uuid.UUID `json:"id"`
	Reason string    `json:"reason"`
	Error  string    `json:"error"`
}

// Add gives a Wait more to follow.
func (w *Wait) Add(done []Done) {
	if w.began.IsZero() && len(done) > 0 {
		w.began = done[0].at
	}
	w.pending = append(w.pending, done...)
}

// Look asks once.
func (w *Wait) Look(ctx context.Context, db Querier, schema string) (Report, error) {
	if w.report.Failed == nil {
		w.report.Failed = []Failure{}
	}
	page := w.pending[:min(len(w.pending), lookMax)]
	gone, left, err := w.outcomes(ctx, db, schema, page)
	if err != nil {
		return Report{}, fmt.Errorf("look after messages that were handed back: %w", err)
	}
	discarded, err := w.discarded(ctx, db, schema, gone)
	if err != nil {
		return Report{}, fmt.Errorf("look after messages that were handed back: %w", err)
	}
	w.report.Discarded += len(discarded)
	w.report.Succeeded += len(gone) - len(discarded)
	// Those asked about go to the end, so that slow ones do not hide the others.
	w.pending = append(slices.Clone(w.pending[len(page):]), left...)
	w.report.Pending = len(w.pending)
	return w.report, nil
}

// outcomes sorts messages into those of which nothing is left and those that the consumers still have to do.
// Those that failed it notes.
func (w *Wait) outcomes(ctx context.Context, db Querier, schema string, page []Done) (gone []int64, left []Done, err error) {
	if len(page) == 0 {
		return nil, nil, nil
	}
	all := make(map[int64]Done, len(page))
	seqs, lasts, lockedRows := make([]int64, len(page)), make([]int64, len(page)), make([]*lockedRow, len(page))
	for i, d := range page {
		all[d.Seq], seqs[i], lasts[i], lockedRows[i] = d, d.Seq, d.last, d.row
	}
	rows, err := db.Query(ctx, inSchema(outcomesSQL, schema), append([]any{seqs, lasts}, queuesOf(lockedRows)...)...)
	if err != nil {
		return nil, nil, err
	}
	var seq int64
	var first *int64
	var id *[16]byte
	var state, reason, text *string
	_, err = pgx.ForEachRow(rows, []any{&seq, &first, &id, &state, &reason, &text}, func() error {
		switch {
		case first == nil:
			gone = append(gone, seq)
		case *state == "parked":
			w.report.Failed = append(w.report.Failed, Failure{*id, *reason, *text})
		default:
			left = append(left, all[seq])
		}
		return nil
	})
	return gone, left, err
}

func (w *Wait) discarded(ctx context.Context, db Querier, schema string, gone []int64) ([]int64, error) {
	if len(gone) == 0 {
		return nil, nil
	}
	rows, err := db.Query(ctx, inSchema(discardedSQL, schema), gone, w.began)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[int64])
}
