package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// Limits on what blocks others. Transactions that write to an outbox are short; a busy server
// starts xminAgeMax transactions within hours.
const (
	openMax    = 10 * time.Minute
	xminAgeMax = 10_000_000
)

// OpenTransactions finds transactions that have been open for too long. Those that write keep the
// relay's floor and their slot of the outbox; all of them keep vacuum from removing dead rows.
func OpenTransactions(ctx context.Context, db operator.Querier) []Finding {
	const check = "transactions"
	var found []Finding
	oldest := ""
	var what, remedy string
	var seconds float64
	var writes bool
	err := operator.Each(ctx, db, "read open transactions", migrations.DefaultSchema, openSQL, nil, []any{&what, &remedy, &seconds, &writes}, func() error {
		open := age(seconds)
		if oldest == "" && writes {
			oldest = fmt.Sprintf("the oldest transaction that writes has been open for %s: %s; it does not stall the relay, but rows above its floor are kept", human.Duration(open), what)
		}
		switch {
		case open < openMax:
		case writes:
			found = append(found, warn(check, remedy, "%s has written and has been open for %v: its rows are not published before it commits, its slot of the outbox is not truncated, and vacuum removes no row that died since", what, open))
		default:
			found = append(found, warn(check, remedy, "%s has held a snapshot for %v: vacuum removes no row that died since, and slots of the outbox that it has read (as pg_dump does) are not truncated", what, open))
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
	return []Finding{ok(check, "no open transaction that writes (as far as this role may see)")}
}

// ReplicationSlots finds slots that no process reads, or whose reader is far behind. They keep dead
// rows and, indefinitely, WAL.
func ReplicationSlots(ctx context.Context, db operator.Querier) []Finding {
	const check = "replication"
	var found []Finding
	var what, remedy string
	var active bool
	var behind, wal int64
	err := operator.Each(ctx, db, "read what holds dead rows back", migrations.DefaultSchema, holdersSQL, nil, []any{&what, &remedy, &active, &behind, &wal}, func() error {
		switch {
		case !active:
			found = append(found, warn(check, remedy, "no process reads %s: it keeps the dead rows of the last %s and %d MiB of WAL", what, human.Count(behind, "transaction"), wal>>20))
		case behind > xminAgeMax:
			found = append(found, warn(check, remedy, "%s is %s behind: vacuum keeps dead rows for it", what, human.Count(behind, "transaction")))
		}
		return nil
	})
	if err != nil {
		return broken(check, err)
	}
	return orElse(found, ok(check, "no replication slot and no standby holds dead rows back"))
}
