package dead

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/parked"
)

// lookMax bounds how many rows one look asks for.
const lookMax = 1000

// Wait follows rows that were handed back until the relay is done with them and with what was behind them.
// It is for one goroutine.
type Wait struct {
	pending []Done
	began   time.Time
	report  Report
}

// Report is how far the relay is, in rows that were handed back.
type Report struct {
	Published int              `json:"published"` // with everything that was behind them
	Discarded int              `json:"discarded"` // somebody gave them up meanwhile
	Pending   int              `json:"pending"`
	Failed    []parked.Failure `json:"failed"` // held again: those that were handed back, or were behind them
}

// Add gives a Wait more to follow.
func (w *Wait) Add(done []Done) {
	if w.began.IsZero() && len(done) > 0 {
		w.began = done[0].at
	}
	w.pending = append(w.pending, done...)
}

// Look asks once.
func (w *Wait) Look(ctx context.Context, db parked.Querier, schema string) (Report, error) {
	if w.report.Failed == nil {
		w.report.Failed = []parked.Failure{}
	}
	page := w.pending[:min(len(w.pending), lookMax)]
	gone, left, err := w.outcomes(ctx, db, schema, page)
	if err != nil {
		return Report{}, fmt.Errorf("look after rows that were handed back: %w", err)
	}
	discarded, err := w.discarded(ctx, db, schema, gone)
	if err != nil {
		return Report{}, fmt.Errorf("look after rows that were handed back: %w", err)
	}
	w.report.Discarded += discarded
	w.report.Published += len(gone) - discarded
	// Those asked about go to the end, so that slow ones do not hide the others.
	w.pending = append(slices.Clone(w.pending[len(page):]), left...)
	w.report.Pending = len(w.pending)
	return w.report, nil
}

// outcomes sorts rows into those of which nothing is left and those that the relay still has to do. Those
// that are held again it notes.
func (w *Wait) outcomes(ctx context.Context, db parked.Querier, schema string, page []Done) (gone []Place, left []Done, err error) {
	if len(page) == 0 {
		return nil, nil, nil
	}
	all := make(map[Place]Done, len(page))
	relays, seqs, lasts, locked := make([]string, len(page)), make([]int64, len(page)), make([]int64, len(page)), make([]*lockedRow, len(page))
	for i, d := range page {
		all[d.Place], relays[i], seqs[i], lasts[i], locked[i] = d, d.Relay, d.Seq, d.last, d.row
	}
	topics, hashes := queuesOf(locked)
	rows, err := db.Query(ctx, inSchema(outcomesSQL, schema), relays, seqs, lasts, topics, hashes)
	if err != nil {
		return nil, nil, err
	}
	var place Place
	var id *[16]byte
	var state, reason, text *string
	_, err = pgx.ForEachRow(rows, []any{&place.Relay, &place.Seq, &id, &state, &reason, &text}, func() error {
		switch {
		case id == nil:
			gone = append(gone, place)
		case *state == "held":
			w.report.Failed = append(w.report.Failed, parked.Failure{ID: *id, Reason: *reason, Error: *text})
		default:
			left = append(left, all[place])
		}
		return nil
	})
	return gone, left, err
}

func (w *Wait) discarded(ctx context.Context, db parked.Querier, schema string, gone []Place) (int, error) {
	if len(gone) == 0 {
		return 0, nil
	}
	relays, seqs := make([]string, len(gone)), make([]int64, len(gone))
	for i, p := range gone {
		relays[i], seqs[i] = p.Relay, p.Seq
	}
	rows, err := db.Query(ctx, inSchema(discardedSQL, schema), relays, seqs, w.began)
	if err != nil {
		return 0, err
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Place])
	return len(found), err
}
