package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/dead"
	"github.com/effectonce/effectonce/internal/operator"
)

// deadReport is what retry and discard print.
type deadReport struct {
	What     string       `json:"what"`
	DryRun   bool         `json:"dry_run"`
	Matched  int          `json:"matched"`
	Done     int          `json:"done"`
	Released int64        `json:"released"` // keys that go on after a discard
	Retrying []uuid.UUID  `json:"retrying"` // left alone: handed back before
	Behind   []uuid.UUID  `json:"behind"`   // left alone: behind another row meanwhile
	Waited   *dead.Report `json:"waited"`
}

func (a *deadAct) newReport(matched int) *deadReport {
	report := &deadReport{What: "dead.retry", Matched: matched, Retrying: []uuid.UUID{}, Behind: []uuid.UUID{}}
	if a.discard {
		report.What = "dead.discard"
	}
	return report
}

// well tells whether everything was done. What was handed back before is on its way, unless it was to be discarded.
func (a *deadAct) well(r *deadReport) bool {
	return len(r.Behind) == 0 && (!a.discard || len(r.Retrying) == 0) && (r.Waited == nil || len(r.Waited.Failed) == 0 && r.Waited.Pending == 0)
}

func (a *deadAct) verb() string {
	if a.discard {
		return "discarded"
	}
	return "retried"
}

// work goes through the rows, a transaction for each few of them.
func (a *deadAct) work(ctx context.Context, conn *pgx.Conn, schema string, places []dead.Place, report *deadReport, screen *screen) error {
	chunk, pace := operator.ChunkMax, time.NewTicker(time.Hour)
	defer pace.Stop()
	if a.rate > 0 {
		chunk = max(1, min(chunk, a.rate/10))
		pace.Reset(time.Duration(chunk) * time.Second / time.Duration(a.rate))
	}
	wait := &dead.Wait{}
	for done := 0; done < len(places); done += chunk {
		if a.rate > 0 && done > 0 {
			select {
			case <-pace.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		result, err := a.step(ctx, conn, schema, places[done:min(done+chunk, len(places))])
		if err != nil {
			return err
		}
		report.Done += len(result.Done)
		report.Released += result.Released
		report.Retrying, report.Behind = append(report.Retrying, result.Retrying...), append(report.Behind, result.Behind...)
		wait.Add(result.Done)
		screen.step("%d of %d rows %s", min(done+chunk, len(places)), len(places), a.verb())
	}
	if a.wait {
		return a.await(ctx, conn, schema, wait, report, screen)
	}
	return nil
}

func (a *deadAct) step(ctx context.Context, conn *pgx.Conn, schema string, places []dead.Place) (*dead.Result, error) {
	if a.discard {
		return dead.Discard(ctx, conn, schema, a.by, places, a.wholeKeys)
	}
	return dead.Retry(ctx, conn, schema, a.by, places)
}

// await looks until nothing is pending, or for as long as --wait-max.
func (a *deadAct) await(ctx context.Context, conn *pgx.Conn, schema string, wait *dead.Wait, report *deadReport, screen *screen) error {
	limit := time.NewTimer(a.waitMax)
	defer limit.Stop()
	look := time.NewTicker(waitEvery)
	defer look.Stop()
	for {
		now, err := wait.Look(ctx, conn, schema)
		if err != nil {
			return err
		}
		report.Waited = &now
		if now.Pending == 0 {
			return nil
		}
		screen.step("%d published, %d held again, %d to go", now.Published, len(now.Failed), now.Pending)
		select {
		case <-look.C:
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// print says what was done, and returns errNotWell if not everything was.
func (a *deadAct) print(out io.Writer, report *deadReport) error {
	var err error
	if a.json {
		err = printJSON(out, report)
	} else {
		_, err = io.WriteString(out, a.text(report))
	}
	if err == nil && !a.well(report) {
		return errNotWell
	}
	return err
}

func (a *deadAct) text(r *deadReport) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d rows %s", r.Done, a.verb())
	if r.Released > 0 {
		fmt.Fprintf(&text, "; %d keys go on", r.Released)
	}
	if len(r.Retrying) > 0 && !a.discard {
		fmt.Fprintf(&text, "; %d were handed back before", len(r.Retrying))
	}
	if gone := r.Matched - r.Done - len(r.Retrying) - len(r.Behind); gone > 0 {
		fmt.Fprintf(&text, "; %d were gone meanwhile", gone)
	}
	text.WriteString("\n")
	if a.discard {
		for _, id := range r.Retrying {
			fmt.Fprintf(&text, "not discarded: %s: it was handed back, and the relay may be publishing it\n", id)
		}
	}
	for _, id := range r.Behind {
		fmt.Fprintf(&text, "not %s: %s: it waits behind another row, or the relay may be publishing it\n", a.verb(), id)
	}
	if w := r.Waited; w != nil {
		fmt.Fprintf(&text, "%d published, %d held again\n", w.Published, len(w.Failed))
		for _, f := range w.Failed {
			fmt.Fprintf(&text, "held: %s: %s: %s\n", f.ID, f.Reason, clip(f.Error, 200))
		}
		if w.Discarded > 0 {
			fmt.Fprintf(&text, "%d were discarded meanwhile\n", w.Discarded)
		}
		if w.Pending > 0 {
			fmt.Fprintf(&text, "not done within %v: %d; does a relay run? \"outbox-relay status\" shows it\n", a.waitMax, w.Pending)
		}
	}
	return text.String()
}
