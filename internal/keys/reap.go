package keys

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/operator"
)

const (
	// ReapMax bounds how many keys one transaction of Reap forgets.
	ReapMax = 1000
	// ExpiredMax bounds how many Expired counts.
	ExpiredMax = 1_000_000
)

// Execer is a connection or a pool, outside of transactions.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Reap forgets finished keys whose window is over, by the database's clock, in small transactions, and calls progress
// after each with how many it were so far. Keys that are not finished stay, however old they are, but for those that only
// count failures (Row.Counts); those whose work committed by itself become indeterminate. After an error what was forgotten
// stays forgotten.
func Reap(ctx context.Context, db Execer, schema string, progress func(reaped int64)) (reaped int64, err error) {
	for {
		tag, err := db.Exec(ctx, inSchema(reapSQL, schema), ReapMax)
		if err != nil {
			return reaped, fmt.Errorf("forget finished keys: %w", err)
		}
		if tag.RowsAffected() == 0 { // some of a full page may be left to a person
			return reaped, nil
		}
		reaped += tag.RowsAffected()
		progress(reaped)
	}
}

// Expired counts the keys that Reap would forget, at most ExpiredMax.
func Expired(ctx context.Context, db operator.Querier, schema string) (n int64, err error) {
	if err := db.QueryRow(ctx, inSchema(expiredSQL, schema), ExpiredMax).Scan(&n); err != nil {
		return 0, fmt.Errorf("count keys whose window is over: %w", err)
	}
	return n, nil
}
