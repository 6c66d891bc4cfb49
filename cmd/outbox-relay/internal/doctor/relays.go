package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
)

// quietMax is how long a relay may be stopped before the doctor reports its name as disused.
const quietMax = time.Hour

// Relays finds relays of which no replica runs while rows wait for longer than ageMax, and names
// that are disused: rows that such a relay has not published are never truncated.
func Relays(ctx context.Context, db operator.Querier, schema string, ageMax time.Duration) []Finding {
	const check = "relays"
	all, err := relays.List(ctx, db, schema)
	if err != nil {
		return broken(check, err)
	}
	var found []Finding
	if len(all) == 0 {
		return neverRan(ctx, db, schema)
	}
	system := SystemIdentifier(ctx, db)
	for _, r := range all {
		if !r.Live() {
			waiting, err := ReadBacklog(ctx, db, schema, r.Relay, system, CountMax)
			if err != nil {
				return broken(check, err)
			}
			if waiting.Waiting > 0 && waiting.OldestSeconds > ageMax.Seconds() {
				found = append(found, fail(check, "outbox-relay run --relay "+shellWord(r.Relay),
					"no replica of relay %q runs; %s, the oldest for %s", r.Relay, waitingText(waiting), human.Seconds(waiting.OldestSeconds)))
			}
		}
		if quiet := age(r.QuietSeconds); !r.Live() && quiet > quietMax {
			found = append(found, warn(check,
				fmt.Sprintf(`outbox-relay run --relay %s   # if it never comes back, see docs/runbook.md, "Size"`, shellWord(r.Relay)),
				"no replica of relay %q has run for %v: the outbox keeps every row that it has not published, indefinitely", r.Relay, quiet))
		}
	}
	if len(found) == 0 {
		found = append(found, ok(check, "%s known, no disused name", human.Count(len(all), "relay")))
	}
	return found
}

// neverRan checks an outbox that no relay has read yet.
func neverRan(ctx context.Context, db operator.Querier, schema string) []Finding {
	const check = "relays"
	waiting, err := ReadBacklog(ctx, db, schema, "default", nil, CountMax)
	switch {
	case err != nil:
		return broken(check, err)
	case waiting.Waiting > 0:
		return []Finding{warn(check, "outbox-relay run", "no relay has run yet; %s", waitingText(waiting))}
	}
	return []Finding{ok(check, "none has run yet, and no rows wait")}
}

func waitingText(b Backlog) string {
	about := ""
	if !b.Exact {
		about = "about "
	}
	return "waiting: " + about + human.Count(b.Waiting, "row")
}

// shellWord quotes a name for a shell.
func shellWord(name string) string { return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'" }

// slotSlack is how long a relay may take to switch slots and truncate, in addition to the time for
// which it keeps rows.
const slotSlack = 10 * time.Minute

// Slots checks that published rows leave the outbox. A slot is truncated about keep (the relay's
// --keep) after writers left it for the next slot, which happens half of keep after its first row.
func Slots(ctx context.Context, db operator.Querier, schema string, keep time.Duration) []Finding {
	const check = "slots"
	rows, err := db.Query(ctx, inSchema(slotsSQL, schema))
	if err != nil {
		return broken(check, err)
	}
	limit := 2*keep + slotSlack
	why := "SELECT relay, shard, tick, lease_until, updated_at FROM " + pgx.Identifier{schema, "outbox_progress_now"}.Sanitize() +
		" ORDER BY updated_at; -- shows which relay has not published its rows; see also \"relays\", \"transactions\" and \"rights\", and search the log for \"could not be removed\""
	var found []Finding
	var slot int16
	var current bool
	var bytes int64
	var first float64
	_, err = pgx.ForEachRow(rows, []any{&slot, &current, &bytes, &first}, func() error {
		switch kept := age(first); {
		case kept <= limit:
		case current:
			found = append(found, warn(check, why, "the outbox does not switch away from slot %d (%d MiB): its first row is %v old, and rows are kept for about %v", slot, bytes>>20, kept, keep))
		default:
			found = append(found, warn(check, why, "slot %d of the outbox (%d MiB) is not truncated: its first row is %v old, and rows are kept for about %v", slot, bytes>>20, kept, keep))
		}
		return nil
	})
	if err != nil {
		return broken(check, err)
	}
	holders, err := readSlotHolders(ctx, db, schema, keep)
	if err != nil {
		return broken(check, err)
	}
	for _, h := range holders {
		found = append(found, warn(check, h.remedy(), "%s", h.text()))
	}
	if len(found) == 0 {
		found = append(found, ok(check, "slots are switched and truncated in time"))
	}
	return found
}
