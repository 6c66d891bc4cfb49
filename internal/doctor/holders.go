package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Limits of what holds others up. A transaction that writes is short in an outbox; xminAgeMax transactions are what
// a busy server starts within hours.
const (
	openMax    = 10 * time.Minute
	xminAgeMax = 10_000_000
)

// OpenTransactions names what has been open for too long: transactions that write keep the relay's floor and
// their slot of the outbox, all of them keep vacuum from removing dead rows.
func OpenTransactions(ctx context.Context, db Querier) []Finding {
	const check = "transactions"
	rows, err := db.Query(ctx, openSQL)
	if err != nil {
		return broken(check, err)
	}
	var found []Finding
	oldest := ""
	var what, remedy string
	var seconds float64
	var writes bool
	_, err = pgx.ForEachRow(rows, []any{&what, &remedy, &seconds, &writes}, func() error {
		open := age(seconds)
		if oldest == "" && writes {
			oldest = fmt.Sprintf("the oldest transaction that writes is open for %v: %s; it does not stall the relay, but rows above its floor are kept", open, what)
		}
		switch {
		case open < openMax:
		case writes:
			found = append(found, warn(check, remedy, "%s has written and is open for %v: its rows are not published before it commits, its slot of the outbox is not truncated, and vacuum removes nothing that died since", what, open))
		default:
			found = append(found, warn(check, remedy, "%s holds a snapshot for %v: vacuum removes nothing that died since", what, open))
		}
		return nil
	})
	switch {
	case err != nil:
		return broken(check, err)
	case len(found) > 0:
		return found
	case oldest != "":
		return []Finding{ok(check, "%s", oldest)}
	}
	return []Finding{ok(check, "no transaction that writes is open (as far as this role may see)")}
}

// ReplicationSlots names those that nobody reads, or whose reader is far behind: they keep dead rows and, for ever,
// WAL.
func ReplicationSlots(ctx context.Context, db Querier) []Finding {
	const check = "replication"
	rows, err := db.Query(ctx, holdersSQL)
	if err != nil {
		return broken(check, err)
	}
	var found []Finding
	var what, remedy string
	var active bool
	var behind, wal int64
	_, err = pgx.ForEachRow(rows, []any{&what, &remedy, &active, &behind, &wal}, func() error {
		switch {
		case !active:
			found = append(found, warn(check, remedy, "nobody reads %s: it keeps dead rows of the last %d transactions and %d MiB of WAL", what, behind, wal>>20))
		case behind > xminAgeMax:
			found = append(found, warn(check, remedy, "%s is %d transactions behind: dead rows are kept for it", what, behind))
		}
		return nil
	})
	if err != nil {
		return broken(check, err)
	}
	if len(found) == 0 {
		found = append(found, ok(check, "no replication slot and no standby holds dead rows back"))
	}
	return found
}
