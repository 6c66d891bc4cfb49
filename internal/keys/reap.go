package keys

import (
	"context"
	"fmt"

	"github.com/effectonce/effectonce/internal/operator"
)

const (
	// ReapMax bounds how many keys one transaction of Reap forgets.
	ReapMax = 1000
	// ExpiredMax bounds how many Expired counts.
	ExpiredMax = 1_000_000
)

// Reaped is what Reap did.
type Reaped struct {
	Forgotten int64
	// Doubted are those whose work committed by itself, and left no outcome: they are indeterminate now.
	Doubted int64
}

// Reap forgets finished keys whose window is over, by the database's clock, in small transactions, and calls progress
// after each with how many it were so far; db is a connection or a pool, outside of transactions. Keys that are not finished stay, however old they are, but for those that only
// count failures (Row.Counts); those whose work committed by itself become indeterminate. After an error what was forgotten
// stays forgotten.
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
		if now.Forgotten+now.Doubted < page { // what is left to a person fills a page, too
			return all, nil
		}
	}
}

// Expired counts the keys that Reap would forget, at most ExpiredMax.
func Expired(ctx context.Context, db operator.Querier, schema string) (n int64, err error) {
	if err := db.QueryRow(ctx, inSchema(expiredSQL, schema), ExpiredMax).Scan(&n); err != nil {
		return 0, fmt.Errorf("count keys whose window is over: %w", err)
	}
	return n, nil
}
