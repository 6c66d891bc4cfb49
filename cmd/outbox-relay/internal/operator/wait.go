package operator

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// lookMax bounds how many rows one Look queries.
const lookMax = 1000

// Wait follows rows that were handed back until none of them, and none of the rows behind them,
// remain. It is for one goroutine.
type Wait[P comparable, R Row[P]] struct {
	pending []Done[P, R]
	began   time.Time
	report  Report
}

// Report is the progress of the rows that were handed back.
type Report struct {
	Finished  int // including all rows that were behind them
	Discarded int // discarded by an operator since then
	Pending   int
	Failed    []Failure
}

// Failure is a row that is held again: one that was handed back, or one behind it.
type Failure struct {
	ID     uuid.UUID `json:"id"`
	Reason string    `json:"reason"`
	Error  string    `json:"error"`
}

// Add adds rows to follow.
func (w *Wait[P, R]) Add(done []Done[P, R]) {
	if w.began.IsZero() && len(done) > 0 {
		w.began = done[0].at
	}
	w.pending = append(w.pending, done...)
}

// Look queries the table once.
func (w *Wait[P, R]) Look(ctx context.Context, db Querier, t *Table[P, R]) (Report, error) {
	if w.report.Failed == nil {
		w.report.Failed = []Failure{}
	}
	page := w.pending[:min(len(w.pending), lookMax)]
	gone, left, err := w.outcomes(ctx, db, t, page)
	if err != nil {
		return Report{}, fmt.Errorf("read the progress of %s that were handed back: %w", t.Name, err)
	}
	discarded, err := w.discarded(ctx, db, t, gone)
	if err != nil {
		return Report{}, fmt.Errorf("read the progress of %s that were handed back: %w", t.Name, err)
	}
	w.report.Discarded += discarded
	w.report.Finished += len(gone) - discarded
	// Rows that were just queried move to the end, so that slow ones do not hide the others.
	w.pending = append(slices.Clone(w.pending[len(page):]), left...)
	w.report.Pending = len(w.pending)
	return w.report, nil
}

// outcomes separates finished rows from those that are still pending, and records the rows that are
// held again.
func (w *Wait[P, R]) outcomes(ctx context.Context, db Querier, t *Table[P, R], page []Done[P, R]) (gone []P, left []Done[P, R], err error) {
	if len(page) == 0 {
		return nil, nil, nil
	}
	all := make(map[P]Done[P, R], len(page))
	places, lasts, locked := make([]P, len(page)), make([]int64, len(page)), make([]R, len(page))
	for i, d := range page {
		all[d.place], places[i], lasts[i], locked[i] = d, d.place, d.last, d.row
	}
	rows, err := db.Query(ctx, t.inSchema(t.SQL.Outcomes), slices.Concat(t.Places(places), []any{lasts}, t.Queues(locked))...)
	if err != nil {
		return nil, nil, err
	}
	var place P
	var id *[16]byte
	var state, reason, text *string
	_, err = pgx.ForEachRow(rows, append(t.Into(&place), &id, &state, &reason, &text), func() error {
		switch {
		case id == nil:
			gone = append(gone, place)
		case *state == t.Held:
			w.report.Failed = append(w.report.Failed, Failure{*id, *reason, *text})
		default:
			left = append(left, all[place])
		}
		return nil
	})
	return gone, left, err
}

func (w *Wait[P, R]) discarded(ctx context.Context, db Querier, t *Table[P, R], gone []P) (int, error) {
	if len(gone) == 0 {
		return 0, nil
	}
	rows, err := db.Query(ctx, t.inSchema(t.SQL.Discarded), append(t.Places(gone), w.began)...)
	if err != nil {
		return 0, err
	}
	n := 0
	for rows.Next() {
		n++
	}
	return n, rows.Err()
}
