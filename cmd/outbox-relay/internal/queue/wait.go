package queue

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// lookMax bounds how many rows one Look queries.
const lookMax = 1000

// Wait follows rows that were handed back until none of them, and none of the rows behind them,
// remain. It is for one goroutine.
type Wait[P comparable] struct {
	pending []Done[P]
	began   time.Time
	report  Report
}

// Report is the progress of the rows that were handed back.
type Report struct {
	Finished  int `json:"-"`         // including all rows that were behind them
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

// Add adds rows to follow.
func (w *Wait[P]) Add(done []Done[P]) {
	if w.began.IsZero() && len(done) > 0 {
		w.began = done[0].at
	}
	w.pending = append(w.pending, done...)
}

// Look reads the progress of the rows that w follows.
func (t *Table[P, R, F]) Look(ctx context.Context, db operator.Querier, w *Wait[P]) (Report, error) {
	if w.report.Failed == nil {
		w.report.Failed = []Failure{}
	}
	page := w.pending[:min(len(w.pending), lookMax)]
	gone, left, err := t.outcomes(ctx, db, w, page)
	if err != nil {
		return Report{}, fmt.Errorf("read the progress of %s that were handed back: %w", t.name, err)
	}
	discarded, err := t.discarded(ctx, db, gone, w.began)
	if err != nil {
		return Report{}, fmt.Errorf("read the progress of %s that were handed back: %w", t.name, err)
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
func (t *Table[P, R, F]) outcomes(ctx context.Context, db operator.Querier, w *Wait[P], page []Done[P]) (gone []P, left []Done[P], err error) {
	if len(page) == 0 {
		return nil, nil, nil
	}
	all := make(map[P]Done[P], len(page))
	places, lasts, rows := make([]P, len(page)), make([]int64, len(page)), make([]locked[P], len(page))
	for i, d := range page {
		all[d.row.place], places[i], lasts[i], rows[i] = d, d.row.place, d.last, d.row
	}
	found, err := db.Query(ctx, t.inSchema(t.sql.outcomes), slices.Concat(t.places(places), []any{lasts}, t.queues(rows))...)
	if err != nil {
		return nil, nil, err
	}
	var place P
	var id *[16]byte
	var state, reason, text *string
	_, err = pgx.ForEachRow(found, append(t.into(&place), &id, &state, &reason, &text), func() error {
		switch {
		case id == nil:
			gone = append(gone, place)
		case *state == t.held:
			w.report.Failed = append(w.report.Failed, Failure{*id, *reason, *text})
		default:
			left = append(left, all[place])
		}
		return nil
	})
	return gone, left, err
}

// discarded counts the rows that an operator discarded.
func (t *Table[P, R, F]) discarded(ctx context.Context, db operator.Querier, gone []P, since time.Time) (int, error) {
	if len(gone) == 0 {
		return 0, nil
	}
	rows, err := db.Query(ctx, t.inSchema(t.sql.discarded), append(t.places(gone), since)...)
	if err != nil {
		return 0, err
	}
	n := 0
	for rows.Next() {
		n++
	}
	return n, rows.Err()
}
