package held

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// waitEvery is the interval at which a wait polls.
const waitEvery = 250 * time.Millisecond

// Report is what was done.
type Report struct {
	What      string      `json:"what"`
	DryRun    bool        `json:"dry_run"`
	Matched   int         `json:"matched"`
	Tried     int         `json:"-"` // of the matched ones; after an error it is less
	Done      int         `json:"done"`
	Released  int64       `json:"released"`   // keys that continue after a discard
	Retrying  []uuid.UUID `json:"retrying"`   // handed back before; a discard leaves them alone
	NoPayload []uuid.UUID `json:"no_payload"` // left alone: too large to be stored, so it cannot be retried
	Behind    []uuid.UUID `json:"behind"`     // left alone: now behind another row
	Waited    *Progress   `json:"waited"`     // null: it was not waited for
}

// NewReport is the report of a decision on that many rows, before it is carried out.
func (k Kind) NewReport(o Decision, matched int) *Report {
	return &Report{What: o.what(k), Matched: matched, Retrying: []uuid.UUID{}, NoPayload: []uuid.UUID{}, Behind: []uuid.UUID{}}
}

// Choose returns the rows to act on, the oldest first. If the filter selects a row behind another
// one, and not that one, the error names it.
func (k Kind) Choose(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) (refs []Ref, err error) {
	if !filter.Behind {
		return k.Targets(ctx, db, schema, filter, limit)
	}
	rows, err := k.List(ctx, db, schema, filter, limit)
	if err != nil {
		return nil, err
	}
	heads := map[uuid.UUID]bool{}
	for _, r := range slices.Backward(rows) {
		if r.Head == nil {
			refs, heads[r.ID] = append(refs, r.Ref), true
		} else if !heads[*r.Head] {
			return nil, fmt.Errorf("%s %s (%s) waits behind %s: only the first of a key can be retried or discarded, and the others follow it", k.Words().Row, r.ID, r.At(), r.Head)
		}
	}
	return refs, nil
}

// Run carries out a decision in small transactions, at its rate, and then follows the rows that it
// handed back until none is pending, for at most WaitMax. It adds to the report, also before an
// error: earlier transactions are committed. step is called with the progress, for people.
func (k Kind) Run(ctx context.Context, conn *pgx.Conn, schema string, o Decision, refs []Ref, report *Report, step func(format string, args ...any)) error {
	chunk, pace := ChunkMax, time.NewTicker(time.Hour)
	defer pace.Stop()
	if o.Rate > 0 {
		chunk = max(1, min(chunk, o.Rate/10))
		pace.Reset(time.Duration(chunk) * time.Second / time.Duration(o.Rate))
	}
	var wait Wait
	for now := range slices.Chunk(refs, chunk) {
		if o.Rate > 0 && report.Tried > 0 {
			select {
			case <-pace.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		result, err := k.Act(ctx, conn, schema, o, now)
		if err != nil {
			return err
		}
		report.Tried += len(now)
		report.Done, report.Released = report.Done+len(result.Done), report.Released+result.Released
		report.NoPayload, report.Behind = append(report.NoPayload, result.NoPayload...), append(report.Behind, result.Behind...)
		for _, d := range result.Retrying {
			report.Retrying = append(report.Retrying, d.ID)
		}
		if o.WaitMax > 0 {
			wait.Add(slices.Concat(result.Done, result.Retrying))
		}
		step("%d of %s %s", report.Tried, human.Count(len(refs), k.Words().Row), o.Verb())
	}
	if o.WaitMax == 0 {
		return nil
	}
	return k.await(ctx, conn, schema, o.WaitMax, &wait, report, step)
}

func (k Kind) await(ctx context.Context, conn *pgx.Conn, schema string, waitMax time.Duration, wait *Wait, report *Report, step func(format string, args ...any)) error {
	limit := time.NewTimer(waitMax)
	defer limit.Stop()
	every := time.NewTicker(waitEvery)
	defer every.Stop()
	for {
		now, err := k.Look(ctx, conn, schema, wait)
		if err != nil {
			return err
		}
		report.Waited = &now
		if now.Pending == 0 {
			return nil
		}
		step("%d %s, %d %s again, %d to go", now.Finished, k.Words().Finished, len(now.Failed), k.Words().Failed, now.Pending)
		select {
		case <-every.C:
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

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
	pending  []Row
	began    time.Time
	progress Progress
}

// Add adds rows to follow.
func (w *Wait) Add(acted []Row) {
	if w.began.IsZero() && len(acted) > 0 {
		w.began = acted[0].acted
	}
	w.pending = append(w.pending, acted...)
}

// Look reads the progress of the rows that w follows.
func (k Kind) Look(ctx context.Context, db operator.Querier, schema string, w *Wait) (Progress, error) {
	now, left := w.progress, []Row{}
	now.Failed = append([]Failure{}, now.Failed...)
	for page := range slices.Chunk(w.pending, lookMax) {
		seqs, lasts, all := make([]int64, len(page)), make([]int64, len(page)), map[Ref]Row{}
		for i, r := range page {
			seqs[i], lasts[i], all[r.Ref] = r.Seq, r.last, r
		}
		found, err := read[struct {
			Ref
			ID                   *uuid.UUID
			State, Reason, Error *string
			Discarded            bool
		}](ctx, db, k, schema, k.sql().progress, append(queueArgs(page), seqs, lasts, string(k)+".discard", w.began)...)
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
