package keys

import (
	"context"
	"fmt"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

const (
	// ReapMax bounds how many keys one transaction of Reap deletes.
	ReapMax = 1000
	// ExpiredMax bounds how many Expired counts.
	ExpiredMax = 1_000_000
)

// Reaped is what Reap did.
type Reaped struct {
	Forgotten int64
	// Doubted are keys that need a decision now.
	Doubted int64
}

// Reap deletes finished keys whose window is over, by the database's clock, in small transactions.
// After each it calls progress with the number so far. db is a connection or a pool, outside of
// transactions. Unfinished keys that nothing can finish are deleted if nothing of them happened, and else
// abandoned. Keys whose work committed by itself become indeterminate. After an error, what was deleted
// stays deleted.
func Reap(ctx context.Context, db operator.Querier, schema string, progress func(Reaped)) (Reaped, error) {
	return reap(ctx, db, schema, ReapMax, progress)
}

func reap(ctx context.Context, db operator.Querier, schema string, page int64, progress func(Reaped)) (all Reaped, err error) {
	for {
		var now Reaped
		if err := db.QueryRow(ctx, inSchema(reapSQL, schema), page).Scan(&now.Forgotten, &now.Doubted); err != nil {
			return all, fmt.Errorf("forget finished keys: %w", err)
		}
		all.Forgotten, all.Doubted = all.Forgotten+now.Forgotten, all.Doubted+now.Doubted
		if now != (Reaped{}) {
			progress(all)
		}
		if now.Forgotten+now.Doubted < page { // keys that are left to a person fill a page, too
			return all, nil
		}
	}
}

// Expired counts the keys that Reap would delete, at most ExpiredMax.
func Expired(ctx context.Context, db operator.Querier, schema string) (n int64, err error) {
	if err := db.QueryRow(ctx, inSchema(expiredSQL, schema), ExpiredMax).Scan(&n); err != nil {
		return 0, fmt.Errorf("count keys whose window is over: %w", err)
	}
	return n, nil
}
