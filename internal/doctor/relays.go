package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/relays"
)

// quietMax is how long a relay may be stopped before the doctor takes its name for an old one.
const quietMax = time.Hour

// Relays names those that nobody runs any more: what they have not published is never truncated.
func Relays(ctx context.Context, db Querier, schema string) []Finding {
	const check = "relays"
	all, err := relays.List(ctx, db, schema)
	if err != nil {
		return broken(check, err)
	}
	var found []Finding
	for _, r := range all {
		if quiet := age(r.QuietSeconds); !r.Live() && quiet > quietMax {
			found = append(found, warn(check,
				fmt.Sprintf(`outbox-relay run --relay %s   # if it never comes back, see docs/operations.md, "Size"`, shellWord(r.Relay)),
				"no replica has worked as relay %q for %v: the outbox keeps every row that it has not published, for ever", r.Relay, quiet))
		}
	}
	if len(found) == 0 {
		found = append(found, ok(check, "%d are known, none is by an old name", len(all)))
	}
	return found
}

// shellWord quotes a name for a shell.
func shellWord(name string) string { return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'" }

// slotSlack is how long a relay may take for turning and truncating, beyond what it wants to keep.
const slotSlack = 10 * time.Minute

// Slots checks that published rows leave: each slot of the outbox is truncated about keep (the relay's --keep) after
// it was turned away from, which is half of that after its first row.
func Slots(ctx context.Context, db Querier, schema string, keep time.Duration) []Finding {
	const check = "slots"
	rows, err := db.Query(ctx, inSchema(slotsSQL, schema))
	if err != nil {
		return broken(check, err)
	}
	limit := 2*keep + slotSlack
	why := "SELECT relay, shard, tick, lease_until, updated_at FROM " + pgx.Identifier{schema, "outbox_progress_now"}.Sanitize() +
		" ORDER BY updated_at; -- who has not published its rows; see \"relays\", \"transactions\" and \"rights\", and the log for \"could not be removed\""
	var found []Finding
	var slot int16
	var current bool
	var bytes int64
	var first float64
	_, err = pgx.ForEachRow(rows, []any{&slot, &current, &bytes, &first}, func() error {
		switch kept := age(first); {
		case kept <= limit:
		case current:
			found = append(found, warn(check, why, "the outbox does not turn away from slot %d (%d MiB): its first row is %v old, and rows are kept for about %v", slot, bytes>>20, kept, keep))
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
		found = append(found, ok(check, "they take turns"))
	}
	return found
}
