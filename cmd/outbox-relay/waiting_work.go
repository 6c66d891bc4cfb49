package main

import (
	"context"
	"io"
	"os"
	"os/user"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// waitEvery is the interval at which --wait polls.
const waitEvery = 250 * time.Millisecond

// whoami is the user and the host, for the record of actions.
func whoami() string {
	name, host := "unknown", "unknown"
	if u, err := user.Current(); err == nil && u.Username != "" {
		name = u.Username
	}
	if h, err := os.Hostname(); err == nil && h != "" {
		host = h
	}
	who := strings.ReplaceAll(strings.ToValidUTF8(name+"@"+host, "?"), "\x00", "?")
	return strings.ToValidUTF8(who[:min(len(who), 255)], "")
}

// work carries out an order.
type work[P, R any] struct {
	waiting[P, R]
	*order
	screen  *terminal.Screen
	matched int
	tried   int // of the matched ones; after an error it is less
	sum     outcome
	waited  *queue.Report
}

// outcome is the result of an order.
type outcome struct {
	done     int
	released int64  // keys that continue after a discard
	before   int    // rows that were handed back before, which is fine
	left     []left // rows left alone
}

// left is a row that was left alone.
type left struct {
	id  uuid.UUID
	why string
}

func (o *outcome) leave(why string, ids ...uuid.UUID) {
	for _, id := range ids {
		o.left = append(o.left, left{id, why})
	}
}

// actReport is what every retry and discard prints with --json.
type actReport struct {
	What     string `json:"what"`
	DryRun   bool   `json:"dry_run"`
	Matched  int    `json:"matched"`
	Done     int    `json:"done"`
	Released int64  `json:"released"` // keys that continue after a discard
}

func (w *work[P, R]) json() any {
	what := w.words().command + ".retry"
	if w.discard {
		what = w.words().command + ".discard"
	}
	return w.report(actReport{What: what, DryRun: w.dryRun, Matched: w.matched, Done: w.sum.done, Released: w.sum.released})
}

// preview shows what would be done.
func (w *work[P, R]) preview(ctx context.Context, conn *pgx.Conn, places []P, out io.Writer) error {
	if w.order.json {
		return terminal.PrintJSON(out, w.json())
	}
	rows, err := w.these(ctx, conn, places, parkedListMax)
	if err != nil {
		return err
	}
	if err := w.waiting.print(out, rows); err != nil {
		return err
	}
	err = terminal.Say(out, "%s would be %s; nothing was done (--dry-run)\n", w.what(len(places)), w.verb())
	return err
}

// do processes the rows in small transactions.
func (w *work[P, R]) do(ctx context.Context, conn *pgx.Conn, places []P) error {
	chunk, pace := queue.ChunkMax, time.NewTicker(time.Hour)
	defer pace.Stop()
	if w.rate > 0 {
		chunk = max(1, min(chunk, w.rate/10))
		pace.Reset(time.Duration(chunk) * time.Second / time.Duration(w.rate))
	}
	for done := 0; done < len(places); done += chunk {
		if w.rate > 0 && done > 0 {
			select {
			case <-pace.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		upTo := min(done+chunk, len(places))
		now, err := w.act(ctx, conn, w.order, places[done:upTo])
		if err != nil {
			return err
		}
		w.tried = upTo
		w.sum.done, w.sum.released, w.sum.before = w.sum.done+now.done, w.sum.released+now.released, w.sum.before+now.before
		w.sum.left = append(w.sum.left, now.left...)
		w.screen.Step("%d of %s %s", upTo, human.Count(len(places), w.words().row), w.verb())
	}
	if w.wait {
		return w.await(ctx, conn)
	}
	return nil
}

// await polls until nothing is pending, for at most --wait-max.
func (w *work[P, R]) await(ctx context.Context, conn *pgx.Conn) error {
	limit := time.NewTimer(w.waitMax)
	defer limit.Stop()
	every := time.NewTicker(waitEvery)
	defer every.Stop()
	for {
		now, err := w.look(ctx, conn)
		if err != nil {
			return err
		}
		w.waited = &now
		if now.Pending == 0 {
			return nil
		}
		w.screen.Step("%d %s, %d %s again, %d to go", now.Finished, w.words().finished, len(now.Failed), w.words().failed, now.Pending)
		select {
		case <-every.C:
		case <-limit.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// print says what was done, and returns errUnhealthy if not everything was.
func (w *work[P, R]) print(out io.Writer) error {
	var err error
	if w.order.json {
		err = terminal.PrintJSON(out, w.json())
	} else {
		_, err = io.WriteString(out, w.text())
	}
	well := len(w.sum.left) == 0 && (w.waited == nil || len(w.waited.Failed) == 0 && w.waited.Pending == 0)
	if err == nil && !well {
		return errUnhealthy
	}
	return err
}

func (w *work[P, R]) text() string {
	var text strings.Builder
	sum, words := w.sum, w.words()
	terminal.Add(&text, "%s %s", human.Count(sum.done, words.row), w.verb())
	if sum.released > 0 {
		terminal.Add(&text, "; %s released", human.Count(sum.released, "key"))
	}
	if sum.before > 0 {
		terminal.Add(&text, "; %d were handed back before", sum.before)
	}
	if gone := w.tried - sum.done - sum.before - len(sum.left); gone > 0 {
		terminal.Add(&text, "; %d already gone", gone)
	}
	if undone := w.matched - w.tried; undone > 0 {
		terminal.Add(&text, "; %d not done", undone)
	}
	text.WriteString("\n")
	for _, l := range sum.left {
		terminal.Add(&text, "not %s: %s: %s\n", w.verb(), l.id, l.why)
	}
	if r := w.waited; r != nil {
		terminal.Add(&text, "%d %s, %d %s again\n", r.Finished, words.finished, len(r.Failed), words.failed)
		for _, f := range r.Failed {
			terminal.Add(&text, "%s: %s: %s: %s\n", words.failed, f.ID, f.Reason, terminal.Clip(f.Error, 200))
		}
		if r.Discarded > 0 {
			terminal.Add(&text, "%d were discarded while waiting\n", r.Discarded)
		}
		if r.Pending > 0 {
			terminal.Add(&text, "not done within %s: %d; %s \"outbox-relay status\" shows it\n", human.Duration(w.waitMax), r.Pending, words.unfinished)
		}
	}
	return text.String()
}
