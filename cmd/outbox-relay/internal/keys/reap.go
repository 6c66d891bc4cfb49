package keys

import (
	"context"
	"fmt"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// ExpiredMax bounds how many keys Expired counts.
const ExpiredMax = 1_000_000

// Expired counts the keys that idempotency.Reap would forget, at most ExpiredMax.
func Expired(ctx context.Context, db operator.Querier, schema string) (n int64, err error) {
	if err := db.QueryRow(ctx, inSchema(expiredSQL, schema), ExpiredMax).Scan(&n); err != nil {
		return 0, fmt.Errorf("count keys whose window is over: %w", err)
	}
	return n, nil
}
