package pipeline

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

const (
	// KeysMax bounds how many keys of a kind are counted.
	KeysMax = 10_000
	// KeyStuckAfter is how long a key may be unfinished with no process working on it. A completer looks
	// for work every ten seconds, and postpones failing keys by minutes.
	KeyStuckAfter = time.Hour
)

// Keys counts the idempotency keys that are not finished, each kind up to KeysMax.
type Keys struct {
	Running       int64 `json:"running"`
	Indeterminate int64 `json:"indeterminate"`
	Abandoned     int64 `json:"abandoned"`
	// OldestUnfinishedSeconds is the time since the oldest running one was first requested; 0: none
	// is running.
	OldestUnfinishedSeconds float64 `json:"oldest_unfinished_seconds"`
	// Stuck are running, no process has worked on them for an hour, and they are not postponed.
	Stuck int64 `json:"stuck"`
	// Failing are running, were first requested more than an hour ago, and are postponed.
	Failing int64 `json:"failing"`
	// OldestExpiredSeconds is the time since the oldest window ended of a finished key that still
	// exists; 0: there is none.
	OldestExpiredSeconds float64 `json:"oldest_expired_seconds"`
}

// ReadKeys counts idempotency keys. It reads only the partial indexes.
func ReadKeys(ctx context.Context, db operator.Querier, schema string) (k Keys, err error) {
	err = db.QueryRow(ctx, migrations.InSchema(keysSQL, schema), KeysMax, KeyStuckAfter).
		Scan(&k.Running, &k.OldestUnfinishedSeconds, &k.Stuck, &k.Failing, &k.Indeterminate, &k.Abandoned, &k.OldestExpiredSeconds)
	if err != nil {
		return k, fmt.Errorf("count idempotency keys: %w", err)
	}
	return k, nil
}
