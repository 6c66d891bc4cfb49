package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/user"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/internal/parked"
)

// waitEvery is how often --wait looks.
const waitEvery = 250 * time.Millisecond

// whoami is the user of the machine, for the record.
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

func (a *parkedAct) verb() string {
	if a.discard {
		return "discarded"
	}
	return "retried"
}

// work goes through the messages, a transaction for each few of them.
func (a *parkedAct) work(ctx context.Context, conn *pgx.Conn, schema string, seqs []int64, report *actReport, screen *screen) error {
	chunk, pace := operator.ChunkMax, time.NewTicker(time.Hour)
	defer pace.Stop()
	if a.rate > 0 {
		chunk = max(1, min(chunk, a.rate/10))
		pace.Reset(time.Duration(chunk) * time.Second / time.Duration(a.rate))
	}
	wait := &parked.Wait{}
	for done := 0; done < len(seqs); done += chunk {
		if a.rate > 0 && done > 0 {
			select {
			case <-pace.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		result, err := a.step(ctx, conn, schema, seqs[done:min(done+chunk, len(seqs))])
		if err != nil {
			return err
		}
		report.add(result)
		wait.Add(result.Done)
		screen.step("%d of %d messages %s", min(done+chunk, len(seqs)), len(seqs), a.verb())
	}
	if a.wait {
		return a.await(ctx, conn, schema, wait, report, screen)
	}
	return nil
}

func (a *parkedAct) step(ctx context.Context, conn *pgx.Conn, schema string, seqs []int64) (*parked.Result, error) {
	if a.discard {
		return parked.Discard(ctx, conn, schema, a.by, seqs, a.wholeKeys)
	}
	return parked.Retry(ctx, conn, schema, a.by, seqs)
}

func (r *actReport) add(result *parked.Result) {
	r.Done += len(result.Done)
	r.Retrying += result.Retrying
	r.Released += result.Released
	r.NoPayload, r.Behind = append(r.NoPayload, ids(result.NoPayload)...), append(r.Behind, ids(result.Behind)...)
}

func ids(refused []parked.Refused) (all []uuid.UUID) {
	for _, r := range refused {
		all = append(all, r.ID)
	}
	return all
}

// await looks until nothing is pending, or for as long as --wait-max.
func (a *parkedAct) await(ctx context.Context, conn *pgx.Conn, schema string, wait *parked.Wait, report *actReport, screen *screen) error {
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
		screen.step("%d handled, %d failed again, %d to go", now.Succeeded, len(now.Failed), now.Pending)
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
func (a *parkedAct) print(out io.Writer, report *actReport) error {
	var err error
	if a.json {
		err = printJSON(out, report)
	} else {
		_, err = io.WriteString(out, a.text(report))
	}
	if err == nil && !report.well() {
		return errNotWell
	}
	return err
}

func (a *parkedAct) text(r *actReport) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d messages %s", r.Done, a.verb())
	if r.Released > 0 {
		fmt.Fprintf(&text, "; %d keys go on", r.Released)
	}
	if r.Retrying > 0 {
		fmt.Fprintf(&text, "; %d were handed back before", r.Retrying)
	}
	if gone := r.Matched - r.Done - r.Retrying - len(r.NoPayload) - len(r.Behind); gone > 0 {
		fmt.Fprintf(&text, "; %d were gone meanwhile", gone)
	}
	text.WriteString("\n")
	for _, id := range r.NoPayload {
		fmt.Fprintf(&text, "not retried: %s: its payload was too large to be stored: \"outbox-relay parked show %s\"\n", id, id)
	}
	for _, id := range r.Behind {
		fmt.Fprintf(&text, "not %s: %s: it waits behind another message meanwhile\n", a.verb(), id)
	}
	if w := r.Waited; w != nil {
		fmt.Fprintf(&text, "%d handled, %d failed again\n", w.Succeeded, len(w.Failed))
		for _, f := range w.Failed {
			fmt.Fprintf(&text, "failed: %s: %s: %s\n", f.ID, f.Reason, clip(f.Error, 200))
		}
		if w.Discarded > 0 {
			fmt.Fprintf(&text, "%d were discarded meanwhile\n", w.Discarded)
		}
		if w.Pending > 0 {
			fmt.Fprintf(&text, "not done within %v: %d; does a consumer hold their partitions? \"outbox-relay status\" shows it\n", a.waitMax, w.Pending)
		}
	}
	return text.String()
}
